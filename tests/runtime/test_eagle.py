"""The EAGLE drafter: lossless, its state a function of the text alone, its weights as told."""

from __future__ import annotations

import json
import random
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from metasd_runtime.decoding.drafter import DrafterUnavailableError, draft_block
from metasd_runtime.decoding.randomness import Purpose, uniform
from metasd_runtime.decoding.sampling import Sampling, draw
from metasd_runtime.drafters.eagle.chain import Eagle
from metasd_runtime.drafters.eagle.head import EagleShape
from metasd_runtime.drafters.matrix import Matrix, quantise
from metasd_runtime.drafters.pool import (
    PoolError,
    Trained,
    as_stored,
    checksums,
    fingerprint,
    load_pool,
    read_trained,
    save_pool,
)
from metasd_runtime.metasd import MetaSD
from metasd_runtime.model.target import Target

LAYERS = (1, 3)
VOCABULARY = torch.arange(0, 48, 2)


def random_weights(shape: EagleShape, seed: int) -> dict[str, Tensor]:
    draws = torch.Generator().manual_seed(seed)
    return {
        name: torch.ones(size) if len(size) == 1 else torch.randn(size, generator=draws) * 0.1
        for name, size in shape.sizes().items()
    }


@pytest.fixture(scope="module")
def model(tiny_llama: Callable[..., Any]) -> Any:
    return tiny_llama(5, vocab=48, layers=3, context=160, sharpness=10.0)


def new_drafter(model: Any, target: Target, seed: int = 0, layers: Any = LAYERS) -> Eagle:
    shape = EagleShape.of(model.config, layers)
    return Eagle(shape, random_weights(shape, seed), VOCABULARY, target, f"eagle-{seed}")


@pytest.mark.parametrize("n", [1, 3, 6])
def test_greedy_output_is_the_targets(model: Any, n: int) -> None:
    ids = torch.randint(0, 48, (1, 9), generator=torch.Generator().manual_seed(n))
    plain = model.generate(ids, max_new_tokens=60, do_sample=False)
    target = Target(model)
    drafters = [new_drafter(model, target), new_drafter(model, target, 1, (2, 3)), "suffix"]
    metasd = MetaSD(model, drafters=drafters, policy="ucb", draft_length=n, reward="bd")
    output = metasd.generate(ids, max_new_tokens=60, return_dict_in_generate=True)
    assert torch.equal(output.sequences, plain)
    assert all(arm.pulls > 0 for arm in output.statistics.arms[:3])


def test_a_prompt_of_one_token_has_nothing_to_read_yet(model: Any) -> None:
    metasd = MetaSD(model, drafters=[new_drafter(model, Target(model))], reward="bd")
    plain = model.generate(torch.tensor([[3]]), max_new_tokens=20, do_sample=False)
    assert torch.equal(metasd.generate(torch.tensor([[3]]), max_new_tokens=20), plain)


def test_rows_of_a_batch_draft_from_their_own_prompts(model: Any) -> None:
    target = Target(model)
    drafters = [new_drafter(model, target), new_drafter(model, target, 1)]
    metasd = MetaSD(model, drafters=drafters, reward="bd")
    draws = torch.Generator().manual_seed(4)
    ids = torch.randint(0, 48, (3, 8), generator=draws)
    plain = model.generate(ids, max_new_tokens=30, do_sample=False, pad_token_id=0)
    assert torch.equal(metasd.generate(ids, max_new_tokens=30, pad_token_id=0), plain)
    text = ids[0].tolist()
    twin = drafters[0].clone()
    for drafter, prompt in ((drafters[0], text), (twin, ids[1].tolist())):
        drafter.start(prompt)
        drafter.commit(prompt, features_of(model, prompt)[:-1])
    drafted = drafters[0].propose(text, 3, Sampling()).probs
    assert drafted is not None
    assert set(drafted[0].nonzero()[:, 0].tolist()) == {*VOCABULARY.tolist(), *text}


def features_of(model: Any, tokens: list[int], layers: Any = LAYERS) -> Tensor:
    states = model(torch.tensor([tokens]), output_hidden_states=True).hidden_states
    return torch.cat([states[layer][0] for layer in layers], -1)


@settings(max_examples=40, deadline=None)
@given(
    rounds=st.lists(st.tuples(st.integers(1, 6), st.booleans()), min_size=1, max_size=8),
    prompt=st.integers(2, 20),
)
def test_its_state_is_that_of_a_fresh_one(
    model: Any, rounds: list[tuple[int, bool]], prompt: int
) -> None:
    """After any accepted lengths, chosen or not, it drafts as if it had read the text at once."""
    target = Target(model)
    draws = torch.Generator().manual_seed(prompt)
    text = torch.randint(0, 48, (prompt + 50,), generator=draws).tolist()
    features = features_of(model, text)
    drafter, length, owed = new_drafter(model, target), prompt, prompt - 1
    drafter.start(text[:length])
    drafter.commit(text[:length], features[: length - 1])
    for emitted, chosen in rounds:
        if chosen:
            drafter.propose(text[:length], 5, Sampling())
            owed = 0
        drafter.commit(text[: length + emitted], features[length - 1 : length + emitted - 1])
        length, owed = length + emitted, owed + emitted
    fresh = new_drafter(model, target)
    fresh.start(text[:prompt])
    fresh.commit(text[:length], features[: length - 1])
    draft, expected = (d.propose(text[:length], 5, Sampling()) for d in (drafter, fresh))
    assert draft.tokens == expected.tokens
    assert torch.allclose(draft.probs, expected.probs, atol=1e-5)
    assert draft.owed == owed - rounds[-1][0]


def test_it_drafts_the_prompts_tokens_besides_its_vocabulary(model: Any) -> None:
    target = Target(model)
    drafter = new_drafter(model, target)
    for text in ([1, 3, 3, 4], [5, 8, 0]):
        drafter.start(text)
        drafter.commit(text, features_of(model, text)[:-1])
        probs = drafter.propose(text, 2, Sampling()).probs
        assert probs is not None
        drafted = {*VOCABULARY.tolist(), *text}
        assert set(probs[0].nonzero()[:, 0].tolist()) == drafted
        rows = probs[0, sorted(drafted)].log()
        again = Eagle(
            drafter.shape, random_weights(drafter.shape, 0), torch.tensor(sorted(drafted)), target
        )
        again.start(text)
        again.commit(text, features_of(model, text)[:-1])
        expected = again.propose(text, 2, Sampling()).probs
        assert expected is not None
        assert torch.allclose(rows, expected[0, sorted(drafted)].log(), atol=1e-5)


def test_sampled_tokens_are_drawn_from_what_it_tells(model: Any) -> None:
    text = list(range(10))
    drafter = new_drafter(model, Target(model))
    seen = set()
    for seed in range(40):
        sampling = Sampling(do_sample=True, seed=seed)
        drafter.start(text)
        drafter.commit(text, features_of(model, text)[:-1])
        draft, _ = draft_block(drafter, text, 4, sampling, 48)
        outside = torch.ones(48, dtype=torch.bool)
        outside[VOCABULARY] = False
        outside[text] = False
        assert not draft.probs[:, outside].any()
        for j, (token, q) in enumerate(zip(draft.tokens, draft.probs, strict=True)):
            u = uniform(seed, 0, len(text) + j, Purpose.DRAFT, len(text))
            assert token == draw(q, u)
        seen.add(tuple(draft.tokens))
    assert len(seen) > 10


def test_it_declines_without_hidden_states_and_beyond_its_context(model: Any) -> None:
    drafter = new_drafter(model, Target(model))
    drafter.start([1, 2, 3])
    drafter.commit([1, 2, 3], features_of(model, [1, 2]))
    drafter.commit([1, 2, 3, 4])
    with pytest.raises(DrafterUnavailableError, match="of 2 tokens and needs those of 3"):
        drafter.propose([1, 2, 3, 4], 3, Sampling())
    long = [1] * 158
    drafter.start(long)
    drafter.commit(long, features_of(model, long)[:-1])
    assert len(drafter.propose(long, 2, Sampling()).tokens) == 2
    with pytest.raises(DrafterUnavailableError, match="ends at 160"):
        drafter.propose(long, 3, Sampling())


@pytest.mark.parametrize("shape", [(64, 128), (192, 64), (10, 12)])
@pytest.mark.parametrize(("rows", "half"), [(1, False), (3, False), (40, False), (40, True)])
def test_eight_bit_products_are_close_to_the_floats(
    shape: tuple[int, int], rows: int, half: bool
) -> None:
    draws = torch.Generator().manual_seed(rows)
    weight = torch.randn(shape, generator=draws)
    x = torch.randn(rows, shape[1], generator=draws)
    matrix = Matrix(*quantise(weight), torch.device("cpu"))
    matrix._half = half  # whatever the processor
    product = matrix(x)
    exact = x @ weight.T
    # One weight errs by half a step of 1/127 of its row's largest, a bfloat16 factor by 2**-9.
    step = weight.abs().amax(1) / 127
    bound = x.abs().sum(1, keepdim=True) * step / 2 + 2**-6 * (x.abs() @ weight.abs().T)
    assert product.dtype == torch.float32
    assert bool(((product - exact).abs() <= bound).all())


@pytest.fixture
def saved(model: Any, tmp_path: Path) -> tuple[Path, dict[str, dict[str, Tensor]]]:
    shape = EagleShape.of(model.config, LAYERS)
    heads = {f"eagle-{i}": random_weights(shape, i) for i in range(2)}
    drafters = {
        name: Trained("eagle", shape, weights, {"domains": ["d"]})
        for name, weights in heads.items()
    }
    save_pool(tmp_path / "pool", model, "tiny", VOCABULARY, drafters, {}, {})
    return tmp_path / "pool", heads


def test_differences_from_another_head_are_read_back(model: Any, tmp_path: Path) -> None:
    """A head near another is kept in half the room, and is itself again, not the other."""
    shape = EagleShape.of(model.config, LAYERS)
    whole = random_weights(shape, 0)
    near = {key: w + 0.1 * random_weights(shape, 1)[key] for key, w in whole.items()}
    drafters = {
        "eagle-d": Trained("eagle", shape, near, {"domains": ["d"]}, base="eagle-ofa"),
        "eagle-ofa": Trained("eagle", shape, whole, {"domains": ["d"]}),
    }
    save_pool(tmp_path / "pool", model, "tiny", VOCABULARY, drafters, {}, {})
    target = Target(model)
    text = list(range(3, 17))
    features = features_of(model, text)[:-1]

    def logits(drafter: Any) -> Tensor:
        drafter.start(text)
        drafter.commit(text, features)
        return drafter._read(text, 1)[1]

    specialist, for_all = (logits(drafter) for drafter in load_pool(tmp_path / "pool", target))
    truth = logits(Eagle(shape, near, VOCABULARY, target))
    assert (specialist - truth).norm() < 0.2 * (for_all - truth).norm()
    torch.testing.assert_close(as_stored(drafters, "eagle-d")["q"], near["q"], atol=0.05, rtol=0.05)


def test_a_saved_pool_drafts_as_its_heads_did(model: Any, saved: Any) -> None:
    path, heads = saved
    target = Target(model)
    pool = load_pool(path, target)
    assert [drafter.name for drafter in pool] == list(heads)
    text = list(range(3, 17))
    features = features_of(model, text)[:-1]
    for seed, loaded in enumerate(pool):
        original = new_drafter(model, target, seed)
        drafts = []
        for drafter in (original, loaded):
            drafter.start(text)
            drafter.commit(text, features)
            drafts.append(drafter.propose(text, 1, Sampling()))
        assert torch.allclose(drafts[0].probs, drafts[1].probs, atol=0.02)


def test_a_pool_for_another_target_is_refused(
    model: Any, saved: Any, tiny_llama: Callable[..., Any]
) -> None:
    other = tiny_llama(6, vocab=48, layers=3, context=160)
    with pytest.raises(PoolError, match=r"trained for tiny.*this target's weights are others"):
        load_pool(saved[0], Target(other))


def test_the_fingerprint_does_not_mind_the_dtype(tiny_llama: Callable[..., Any]) -> None:
    model = tiny_llama(7).bfloat16()
    print_ = fingerprint(model)
    assert fingerprint(model.float()) == print_
    next(model.parameters()).data[0, 0] += 1
    assert fingerprint(model) != print_


@pytest.mark.parametrize("name", ["pool.safetensors", "manifest.json", "SHA256SUMS"])
def test_one_flipped_bit_anywhere_is_refused(model: Any, saved: Any, name: str) -> None:
    """In the header, in the middle of the weights, in a metric, in a checksum."""
    target, file = Target(model), saved[0] / name
    whole = file.read_bytes()
    draws = random.Random(0)
    for place in [0, len(whole) - 1, *draws.sample(range(len(whole)), 12)]:
        flipped = whole[place] ^ 1 << draws.randrange(8)
        file.write_bytes(whole[:place] + bytes([flipped]) + whole[place + 1 :])
        with pytest.raises(PoolError, match="damaged"):
            load_pool(saved[0], target)
        with pytest.raises(PoolError, match="damaged"):
            read_trained(saved[0])
    file.write_bytes(whole)
    assert load_pool(saved[0], target)


def test_missing_and_damaged_pools_are_refused(model: Any, saved: Any, tmp_path: Path) -> None:
    target, path = Target(model), saved[0]
    with pytest.raises(PoolError, match="metasd train"):
        load_pool(tmp_path / "nothing", target)
    weights = path / "pool.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-100])
    with pytest.raises(PoolError, match="damaged"):
        load_pool(path, target)
    weights.unlink()
    with pytest.raises(PoolError, match="lacks a file"):
        load_pool(path, target)
    weights.write_bytes(whole)
    sums = path / "SHA256SUMS"
    sums.unlink()
    with pytest.raises(PoolError, match="sha256sum") as error:
        load_pool(path, target)
    subprocess.run(str(error.value).partition("write it: ")[2], shell=True, check=True)
    assert load_pool(path, target)
    manifest = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps({**manifest, "version": 99}))
    sums.write_text(checksums(path))
    with pytest.raises(PoolError, match="version"):
        load_pool(path, target)
    (path / "manifest.json").write_text("{")
    sums.write_text(checksums(path))
    with pytest.raises(PoolError, match="damaged"):
        load_pool(path, target)
