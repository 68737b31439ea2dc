"""Other packages beside ours in a benchmark: a process of their own environment that decodes."""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager

from metasd_bandits import ConfigError
from metasd_runtime.bench import peer_process
from metasd_runtime.model.load import LoadedModel

__all__ = ["Peers", "RefusedError"]


class RefusedError(Exception):
    """A peer does not do this work; the message says why."""


class Peers(AbstractContextManager["Peers"]):
    """The other packages (`peer_process.ENGINES`), in a process of another Python.

    They load the target anew, from its folder, in the same type and on the same kind of device.

    Parameters
    ----------
    python : str
        The interpreter of an environment that has them, torch and transformers.
    loaded : LoadedModel
        The target.

    Raises
    ------
    ConfigError
        If the target has no folder, or there is no such interpreter.
    """

    def __init__(self, python: str, loaded: LoadedModel) -> None:
        if loaded.path is None:
            raise ConfigError(
                f"peers read the target from a folder, which {loaded.name!r} is not; download it "
                "and name its folder"
            )
        dtype = str(loaded.dtype).removeprefix("torch.")
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115
        try:
            self._process = subprocess.Popen(
                [python, "-P", peer_process.__file__, str(loaded.path), dtype, loaded.device.type],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                text=True,
            )
        except OSError as error:
            self._errors.close()
            raise ConfigError(
                f"peers={python!r} cannot be started ({error.strerror}); give the Python of an "
                f"environment that has {' and '.join(peer_process.ENGINES)}"
            ) from None

    def __exit__(self, *error: object) -> None:
        self._process.communicate()  # no more lines: it ends
        self._errors.close()

    def run(
        self, engine: str, rows: Sequence[list[int]], new: int, ends: Collection[int] = ()
    ) -> tuple[list[list[int]], float]:
        """Decode greedily with prompt lookup.

        Parameters
        ----------
        engine : str
            A name in `metasd_runtime.bench.peer_process.ENGINES`.
        rows : sequence of lists of int
            Prompts, decoded together.
        new : int
            Most tokens emitted for each.
        ends : collection of int
            Tokens at which a text stops; empty: none does.

        Returns
        -------
        (list of lists of int, float)
            What each row emitted, its end included, and the seconds it took, measured there.

        Raises
        ------
        RefusedError
            If the package is not installed, cannot do this, or its process ended.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        asked = {"engine": engine, "rows": list(rows), "new": new, "ends": sorted(ends)}
        try:
            print(json.dumps(asked), file=self._process.stdin, flush=True)
            answer = json.loads(self._process.stdout.readline())
        except (BrokenPipeError, json.JSONDecodeError):
            self._errors.seek(0)
            last = self._errors.read().strip().splitlines()[-1:] or ["it said nothing"]
            raise RefusedError(f"the peers' process ended: {last[0]}") from None
        if "refused" in answer:
            raise RefusedError(answer["refused"])
        return answer["tokens"], answer["seconds"]
