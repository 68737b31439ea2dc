"""Training the EAGLE head: it drafts as it was trained, learns, resumes, and stops at nonsense."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from metasd_runtime.decoding.sampling import Sampling
from metasd_runtime.drafters import output_head
from metasd_runtime.drafters.eagle import chain
from metasd_runtime.drafters.eagle.chain import Eagle
from metasd_runtime.drafters.eagle.head import EagleShape
from metasd_runtime.model.target import Target
from metasd_runtime.training.answers import read_answers
from metasd_runtime.training.corpus import Batch, Corpus, batches, draft_vocabulary
from metasd_runtime.training.eagle_model import EagleModel
from metasd_runtime.training.evaluate import evaluate
from metasd_runtime.training.initialise import initial_weights
from metasd_runtime.training.learn import (
    Learning,
    TrainingError,
    learn,
    target_probabilities,
)

LAYERS = (1, 2, 3)


def new_head(model: Any, corpus: Corpus) -> tuple[EagleModel, Tensor]:
    shape = EagleShape.of(model.config, LAYERS)
    weights = initial_weights(model, shape, corpus.train)
    head = EagleModel(shape, weights, model.get_input_embeddings().weight)
    return head, draft_vocabulary(corpus.train, 30, 40)[0]


def test_kept_states_are_the_models_own(world: Any) -> None:
    model, _, corpus = world
    for text in corpus.train[:6]:
        output = model(torch.tensor([text.tokens]), output_hidden_states=True)
        features, log_z = text.states()
        expected = torch.cat([output.hidden_states[layer][0] for layer in LAYERS], -1)
        assert torch.allclose(features, expected[:-1], atol=1e-4)
        normaliser = output.logits[0].logsumexp(-1)[-text.answered - 1 : -1]
        assert torch.allclose(log_z, normaliser, atol=1e-4)


def test_greedy_answers_are_greedy_and_sampled_ones_are_not_all(world: Any) -> None:
    model, folder, _ = world
    answers = read_answers(folder / "d.jsonl")
    kinds = {True: 0, False: 0}
    for answer in answers:
        ids = torch.tensor([[*answer.prompt, *answer.answer]])
        best = model(ids).logits[0].argmax(-1)[len(answer.prompt) - 1 : -1].tolist()
        if not answer.sampled:
            assert answer.answer == best
        kinds[answer.sampled] += answer.answer == best
    assert kinds[True] < sum(answer.sampled for answer in answers)
    assert all(not answer.sampled for answer in answers if answer.held_out)


def test_training_sees_what_drafting_sees(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """At every depth the unrolled head gives the logits the drafter has along the same tokens."""
    model, _, corpus = world
    for module in (chain, output_head):
        monkeypatch.setattr(module, "quantise", lambda w: (w.float(), torch.ones(w.shape[0])))
    head, vocabulary = new_head(model, corpus)
    target = Target(model)
    drafter = Eagle(head.shape, head.weights(), vocabulary, target)
    texts = corpus.train[:3]
    batch = Batch.of(texts, 32, torch.device("cpu"))
    rows = model.lm_head.weight[vocabulary]
    depths = 4
    with torch.no_grad():
        unrolled = [(head.logits(out, rows), index.tolist()) for out, index in head(batch, depths)]
    checked = 0
    first = 0
    for text in texts:
        prompt = len(text.tokens) - text.answered
        for begin in range(prompt, len(text.tokens)):
            seen = drafted_logits(drafter, target, text.tokens, begin, depths)
            for depth, logits in enumerate(seen):
                trained, index = unrolled[depth]
                row = index.index(first + begin - prompt + depth)
                assert torch.allclose(trained[row], logits[vocabulary], atol=2e-3)
                checked += 1
        first += text.answered
    assert checked > 100


def drafted_logits(
    drafter: Eagle, target: Target, tokens: list[int], begin: int, depths: int
) -> list[Tensor]:
    """The drafter's logits where it is made to draft the text's own tokens."""
    target.reset()
    features = target.prefill(tokens[: begin - 1], LAYERS)
    drafter.start(tokens[:begin])
    drafter.commit(tokens[:begin], features)
    forced = _Forced(tokens[begin:])
    drafter.propose(tokens[:begin], min(depths, len(tokens) - begin), forced)
    return forced.seen


class _Forced(Sampling):
    def __init__(self, tokens: list[int]) -> None:
        super().__init__()
        self.tokens, self.seen = tokens, list[Tensor]()

    def propose(self, logits: Tensor, tokens: Any) -> tuple[int, Tensor]:
        self.seen.append(logits.clone())
        return self.tokens[len(self.seen) - 1], logits.softmax(-1)


def test_targets_probabilities_are_its_softmax(world: Any) -> None:
    model, _, corpus = world
    vocabulary = draft_vocabulary(corpus.train, 30, 40)[0]
    text = corpus.train[1]
    batch = Batch.of([text], 32, torch.device("cpu"))
    p = target_probabilities(batch, model.lm_head.weight[vocabulary])
    expected = model(torch.tensor([text.tokens])).logits[0].softmax(-1)[-text.answered - 1 : -1]
    assert torch.allclose(p, expected[:, vocabulary], atol=1e-4)


def train(
    world: Any, path: Path, learning: Learning, stop_after: int | None = None, spoilt: float = 0.0
) -> Any:
    model, _, corpus = world
    head, vocabulary = new_head(model, corpus)
    spoil(head, spoilt)
    losses: list[float] = []
    learn(
        head,
        batches([corpus.train], learning.batch_tokens, 5),
        model.lm_head.weight[vocabulary],
        learning,
        path,
        lambda step, steps, loss: losses.append(loss),
        lambda: stop_after is not None and len(losses) >= stop_after,
    )
    return head, losses


def spoil(head: EagleModel, share: float) -> None:
    """Take away some of what the head begins with."""
    with torch.no_grad():
        for name in ("fuse", "embed", "chain"):
            head.w[name] *= 1 - share


def test_it_learns_what_it_does_not_begin_with(world: Any, tmp_path: Path) -> None:
    model, _, corpus = world
    before, vocabulary = new_head(model, corpus)
    spoil(before, 0.95)
    learning = Learning(tokens=64 * 60, batch_tokens=64, rate=3e-3)
    after, _ = train(world, tmp_path / "state.pt", learning, spoilt=0.95)
    rows = model.lm_head.weight
    measured = [evaluate(head, corpus.train, rows, vocabulary, 4) for head in (before, after)]
    assert measured[1].block_divergence > measured[0].block_divergence + 0.1
    assert measured[1].tokens_per_round > measured[0].tokens_per_round


def test_it_begins_with_a_good_guess(world: Any) -> None:
    """Regression alone foresees far more of what comes than the layer fed with noise does."""
    model, _, corpus = world
    head, vocabulary = new_head(model, corpus)
    rows = model.lm_head.weight
    begun = evaluate(head, corpus.held_out, rows, vocabulary, 3)
    with torch.no_grad():
        for name in ("fuse", "embed", "chain"):
            noise = torch.randn(head.w[name].shape, generator=torch.Generator().manual_seed(1))
            head.w[name].copy_(noise * head.w[name].std())
    noisy = evaluate(head, corpus.held_out, rows, vocabulary, 3)
    assert begun.divergence[0] > noisy.divergence[0] + 0.3


def test_resumed_training_equals_uninterrupted(world: Any, tmp_path: Path) -> None:
    learning = Learning(tokens=64 * 12, batch_tokens=64, checkpoint=3)
    whole, _ = train(world, tmp_path / "whole.pt", learning)
    for stop in (1, 4, 100):
        parts, _ = train(world, tmp_path / "parts.pt", learning, stop)
    for name, value in whole.weights().items():
        assert torch.equal(value, parts.weights()[name])


def test_nan_stops_training_and_keeps_the_last_good_state(world: Any, tmp_path: Path) -> None:
    path = tmp_path / "state.pt"
    steps = Learning(tokens=64 * 6, batch_tokens=64, checkpoint=2)
    train(world, path, steps, 4)
    good = torch.load(path, weights_only=True)
    model, _, corpus = world
    head, vocabulary = new_head(model, corpus)
    broken = model.lm_head.weight[vocabulary] * math.nan
    with pytest.raises(TrainingError, match=r"the state of step 4 is kept"):
        learn(head, batches([corpus.train], 64, 5), broken, steps, path)
    kept = torch.load(path, weights_only=True)
    assert kept["step"] == good["step"] == 4
    for name, value in good["model"].items():
        assert torch.equal(value, kept["model"][name])
        assert torch.equal(value, head.state_dict()[name])
