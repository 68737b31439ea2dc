"""`check_drafter`: does a drafter keep the contract? One call, for anybody's class."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from metasd_bandits.testing import ContractError
from metasd_runtime.decoding.drafter import Draft, Drafter, DrafterUnavailableError, check_draft
from metasd_runtime.decoding.loop import Query, decode
from metasd_runtime.decoding.router import Router
from metasd_runtime.decoding.sampling import Sampling
from metasd_runtime.decoding.stopping import Stopping
from metasd_runtime.model.target import Target

__all__ = ["check_drafter"]

_TOKENS = 24


def check_drafter(drafter: Drafter, target: Target) -> None:
    """Decode with a drafter, greedily and sampling, and look at every draft.

    Parameters
    ----------
    drafter : Drafter
        What it had learned is lost.
    target : Target
        A small one will do.

    Raises
    ------
    metasd_bandits.testing.ContractError
        At the first fault; the message says what to fix.
    """
    if not isinstance(drafter, Drafter):
        raise ContractError(
            "is a drafter", f"{drafter!r} is none; derive its class from metasd_runtime.Drafter"
        )
    if not (isinstance(drafter.name, str) and drafter.name):
        raise ContractError(
            "has a name", f"name={drafter.name!r}; give the class a text of its own"
        )
    for do_sample in (False, True):
        one, other = drafter.clone(), drafter.clone()
        if _decode(one, target, do_sample) != _decode(other, target, do_sample):
            raise ContractError(
                "clones draft alike",
                f"two clones of {drafter.name} drafted differently in the same query; draw through "
                "sampling.propose alone, and copy in clone() all that propose() reads",
            )
        _decode(drafter, target, do_sample)


def _decode(drafter: Drafter, target: Target, do_sample: bool) -> list[list[int]]:
    watched = _Watched(drafter, target.vocab_size)
    prompt = [t % target.vocab_size for t in (3, 1, 4, 1, 5, 3, 1, 4)]
    sampling = Sampling(do_sample=do_sample, seed=1)
    query = Query("0", prompt, sampling, Stopping(len(prompt) + _TOKENS), plain_step=1.0)
    for _ in decode(query, target, Router([watched], "uniform", "bd", 4)):
        if watched.fault is not None:
            raise watched.fault
    if watched.fault is not None:
        raise watched.fault
    return watched.drafts


class _Watched(Drafter):
    """A drafter whose every draft is looked at, and kept."""

    def __init__(self, drafter: Drafter, vocab_size: int) -> None:
        self.name, self.needs_features = drafter.name, drafter.needs_features
        self.fault: ContractError | None = None
        self.drafts: list[list[int]] = []
        self._drafter, self._vocab_size = drafter, vocab_size

    def start(self, tokens: Sequence[int]) -> None:
        for drafter in self._drafter.bases:
            drafter.start(tokens)

    def commit(self, tokens: Sequence[int], features: Tensor | None = None) -> None:
        for drafter in self._drafter.bases:
            drafter.commit(tokens, features if drafter.needs_features else None)

    def propose(self, tokens: Sequence[int], n: int, sampling: Sampling) -> Draft:
        before = list(tokens)
        try:
            draft = self._drafter.propose(tokens, n, sampling)
            self._look(draft, n, sampling)
        except DrafterUnavailableError:
            raise
        except ContractError as fault:
            self.fault = fault
            raise
        except Exception as error:
            self.fault = self._broken("propose works", f"raised {type(error).__name__}: {error}")
            raise self.fault from error
        if list(tokens) != before:
            self.fault = self._broken("the text is read only", "changed `tokens`; copy it first")
            raise self.fault
        self.drafts.append(list(draft.tokens))
        return draft

    def _look(self, draft: Draft, n: int, sampling: Sampling) -> None:
        if not isinstance(draft, Draft):
            raise self._broken("a draft is a Draft", f"gave {draft!r}; return Draft(tokens)")
        try:
            check_draft(replace(draft), n, self._vocab_size, sampling.do_sample)
        except (ValueError, TypeError) as error:
            raise self._broken("drafts are sound", f"{error}; mend what propose() gives") from None
        drawn = [token for token, *_ in sampling.drawn]
        if drawn and drawn != list(draft.tokens):
            raise self._broken(
                "what was drawn is drafted",
                f"drew {drawn} and drafted {draft.tokens}; leave nothing out that was drawn",
            )
        if drawn and draft.probs is None:
            raise self._broken("draws tell their probs", "drew tokens; give Draft(tokens, probs)")

    def _broken(self, check: str, what: str) -> ContractError:
        return ContractError(check, f"{self.name} {what}")
