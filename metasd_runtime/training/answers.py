"""Step one of training: the target answers the prompts, in batches, resumably.

Heads learn from the target's hidden states, which it computes anyway while it answers; they are
kept beside the answers (3.4 kB a token for three layers of the default target).

A domain's jobs are its prompts, held-out ones first, each answered greedily or at T = 1 by turns,
then all of them the other way round. Jobs are cut into batches of fixed composition, and a batch
is the unit of work: it is written whole, and its random numbers depend on nothing but the seed,
the domain and its number. So an interrupted run continues to the very same answers.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from metasd_runtime.model.hf import cache_argument, cache_of, new_layers
from metasd_runtime.training.prompts import Prompt

__all__ = ["Answer", "Answerer", "answer_all", "ends_of", "features_of", "read_answers"]


@dataclass(frozen=True)
class Answer:
    """A prompt and what the target said.

    Attributes
    ----------
    id : str
        The prompt's.
    batch : int
        The batch it was answered in.
    held_out : bool
        For evaluation only.
    sampled : bool
        Drawn at T = 1, or greedy.
    prompt, answer : list of int
        Tokens; the answer ends with the end-of-sequence token unless it was cut.
    """

    id: str
    batch: int
    held_out: bool
    sampled: bool
    prompt: list[int]
    answer: list[int]


@dataclass(frozen=True)
class _Job:
    prompt: Prompt
    held_out: bool
    sampled: bool


def jobs_of(prompts: Sequence[Prompt], held_out: int, batch: int) -> list[list[_Job]]:
    """A domain's jobs in batches; the last `held_out` prompts come first, greedily only.

    Training prompts are answered greedily or sampled by turns, then the other way round.
    """
    cut = len(prompts) - held_out
    held = [_Job(prompt, True, False) for prompt in prompts[cut:]]
    train = [
        _Job(prompt, False, (i + turn) % 2 == 1)
        for turn in range(2)
        for i, prompt in enumerate(prompts[:cut])
    ]
    return [part[i : i + batch] for part in (held, train) for i in range(0, len(part), batch)]


def read_answers(path: Path) -> list[Answer]:
    """The answers in a file; a last line that a crash cut off is left out."""
    if not path.exists():
        return []
    answers = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            answers.append(Answer(**json.loads(line)))
        except json.JSONDecodeError:
            break
    return answers


def answer_all(
    answerer: Answerer,
    domains: dict[str, Sequence[Prompt]],
    folder: Path,
    *,
    held_out: int,
    batch: int,
    tokens: int,
    seed: int,
    progress: Callable[[str, int], None] = lambda domain, written: None,
    stop: Callable[[], bool] = lambda: False,
) -> dict[str, list[Answer]]:
    """Answer until every domain has `tokens` answer tokens for training, or no prompt is left.

    The domain with the fewest tokens goes next, so that all advance together.

    Parameters
    ----------
    folder : Path
        Gets one ``<domain>.jsonl`` each; what is there already is taken over.
    held_out : int
        Prompts at the end of each domain that are kept for evaluation.
    progress : callable
        Told the domain and its training tokens after each batch.
    stop : callable
        Asked before each batch; where it says True, what there is is returned.
    """
    folder.mkdir(parents=True, exist_ok=True)
    batches = {name: jobs_of(prompts, held_out, batch) for name, prompts in domains.items()}
    answers = {}
    for name in domains:
        path = folder / f"{name}.jsonl"
        answers[name] = _whole_batches(read_answers(path), batches[name])
        _rewrite(path, answers[name])
    while not stop():
        written = {
            name: sum(len(a.answer) for a in done if not a.held_out)
            for name, done in answers.items()
        }
        next_batch = {
            name: 1 + max((a.batch for a in answers[name]), default=-1) for name in domains
        }
        open_ = [n for n in domains if written[n] < tokens and next_batch[n] < len(batches[n])]
        if not open_:
            break
        name = min(open_, key=lambda n: (written[n], n))
        number = next_batch[name]
        made, features = answerer.answer(batches[name][number], number, _stream(seed, name, number))
        _save(features, features_path(folder, name, number))
        _append(folder / f"{name}.jsonl", made)
        answers[name] += made
        progress(name, written[name] + sum(len(a.answer) for a in made if not a.held_out))
    return answers


def _whole_batches(answers: list[Answer], batches: list[list[_Job]]) -> list[Answer]:
    """Without the last batch, if not all of it was written."""
    if not answers:
        return []
    last = answers[-1].batch
    whole = sum(answer.batch == last for answer in answers) == len(batches[last])
    return answers if whole else [answer for answer in answers if answer.batch < last]


def _stream(seed: int, domain: str, number: int) -> int:
    return zlib.crc32(f"{seed}/{domain}/{number}".encode())


def features_of(folder: Path, domain: str, batch: int) -> list[dict[str, Tensor]]:
    """The hidden states of one batch's texts, in the order of its answers.

    Returns
    -------
    list of dict
        ``features`` (length - 1, layers x hidden): at every token but the last;
        ``log_z`` (answer length,): the log-normaliser of the target's logits for each answer token.
    """
    stored = load_file(features_path(folder, domain, batch))
    rows = len(stored) // 2
    return [{k: stored[f"{i}.{k}"] for k in ("features", "log_z")} for i in range(rows)]


def features_path(folder: Path, domain: str, batch: int) -> Path:
    return folder / f"{domain}-{batch:04d}.safetensors"


def _save(features: list[dict[str, Tensor]], path: Path) -> None:
    beside = path.with_suffix(".partial")
    save_file({f"{i}.{k}": v for i, row in enumerate(features) for k, v in row.items()}, beside)
    beside.replace(path)


def _append(path: Path, answers: Sequence[Answer]) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write("".join(json.dumps(asdict(answer)) + "\n" for answer in answers))


def _rewrite(path: Path, answers: Sequence[Answer]) -> None:
    beside = path.with_suffix(".partial")
    beside.unlink(missing_ok=True)
    beside.touch()
    _append(beside, answers)
    beside.replace(path)


class Answerer:
    """The target, answering batches of prompts.

    Parameters
    ----------
    model : PreTrainedModel
    eos : set of int
        Tokens that end an answer.
    max_new_tokens : int
    layers : tuple of int
        Hidden states to keep, numbered as in `metasd_runtime.decoding.drafter.Drafter`.
    """

    def __init__(
        self, model: Any, eos: set[int], max_new_tokens: int, layers: tuple[int, ...] = ()
    ) -> None:
        self.model = model
        self.eos = eos
        self.max_new_tokens = max_new_tokens
        self.layers = layers

    @torch.inference_mode()
    def answer(
        self, jobs: Sequence[_Job], batch: int, seed: int
    ) -> tuple[list[Answer], list[dict[str, Tensor]]]:
        """Answer one batch; rows that have ended leave it once they are a third of it."""
        draws = torch.Generator().manual_seed(seed)
        rows = _Rows(
            self.model, [job.prompt.tokens for job in jobs], self.max_new_tokens, self.layers
        )
        sampled = torch.tensor([job.sampled for job in jobs])
        texts: list[list[int]] = [[] for _ in jobs]
        logits = rows.prefill()
        for step in range(self.max_new_tokens):
            u = torch.rand(len(jobs), generator=draws)
            tokens = _choose(logits, sampled[rows.kept], u[rows.kept])
            for row, token in zip(rows.kept.tolist(), tokens.tolist(), strict=True):
                if not texts[row] or texts[row][-1] not in self.eos:
                    texts[row].append(token)
            live = [texts[row][-1] not in self.eos for row in rows.kept.tolist()]
            if step == self.max_new_tokens - 1 or not any(live):
                break
            if 3 * sum(live) <= 2 * len(live):
                keep = torch.tensor(live).nonzero()[:, 0]
                rows.keep(keep)
                tokens = tokens[keep]
            logits = rows.step(tokens)
        answers = [
            Answer(job.prompt.id, batch, job.held_out, job.sampled, job.prompt.tokens, text)
            for job, text in zip(jobs, texts, strict=True)
        ]
        return answers, [rows.features(i, len(text)) for i, text in enumerate(texts)]


def ends_of(model: Any) -> set[int]:
    """The tokens that end the model's answers."""
    eos = model.generation_config.eos_token_id
    return set(eos if isinstance(eos, list) else [eos]) - {None}


def _choose(logits: Tensor, sampled: Tensor, u: Tensor) -> Tensor:
    """First maximum, or the token at quantile u."""
    best = logits.argmax(-1).cpu()
    if not bool(sampled.any()):
        return best
    cumulative = logits[sampled.to(logits.device)].softmax(-1).double().cumsum(-1).cpu()
    quantile = (u[sampled].double() * cumulative[:, -1])[:, None]
    best[sampled] = torch.searchsorted(cumulative, quantile, right=True)[:, 0].clamp(
        max=logits.shape[-1] - 1
    )
    return best


class _Rows:
    """Texts side by side, padded on the left, their cache, and what is kept of the forwards."""

    def __init__(
        self, model: Any, prompts: Sequence[list[int]], room: int, layers: tuple[int, ...]
    ) -> None:
        self.model, self.layers = model, layers
        self.width = max(len(prompt) for prompt in prompts)
        self.lengths = [len(prompt) for prompt in prompts]
        ids = torch.zeros(len(prompts), self.width, dtype=torch.long)
        mask = torch.zeros(len(prompts), self.width + room, dtype=torch.long)
        for row, prompt in enumerate(prompts):
            ids[row, self.width - len(prompt) :] = torch.tensor(prompt)
            mask[row, self.width - len(prompt) :] = 1
        self.ids, self.mask = ids.to(model.device), mask.to(model.device)
        self.next_position = self.mask[:, : self.width].sum(-1)
        self.kept = torch.arange(len(prompts))
        self.storage = new_layers(model, self.width + room)
        self.cache = {cache_argument(model): cache_of(self.storage)}
        hidden = model.config.get_text_config(decoder=True).hidden_size
        shape = (len(prompts), self.width + room, hidden * len(layers))
        self.states = torch.zeros(shape, dtype=model.dtype)
        self.log_z = torch.zeros(len(prompts), room)
        self.answered = 0

    def prefill(self) -> Tensor:
        """Read the prompts; the head at the last position only (all rows end in one column)."""
        mask = self.mask[:, : self.width]
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        output = self.model.base_model(
            input_ids=self.ids[:, :-1],
            attention_mask=mask[:, :-1],
            position_ids=positions[:, :-1],
            use_cache=True,
            output_hidden_states=bool(self.layers),
            **self.cache,
        )
        self._note(output.hidden_states, 0, self.width - 1)
        return self._forward(self.ids[:, -1:], mask, positions[:, -1:])

    def step(self, tokens: Tensor) -> Tensor:
        """Read each row's next token; the logits behind it."""
        self.width += 1
        logits = self._forward(
            tokens[:, None].to(self.model.device),
            self.mask[:, : self.width],
            self.next_position[:, None],
        )
        self.next_position += 1
        return logits

    def keep(self, rows: Tensor) -> None:
        """Leave out all but these rows."""
        self.kept = self.kept[rows]
        here = rows.to(self.model.device)
        self.mask, self.next_position = self.mask[here], self.next_position[here]
        for layer in self.storage:
            assert layer.keys is not None
            assert layer.values is not None
            layer.keys, layer.values = layer.keys[here], layer.values[here]

    def features(self, row: int, answered: int) -> dict[str, Tensor]:
        """What was kept of one row: at its prompt and all its answer but the last token."""
        begin = self.states.shape[1] - self.log_z.shape[1] - self.lengths[row]
        end = begin + self.lengths[row] + answered - 1
        return {
            "features": self.states[row, begin:end].clone(),
            "log_z": self.log_z[row, :answered].clone(),
        }

    def _forward(self, ids: Tensor, mask: Tensor, positions: Tensor) -> Tensor:
        output = self.model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions,
            use_cache=True,
            logits_to_keep=1,
            output_hidden_states=bool(self.layers),
            **self.cache,
        )
        logits = output.logits[:, -1].float()
        self._note(output.hidden_states, self.width - 1, self.width)
        self.log_z[self.kept, self.answered] = logits.logsumexp(-1).cpu()
        self.answered += 1
        return logits

    def _note(self, states: Any, begin: int, end: int) -> None:
        if self.layers:
            chosen = torch.cat([states[layer] for layer in self.layers], dim=-1)
            self.states[self.kept, begin:end] = chosen.cpu()
