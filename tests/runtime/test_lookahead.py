"""Lookahead: its window is plain decoding of each path, its drafts are lossless and learned."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from enumeration import ByLastReward, CopyDrafter, ModelTarget, decode_law, deviation, own_law
from hypothesis import given
from hypothesis import strategies as st

from metasd_bandits.checks import ConfigError
from metasd_runtime.decoding.drafter import DrafterUnavailableError
from metasd_runtime.decoding.sampling import Sampling
from metasd_runtime.drafters.lookahead import GuessPool, Lookahead
from metasd_runtime.metasd import MetaSD
from metasd_runtime.model.target import Target

VOCAB = 24


@pytest.fixture(scope="module")
def model(tiny_llama: Callable[..., Any]) -> Any:
    return tiny_llama(2, vocab=VOCAB, layers=3, context=96, sharpness=10.0)


@given(st.lists(st.tuples(*[st.integers(0, 2)] * 3), max_size=12), st.integers(1, 4))
def test_the_pool_keeps_the_latest_and_follows_the_most(
    guesses: list[tuple[int, ...]], size: int
) -> None:
    pool, latest = GuessPool(size), deque[tuple[int, ...]]()
    for guess in guesses:
        pool.add(5, guess)
        latest = deque([g for g in latest if g != guess] + [guess], size)
    path = pool.follow(5)
    assert pool.follow(4) == []
    assert len(path) == (3 if guesses else 0)
    for i, token in enumerate(path):
        votes = Counter(g[i] for g in latest if list(g[:i]) == path[:i])
        best = [t for t in votes if votes[t] == max(votes.values())]
        assert token == next(
            g[i] for g in reversed(latest) if list(g[:i]) == path[:i] and g[i] in best
        )


@pytest.mark.parametrize(("level", "window"), [(2, 1), (2, 5), (5, 7), (4, 2)])
def test_every_guess_is_the_targets_along_its_own_path(model: Any, level: int, window: int) -> None:
    """One masked forward equals plain decoding of text, oldest guesses, then the column's own."""
    text = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    target = Target(model)
    target.prefill(text[:-1])
    lookahead = Lookahead(target, level, window)
    lookahead.start(text)

    def plain(path: list[int]) -> int:
        return int(model(torch.tensor([path])).logits[0, -1].argmax())

    for iteration in range(1, level + 3):
        rows = list(lookahead._rows)
        assert len(rows) == min(iteration, level - 1)
        first = lookahead._look_ahead(text[-1])
        assert first == plain(text)
        newest = [
            plain([*text, *rows[0][: column + 1], *(row[column] for row in rows[1:])])
            for column in range(window)
        ]
        assert lookahead._rows == [*rows, newest][-(level - 1) :]
        if iteration >= level - 1:
            last = [row[-1] for row in (*rows, newest)]
            assert tuple(last[1:]) in lookahead._pool._guesses[last[0]]
        assert target.length == len(text) - 1


@pytest.mark.parametrize("n", [1, 3, 7])
def test_greedy_output_is_the_targets(model: Any, n: int) -> None:
    ids = torch.randint(0, VOCAB, (1, 9), generator=torch.Generator().manual_seed(n))
    plain = model.generate(ids, max_new_tokens=60, do_sample=False)
    metasd = MetaSD(
        model, drafters=["lookahead", "suffix"], policy="ucb", draft_length=n, reward="bd"
    )
    output = metasd.generate(ids, max_new_tokens=60, return_dict_in_generate=True)
    assert torch.equal(output.sequences, plain)
    own = [r for r in output.trace if r.arm == 0 and r.drafted]
    assert own
    assert all(r.accepted >= 1 for r in own)  # it begins with the target's own token


def test_it_finds_a_text_that_repeats_itself(permutation_lm: Callable[..., Any]) -> None:
    """A target that goes round in a circle of nine is foreseen in full before long."""
    model = permutation_lm([*range(1, 9), 0])
    metasd = MetaSD(model, drafters=["lookahead"], policy="ucb", draft_length=5, reward="bd")
    output = metasd.generate(
        torch.tensor([[0, 1, 2]]), max_new_tokens=60, return_dict_in_generate=True
    )
    assert output.new_tokens == [(3 + i) % 9 for i in range(60)]
    assert all(r.accepted == r.drafted for r in output.trace.rounds[6:])
    assert output.trace.rounds[8].drafted == 5


def test_its_law_is_the_targets(tiny_llama: Callable[..., Any]) -> None:
    """Summed over every coin of whole decodes, with a policy that looks at the divergence."""
    model = tiny_llama(4, vocab=3, layers=2, sharpness=6.0)
    target = ModelTarget(model)
    pool = [
        Lookahead(target, 3, 2),
        CopyDrafter("count", lambda text: (text[-1] + 1) % 3),
        CopyDrafter("copy", lambda text: text[0]),
    ]
    law = decode_law(target, pool, [0, 2], 4, policy=ByLastReward(0.3), draft_length=3)
    assert len(law) == 3**4
    assert deviation(law, own_law(target, [0, 2], 4)) < 1e-6


def test_it_declines_in_batches_and_at_the_end_of_the_context(model: Any) -> None:
    ids = torch.randint(0, VOCAB, (2, 8), generator=torch.Generator().manual_seed(4))
    plain = model.generate(ids, max_new_tokens=20, do_sample=False, pad_token_id=0)
    metasd = MetaSD(model, drafters=["lookahead", "suffix"], reward="bd")
    with pytest.warns(RuntimeWarning, match="'lookahead' is disabled.*storage to hold the text"):
        assert torch.equal(metasd.generate(ids, max_new_tokens=20, pad_token_id=0), plain)
    target = Target(model)
    lookahead = Lookahead(target, 5, 7)
    text = [1] * 86
    target.prefill(text[:-1])
    assert lookahead.propose(text, 5, Sampling()).tokens
    target.prefill([1])
    with pytest.raises(DrafterUnavailableError, match="ends at 96"):
        lookahead.propose([*text, 1], 5, Sampling())


@pytest.mark.parametrize("bad", [{"level": 1}, {"window": 0}, {"guesses": 0}])
def test_bad_parameters_are_refused(model: Any, bad: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(bad))}="):
        Lookahead(Target(model), **bad)
