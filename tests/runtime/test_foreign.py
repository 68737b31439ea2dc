"""Drafters that read and write with another tokenizer than the target's."""

from __future__ import annotations

import pytest
import torch
from enumeration import TableTarget, deviation, every_outcome, own_law
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from metasd_bandits.checks import ConfigError
from metasd_runtime.decoding.loop import Query, decode
from metasd_runtime.decoding.router import Router
from metasd_runtime.decoding.sampling import Sampling
from metasd_runtime.decoding.stopping import Stopping
from metasd_runtime.drafters import foreign
from metasd_runtime.drafters.foreign import SharedTokens, TextMatch, shared_tokens
from metasd_runtime.drafters.registry import make_drafter
from metasd_runtime.metasd import MetaSD

TEXT = [
    "the cat sat on the mat and the dog sat on the cat",
    "the dog and the cat and the mat",
    "on the mat sat the dog, on the cat sat the mat",
] * 4


def train(vocab: int, seed_alphabet: str = "") -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of its own vocabulary."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab, special_tokens=["<s>"], initial_alphabet=list(seed_alphabet)
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<s>")


@pytest.fixture(scope="module")
def ours():
    return train(40)


@pytest.fixture(scope="module")
def theirs():
    return train(26, seed_alphabet="zyx")


@pytest.fixture(scope="module")
def target(tiny_llama, ours):
    return tiny_llama(seed=5, vocab=len(ours), sharpness=10.0)


@pytest.fixture(scope="module")
def small(tiny_llama, theirs):
    return tiny_llama(seed=2, vocab=len(theirs), layers=1, sharpness=10.0)


@pytest.fixture(scope="module")
def prompt(ours):
    return torch.tensor([ours.encode("the cat sat on the")])


def test_shared_tokens_are_spelled_alike(ours, theirs):
    shared = shared_tokens(ours, theirs)
    assert 0 < len(shared) < len(theirs)
    for their_id, our_id in shared.items():
        assert theirs.decode([their_id]) == ours.decode([our_id])
    assert theirs.eos_token_id not in shared


@pytest.mark.parametrize("kind", [SharedTokens, TextMatch])
@pytest.mark.parametrize("mates", [[], ["prompt-lookup", "none"]])
def test_greedy_output_is_plain_generates(target, small, ours, theirs, prompt, kind, mates):
    drafter = kind(small, theirs, ours, len(ours))
    metasd = MetaSD(target, ours, drafters=[drafter, *mates], policy="uniform", reward="bd")
    plain = target.generate(prompt, max_new_tokens=40, do_sample=False, pad_token_id=0)
    out = metasd.generate(prompt, max_new_tokens=40, seed=1, return_dict_in_generate=True)
    assert out.sequences.tolist() == plain.tolist()
    assert out.statistics.arms[0].drafted > 0


@pytest.mark.parametrize("kind", [SharedTokens, TextMatch])
def test_the_same_model_and_tokenizer_agree_with_the_target(target, ours, prompt, kind):
    """Nothing is lost in translation where there is nothing to translate."""
    allowed = [i for i in range(len(ours)) if i != ours.eos_token_id]
    drafters = [kind(target, ours, ours, len(ours))]
    metasd = MetaSD(target, ours, drafters=drafters, policy="ucb", reward="be")
    out = metasd.generate(
        prompt,
        max_new_tokens=40,
        seed=1,
        return_dict_in_generate=True,
        prefix_allowed_tokens_fn=lambda batch, ids: allowed,
    )
    rate = out.statistics.arms[0].accepted / out.statistics.arms[0].drafted
    assert rate > 0.6  # a text may have two spellings, and the model then reads another one


def test_shared_drafts_are_drawn_from_the_restricted_distribution(small, ours, theirs, prompt):
    drafter = SharedTokens(small, theirs, ours, len(ours))
    tokens = prompt[0].tolist()
    drafter.start(tokens)
    draft = drafter.propose(tokens, 1, Sampling(None, True))
    reading = theirs.encode(ours.decode(tokens))
    logits = small(torch.tensor([reading])).logits[0, -1]
    shared = shared_tokens(ours, theirs)
    weights = {our: float(logits[their].exp()) for their, our in shared.items()}
    total = sum(weights.values())
    for token, p in enumerate(draft.probs[0].tolist()):
        assert p == pytest.approx(weights.get(token, 0.0) / total, rel=1e-4, abs=1e-7)


def test_the_cache_equals_a_fresh_reading(small, ours, theirs):
    """Whatever stands, grows or is taken back, drafts are those of a drafter that starts anew."""
    used, text = SharedTokens(small, theirs, ours, len(ours)), ours.encode("the dog sat on")
    used.start(text)
    for more in ("", " the", " the mat", " the m", " the mat and, on"):
        tokens = [*text, *ours.encode(more)] if more else text
        fresh = SharedTokens(small, theirs, ours, len(ours))
        fresh.start(tokens)
        sampling = Sampling()
        mine, new = used.propose(tokens, 4, sampling), fresh.propose(tokens, 4, sampling)
        assert mine.tokens == new.tokens
        torch.testing.assert_close(mine.probs, new.probs, atol=1e-5, rtol=1e-4)
        used.commit(tokens)


def test_a_text_draft_is_the_small_models_greedy_text(small, ours, theirs, prompt):
    drafter = TextMatch(small, theirs, ours, len(ours))
    tokens = prompt[0].tolist()
    drafter.start(tokens)
    draft = drafter.propose(tokens, 6, Sampling(None, True))
    assert draft.probs is None
    reading = torch.tensor([theirs.encode(ours.decode(tokens))])
    greedy = small.generate(
        reading, max_new_tokens=6, do_sample=False, pad_token_id=0, eos_token_id=theirs.eos_token_id
    )
    text = theirs.decode(greedy[0, reading.shape[1] :], skip_special_tokens=True)
    drafted = ours.decode(draft.tokens)
    assert drafted
    assert text.startswith(drafted)


def test_a_text_draft_ends_where_the_small_model_ends(tiny_llama, ours, theirs, prompt):
    model = tiny_llama(seed=10, vocab=len(theirs), layers=1, sharpness=10.0)
    reading = torch.tensor([theirs.encode(ours.decode(prompt[0]))])
    greedy = model.generate(reading, max_new_tokens=6, do_sample=False, pad_token_id=0)
    ids = greedy[0, reading.shape[1] :].tolist()
    end = ids.index(theirs.eos_token_id)
    assert 0 < end < 5
    draft = TextMatch(model, theirs, ours, len(ours)).propose(prompt[0].tolist(), 6, Sampling())
    assert ours.decode(draft.tokens) == theirs.decode(ids[:end])


class Letters:
    """A tokenizer of single letters, in the order given."""

    all_special_tokens: tuple[str, ...] = ()
    all_special_ids: tuple[int, ...] = ()

    def __init__(self, letters: str) -> None:
        self.letters = letters

    def get_vocab(self):
        return {letter: i for i, letter in enumerate(self.letters)}

    def decode(self, ids, **kwargs):
        return "".join(self.letters[i] for i in ids)

    def encode(self, text, **kwargs):
        return [self.letters.index(letter) for letter in text if letter in self.letters]


@pytest.mark.parametrize("kind", [SharedTokens, TextMatch])
def test_sampling_is_exact(monkeypatch, tiny_llama, kind):
    """The target knows a, b, c; the drafter c, x, a. Summed over every draft and every coin."""

    class Float64Table:
        """A drafter's model in float64, so that sums hold to 1e-12."""

        max_length, device, vocab_size = None, torch.device("cpu"), 3

        def __init__(self, model):
            self.text: list[int] = []

        def reset(self):
            self.text = []

        def rollback(self, n):
            del self.text[len(self.text) - n :]

        def forward(self, tokens, keep=0):
            self.text += tokens
            step = len(self.text) + 2 * self.text[-1]
            rows = [[0.3 * step, 1.1 - 0.2 * step, 0.7]]
            return type("F", (), {"logits": torch.tensor(rows, dtype=torch.float64)})

    monkeypatch.setattr(foreign, "CachedModel", Float64Table)
    table = TableTarget(lambda text: [0.9 * (text[-1] == t) + 0.4 * t for t in range(3)], 3)
    drafter = kind(None, Letters("cxa"), Letters("abc"), 3)

    drafted = []

    def run():
        router = Router([drafter], "fixed", "bd", draft_length=2)
        query = Query("0", [0, 2], Sampling(None, True), Stopping(5), plain_step=1.0)
        drafted.extend(round_.drafted for round_, _ in decode(query, table, router))
        return tuple(query.tokens[2:])

    assert deviation(every_outcome(run), own_law(table, [0, 2], 3)) < 1e-12
    assert sum(drafted) > 0


def test_strangers_are_refused(small, ours, theirs, target):
    with pytest.raises(ConfigError, match="shares no token"):
        SharedTokens(small, Letters("abc"), Letters("xyz"), 3)
    metasd = MetaSD(target, None, drafters=["none"])
    for name in ("lm-text", "lm-tokens"):
        with pytest.raises(ConfigError, match="needs a model"):
            make_drafter(name, metasd.target)
        with pytest.raises(ConfigError, match="needs the target's tokenizer"):
            make_drafter(f"{name}:somewhere", metasd.target)


def test_by_name(target, small, ours, theirs, prompt, tmp_path):
    small.save_pretrained(tmp_path)
    theirs.save_pretrained(tmp_path)
    for name in (f"lm-text:{tmp_path}", f"lm-tokens:{tmp_path}"):
        metasd = MetaSD(target, ours, drafters=[name], reward="bd")
        plain = target.generate(prompt, max_new_tokens=20, do_sample=False, pad_token_id=0)
        assert metasd.generate(prompt, max_new_tokens=20).tolist() == plain.tolist()
    with pytest.raises(ConfigError, match="lm-tokens"):
        MetaSD(target, ours, drafters=[f"lm:{tmp_path}"])
