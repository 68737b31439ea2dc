"""Small language models: lossless, drafting as they were trained, begun from the target."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from enumeration import ByLastReward, CopyDrafter, ModelTarget, decode_law, deviation, own_law
from torch import Tensor

from metasd_bandits.checks import ConfigError
from metasd_runtime.decoding.sampling import Sampling
from metasd_runtime.drafters.catch_up import Recompute, Streaming
from metasd_runtime.drafters.pool import Trained, save_pool
from metasd_runtime.drafters.registry import make_pool
from metasd_runtime.drafters.small_lm import SmallShape, small_language_model
from metasd_runtime.metasd import MetaSD
from metasd_runtime.model.target import Target
from metasd_runtime.training.answers import Answerer, answer_all
from metasd_runtime.training.corpus import Batch, Text, batches, load_corpus
from metasd_runtime.training.evaluate import evaluate
from metasd_runtime.training.learn import Learning, learn
from metasd_runtime.training.lm_model import LmModel, initial_lm
from metasd_runtime.training.prompts import Prompt

VOCABULARY = torch.arange(0, 40, 2)


def random_weights(shape: SmallShape, seed: int) -> dict[str, Tensor]:
    draws = torch.Generator().manual_seed(seed)
    return {
        name: torch.ones(size) if len(size) == 1 else torch.randn(size, generator=draws) * 0.3
        for name, size in shape.sizes().items()
    }


@pytest.fixture(scope="module")
def wide(tiny_llama: Any) -> Any:
    """A target wide enough for narrower models."""
    return tiny_llama(3, vocab=40, layers=2, hidden=128, sharpness=20.0)


def new_student(model: Any, width: int | None = None, depth: int = 2, seed: int = 0) -> LmModel:
    shape = SmallShape.of(model.config, width, depth)
    return LmModel(shape, random_weights(shape, seed), model.get_input_embeddings().weight)


@pytest.mark.parametrize("width", [None, 64])
def test_greedy_output_is_the_targets(wide: Any, width: int | None) -> None:
    target = Target(wide)
    student = new_student(wide, width)
    drafter = small_language_model(student.shape, student.weights(), VOCABULARY, target, "lm-d")
    metasd = MetaSD(wide, drafters=[drafter, "suffix"], policy="ucb", reward="bd")
    ids = torch.randint(1, 40, (2, 7), generator=torch.Generator().manual_seed(0))
    plain = wide.generate(ids, max_new_tokens=30, do_sample=False, pad_token_id=0)
    assert torch.equal(metasd.generate(ids, max_new_tokens=30, pad_token_id=0), plain)
    output = metasd.generate(ids[:1], max_new_tokens=30, return_dict_in_generate=True)
    assert torch.equal(output.sequences, plain[:1])
    assert output.statistics.arms[0].name == "lm-d"
    assert output.statistics.arms[0].pulls > 0


def test_it_drafts_its_vocabulary_alone_and_the_law_is_the_targets(tiny_llama: Any) -> None:
    target = ModelTarget(tiny_llama(4, vocab=3, layers=2, sharpness=6.0))
    student = new_student(target.model)
    drafter = small_language_model(student.shape, student.weights(), torch.tensor([0, 2]), target)
    drafter.start([0])
    probs = drafter.propose([0, 1], 2, Sampling()).probs
    assert probs is not None
    assert probs.gt(0).tolist() == [[True, False, True]] * 2
    pool = [
        drafter,
        CopyDrafter("count", lambda text: (text[-1] + 1) % 3),
        CopyDrafter("copy", lambda text: text[0]),
    ]
    law = decode_law(target, pool, [0, 2], 3, policy=ByLastReward(0.3), draft_length=2)
    assert deviation(law, own_law(target, [0, 2], 3)) < 1e-6


def test_training_sees_what_drafting_sees(world: Any) -> None:
    model, _, corpus = world
    student = new_student(model)
    drafter = small_language_model(student.shape, student.weights(), VOCABULARY, Target(model))
    texts = corpus.train[:3]
    batch = Batch.of(texts, 32, torch.device("cpu"))
    rows = model.lm_head.weight[VOCABULARY]
    with torch.no_grad():
        unrolled = student(batch, 3)
        trained = student.logits(unrolled[0].out, rows)
    drafted = torch.cat(
        [drafter.lm.model(torch.tensor([t.tokens])).logits[0, -t.answered - 1 : -1] for t in texts]
    )
    assert torch.allclose(trained, drafted[:, VOCABULARY], atol=1e-3)
    for out, index in unrolled[1:]:
        assert torch.equal(out, unrolled[0].out[index])


def test_a_whole_copy_begins_as_the_target(world: Any) -> None:
    """All of the target's layers: the regression then finds the target's own final norm."""
    model, _, corpus = world
    shape = SmallShape.of(model.config, None, 3)
    student = LmModel(
        shape, initial_lm(model, shape, corpus.train), model.get_input_embeddings().weight
    )
    found = evaluate(student, corpus.held_out, model.lm_head.weight, torch.arange(40))
    assert found.block_divergence > 0.9


def test_a_narrow_model_begins_as_a_bigram(wide: Any, tmp_path: Path) -> None:
    """What it says depends on the last token alone."""
    shape = SmallShape.of(wide.config, 64, 2)
    weights = initial_lm(wide, shape, _texts(wide, tmp_path))
    drafter = small_language_model(shape, weights, torch.arange(40), Target(wide))
    ids = torch.randint(0, 40, (2, 9), generator=torch.Generator().manual_seed(1))
    ids[1, -1] = ids[0, -1]
    logits = drafter.lm.model(ids).logits
    assert torch.allclose(logits[0, -1], logits[1, -1], atol=1e-4)
    assert not torch.allclose(logits[0, -2], logits[1, -2], atol=1e-2)


def _texts(model: Any, folder: Path) -> list[Text]:
    """A few texts of this target."""
    prompts = [Prompt(str(i), [i, i + 1]) for i in range(30)]
    answerer = Answerer(model, {7}, 12, (2,))
    answer_all(answerer, {"d": prompts}, folder, held_out=1, batch=8, tokens=400, seed=1)
    return load_corpus(folder, "d", 400).train


def test_it_learns(world: Any, tmp_path: Path) -> None:
    model, _, corpus = world
    student = new_student(model, depth=1)
    rows = model.lm_head.weight
    before = evaluate(student, corpus.train, rows, VOCABULARY)
    learning = Learning(tokens=64 * 60, batch_tokens=64, rate=3e-3, depths=1)
    stream = batches([corpus.train], 64, 5)
    learn(student, stream, rows[VOCABULARY], learning, tmp_path / "state.pt")
    after = evaluate(student, corpus.train, rows, VOCABULARY)
    assert after.block_divergence > before.block_divergence + 0.1


@pytest.mark.parametrize(
    ("width", "depth", "message"),
    [
        (96, 1, "no multiple of 64, the width of a head; give 64"),
        (192, 1, r"language_model.width=192 .*\[64, 128\]"),
        (64, 3, r"language_model.depth=3 .*\[1, 2\]"),
    ],
)
def test_bad_sizes_are_refused(wide: Any, width: int, depth: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SmallShape.of(wide.config, width, depth)


def test_a_pool_says_how_its_models_pay_for_missed_tokens(wide: Any, tmp_path: Path) -> None:
    student = new_student(wide, 64, depth=1)
    drafters = {"lm-d": Trained("language-model", student.shape, student.weights(), {})}
    save_pool(tmp_path / "pool", wide, "tiny", VOCABULARY, drafters, {}, {})
    target = Target(wide)
    (plain,) = make_pool([f"pool:{tmp_path / 'pool'}"], target)
    (drafter,) = make_pool([f"pool:{tmp_path / 'pool'}?cache=streaming&sinks=2&window=16"], target)
    assert plain.cache == Recompute()
    assert drafter.cache == Streaming(sinks=2, window=16)
    metasd = MetaSD(wide, drafters=[drafter], reward="bd")
    ids = torch.randint(1, 40, (1, 30), generator=torch.Generator().manual_seed(1))
    plain_text = wide.generate(ids, max_new_tokens=20, do_sample=False, pad_token_id=0)
    assert torch.equal(metasd.generate(ids, max_new_tokens=20, pad_token_id=0), plain_text)
    with pytest.raises(ConfigError, match=r"'windows'.*window"):
        make_pool([f"pool:{tmp_path / 'pool'}?cache=lazy&windows=3"], target)
