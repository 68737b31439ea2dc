"""The compiled forward: the same text, the same cache, and eager decoding where it cannot be."""

from __future__ import annotations

import shutil
import warnings

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scripted import ByTurns, Script, assert_cache_is_fresh, greedy_text, run
from tiny_models import ATTENTION, build

from metasd_runtime import MetaSD
from metasd_runtime.drafters.early_exit import EarlyExit
from metasd_runtime.model import compiled, graphs
from metasd_runtime.model import target as target_module
from metasd_runtime.model.compiled import compile_forward
from metasd_runtime.model.target import Target

N = 3
READ = 16  # tokens of a prompt at once
PROMPT = [3, 1, 4, 1, 5]
needs_compiler = pytest.mark.skipif(
    shutil.which("g++") is None and shutil.which("clang++") is None,
    reason="needs a C++ compiler",
)


@pytest.fixture(scope="module")
def cache(tmp_path_factory) -> str:
    return str(tmp_path_factory.mktemp("compiled"))


@pytest.fixture
def _in_cache(cache, monkeypatch) -> None:
    monkeypatch.setenv("METASD_CACHE", cache)
    monkeypatch.setattr(compiled, "_PROMPT", READ)


@pytest.fixture(scope="module")
def target(tiny_llama, cache) -> Target:
    """A Llama compiled for blocks of N + 1, prompts and two hidden states; its storage is small."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("METASD_CACHE", cache)
        patch.setattr(target_module, "_FIRST_CAPACITY", 64)
        patch.setattr(compiled, "_PROMPT", READ)
        target = Target(tiny_llama(seed=5))
        with warnings.catch_warnings():
            warnings.simplefilter("error", RuntimeWarning)
            target.compiled = compile_forward(target, (1, N + 1), features=(1, 2))
    return target


@needs_compiler
@pytest.mark.slow
class TestCompiled:
    """One compilation serves them all."""

    @settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(
        prompt=st.lists(st.integers(0, 31), min_size=1, max_size=70),
        right=st.lists(st.integers(0, N), min_size=1, max_size=6),
        junk=st.integers(0, 31),
    )
    def test_text_and_cache_are_the_eager_ones(self, target, prompt, right, junk) -> None:
        truth = greedy_text(target.model, prompt, 20)

        def say(tokens, n):
            good = right[len(tokens) % len(right)]
            ahead = truth[len(tokens) : len(tokens) + good]
            return [*ahead, *[junk] * (n - len(ahead))][: 1 + len(tokens) % N]

        def check(tokens):
            assert_cache_is_fresh(target, tokens[:-1])

        drafters = [
            Script("right so far", say),
            Script("nothing", lambda tokens, n: []),
            EarlyExit(target, 1),
        ]
        text, _ = run(
            target, drafters, prompt, 20, policy=ByTurns([2, 0, 0, 1]), draft_length=N,
            after_round=check,
        )  # fmt: skip
        assert text == truth

    def test_the_graphs_are_used(self, target, monkeypatch) -> None:
        def refuse(**arguments):
            raise AssertionError("an eager forward")

        target.reset()
        target.prefill(PROMPT)
        monkeypatch.setattr(target.model, "forward", refuse)
        for n in (1, 2, N + 1):
            assert target.forward([7] * n).logits.shape == (n, 32)
            target.rollback(n)
        with pytest.raises(AssertionError, match="eager"):
            target.forward([7] * (N + 2))

    @pytest.mark.parametrize("layers", [(), (1,), (2,), (1, 2), (2, 1)])
    def test_hidden_states(self, target, monkeypatch, layers) -> None:
        """Any of those that were compiled: pools of other kinds of heads share the graphs."""
        model, eager = target.model, target.model.forward
        monkeypatch.setattr(model, "forward", None)
        target.reset()
        read = target.prefill(PROMPT, layers)
        fast = target.forward([7, 8], features=layers)
        target.rollback(2)
        monkeypatch.setattr(model, "forward", eager)
        monkeypatch.setattr(target, "compiled", None)
        own = target.forward([7, 8], features=layers)
        again = Target(model).prefill(PROMPT, layers)
        assert (read is None) == (again is None) == (not layers)
        if layers:
            torch.testing.assert_close(read, again, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(fast.features, own.features, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(fast.logits, own.logits, rtol=1e-4, atol=1e-4)

    @settings(max_examples=15, deadline=None)
    @given(prompt=st.lists(st.integers(0, 31), min_size=1, max_size=5 * READ))
    def test_prompts(self, target, prompt) -> None:
        """Read in pieces, the last one filled up: states and logits are the eager ones."""
        target.reset()
        before = target.forwards
        fast = target.prefill(prompt, (1, 2))
        assert target.forwards - before == -(-len(prompt) // READ)
        assert target.length == len(prompt)
        logits = target.forward([7]).logits
        other = Target(target.model)
        torch.testing.assert_close(fast, other.prefill(prompt, (1, 2)), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(logits, other.forward([7]).logits, rtol=1e-4, atol=1e-4)

    def test_a_long_prompt_is_followed_by_a_compiled_one(self, target, monkeypatch) -> None:
        """Storage that a long text made grow is given back, and graphs go on all the same."""
        target.reset()
        target.prefill(PROMPT * 60)
        target.reset()
        assert target.layers[0].keys.shape[2] == target.layers[0].capacity == 64
        monkeypatch.setattr(target.model, "forward", None)
        target.prefill(PROMPT)
        assert target.length == len(PROMPT)

    @pytest.mark.parametrize("parents", [[-1, -1], [-1, -1, 0], [-1, 0, 0], [-1, -1, -1]])
    def test_trees(self, target, monkeypatch, parents) -> None:
        """Whole blocks and shorter ones, which are filled up."""
        block = [7, 8, 9, 10][: len(parents) + 1]
        target.reset()
        target.prefill(PROMPT)
        fast = target.forward(block, parents=parents, features=(1, 2))
        target.rollback(len(block))
        monkeypatch.setattr(target, "compiled", None)
        own = target.forward(block, parents=parents, features=(1, 2))
        target.keep(len(block), [0, len(parents)])
        torch.testing.assert_close(fast.features, own.features, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(fast.logits, own.logits, rtol=1e-4, atol=1e-4)

    @pytest.mark.usefixtures("_in_cache")
    def test_compiled_once(self, target, monkeypatch) -> None:
        def refuse(*arguments):
            raise AssertionError("compiled again")

        monkeypatch.setattr(graphs, "_compile", refuse)
        assert compile_forward(Target(target.model), (1, N + 1), features=(1, 2)) is not None

    @pytest.mark.usefixtures("_in_cache")
    def test_a_graph_that_is_not_the_models_is_refused(self, target, monkeypatch) -> None:
        load = torch._inductor.aoti_load_package

        def wrong(path):
            graph = load(path)
            return lambda *arguments: [x + 0.1 * x.std() for x in graph(*arguments)]

        monkeypatch.setattr(torch._inductor, "aoti_load_package", wrong)
        with pytest.warns(RuntimeWarning, match="not compiled .*is off by"):
            assert compile_forward(Target(target.model), (1, N + 1), features=(1, 2)) is None

    @pytest.mark.usefixtures("_in_cache")
    def test_a_damaged_file_is_not_used(self, target, tmp_path, monkeypatch) -> None:
        monkeypatch.setenv("METASD_CACHE", str(tmp_path))
        monkeypatch.setattr(graphs, "_compile", lambda *a: a[2].write_bytes(b"PK\x03\x04 no graph"))
        with pytest.warns(RuntimeWarning, match="not compiled"):
            assert compile_forward(Target(target.model), (1,)) is None


def test_the_name_is_of_all_that_matters(tiny_llama) -> None:
    one, same, other = (Target(tiny_llama(seed=seed)) for seed in (1, 1, 2))
    digests = [compiled._weights_digest(target.model) for target in (one, same, other)]
    assert digests[0] == digests[1] != digests[2]
    names = {
        compiled._name(one, 1, 0, (), digests[0]),
        compiled._name(one, 1, 1, (), digests[0]),
        compiled._name(one, 2, 0, (), digests[0]),
        compiled._name(one, 1, 0, (1,), digests[0]),
        compiled._name(one, 1, 0, (), digests[2]),
    }
    assert len(names) == 5


@pytest.mark.parametrize("name", ["mistral, window", "gemma3, window"])
def test_windows_stay_eager(name) -> None:
    target = Target(build(*ATTENTION[name]))
    with pytest.warns(RuntimeWarning, match="not compiled .*window"):
        assert compile_forward(target, (1, 4)) is None


def test_without_a_compiler_decoding_goes_on(tiny_llama, monkeypatch, tmp_path) -> None:
    def no_compiler(*arguments):
        raise RuntimeError("no C++ compiler found\nand much more")

    monkeypatch.setenv("METASD_CACHE", str(tmp_path))
    monkeypatch.setattr(graphs, "_compile", no_compiler)
    model = tiny_llama(seed=5)
    with pytest.warns(RuntimeWarning, match=r"not compiled \(no C\+\+ compiler found\)"):
        metasd = MetaSD(model, drafters=["prompt-lookup", "none"], compiled=True)
    text = metasd.generate(PROMPT, max_new_tokens=12, do_sample=False)
    assert text[0].tolist() == greedy_text(model, PROMPT, 12)
    assert not list(tmp_path.rglob("*.pt2"))


def test_single_tokens_share_a_small_graph() -> None:
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    assert compiled._sizes([6, 1, 13, 6], cpu) == [6, 13]
    assert compiled._sizes([1, 13], cpu) == [1, 13]
    assert compiled._sizes([1], cpu) == [1]
    assert compiled._sizes([1, 6], gpu) == [1, 6]
