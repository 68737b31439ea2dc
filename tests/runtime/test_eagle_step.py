"""The heads' compiled steps: the eager ones up to rounding, and eager where they cannot be."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scripted import greedy_text
from torch import Tensor

from metasd_runtime.decoding.sampling import Sampling
from metasd_runtime.drafters.eagle import chain as eagle_module
from metasd_runtime.drafters.eagle import compiled
from metasd_runtime.drafters.eagle.chain import Eagle
from metasd_runtime.drafters.eagle.compiled import CompiledStep, compile_steps
from metasd_runtime.drafters.eagle.head import EagleShape
from metasd_runtime.drafters.eagle.tree import DynamicTree, EagleTree
from metasd_runtime.metasd import MetaSD
from metasd_runtime.model import graphs
from metasd_runtime.model.target import Target

LAYERS = (1, 2)
VOCAB = 96
VOCABULARY = torch.arange(60)  # five more tokens of a prompt, and the head has 128 rows
needs_compiler = pytest.mark.skipif(
    shutil.which("g++") is None and shutil.which("clang++") is None,
    reason="needs a C++ compiler",
)
HIDDEN = {"eight bits": 64, "floats": 32}  # the eight-bit kernel wants multiples of 64


def rest_of(target: Target, seed: int) -> tuple[Any, ...]:
    shape = EagleShape.of(target.model.config, LAYERS)
    draws = torch.Generator().manual_seed(seed)
    weights = {
        name: torch.ones(size) if len(size) == 1 else torch.randn(size, generator=draws) * 0.1
        for name, size in shape.sizes().items()
    }
    return shape, weights, VOCABULARY, target, f"eagle-{seed}"


def new_head(target: Target, seed: int, *, tree: bool = False) -> Eagle:
    rest = rest_of(target, seed)
    return EagleTree(DynamicTree(), *rest) if tree else Eagle(*rest)


class Counted:
    """A function that counts its calls."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function, self.calls = function, 0

    def __call__(self, *arguments: Any) -> Any:
        self.calls += 1
        return self.function(*arguments)


def new_target(tiny_llama: Callable[..., Any], hidden: int) -> Target:
    return Target(tiny_llama(5, vocab=VOCAB, layers=2, hidden=hidden, context=160))


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("compiled"))


@pytest.fixture
def _in_cache(cache: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("METASD_CACHE", cache)


@pytest.fixture(scope="module", params=HIDDEN)
def heads(request: Any, tiny_llama: Any, cache: str) -> tuple[Target, list[Eagle]]:
    """Two heads that share compiled steps; their storage is small at first."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("METASD_CACHE", cache)
        patch.setattr(eagle_module, "_FIRST_CAPACITY", 8)
        target = new_target(tiny_llama, HIDDEN[request.param])
        made = [new_head(target, seed) for seed in range(2)]
        with warnings.catch_warnings():
            warnings.simplefilter("error", RuntimeWarning)
            compile_steps(made)
    return target, made


def eager_twin(head: Eagle) -> Eagle:
    twin = head.clone()
    twin.compiled = None
    return twin


def assert_close(head: Eagle, ours: Tensor, truth: Tensor) -> None:
    """Up to rounding: of bfloat16 factors, or of float32 sums."""
    exact = head._qkv._dense is not None
    assert graphs.relative_error(ours, truth) < (1e-4 if exact else 0.02)


@needs_compiler
@pytest.mark.slow
class TestCompiled:
    """One compilation serves them all."""

    def test_the_heads_share_one(self, heads: Any) -> None:
        assert isinstance(heads[1][0].compiled, CompiledStep)
        assert heads[1][0].compiled is heads[1][1].compiled is heads[1][0].clone().compiled

    @settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(
        which=st.integers(0, 1),
        prompt=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=40),
        blocks=st.lists(st.tuples(st.integers(1, 10), st.integers(0, 4)), min_size=1, max_size=6),
        seed=st.integers(0, 9),
    )
    def test_steps_are_the_eager_ones(
        self, heads: Any, which: int, prompt: list[int], blocks: Any, seed: int
    ) -> None:
        """Outputs, logits and what is stored, over blocks that are read and chains behind them."""
        head = heads[1][which].clone()
        own = eager_twin(head)
        draws = torch.Generator().manual_seed(seed)
        for one in (head, own):
            one.start(prompt)
        text = [0]
        for m, chain in blocks:
            features = torch.randn(m, 2 * head.shape.hidden, generator=draws)
            text += torch.randint(0, VOCAB, (m,), generator=draws).tolist()
            with torch.inference_mode():
                for one in (head, own):
                    one.commit(text, features)
                ours, truth = (one._read(text, chain) for one in (head, own))
                for j in range(chain + 1):
                    for x, y in zip(ours, truth, strict=True):
                        assert x.shape == y.shape
                        assert_close(head, x, y)
                    end = head._length + j
                    assert_close(head, head._keys[:end], own._keys[:end])
                    assert_close(head, head._values[:end], own._values[:end])
                    if j < chain:
                        # Both from the same output, lest rounding add up.
                        ours, truth = (
                            one._step("chain", truth[0], [j], end) for one in (head, own)
                        )

    @pytest.mark.parametrize("n", [1, 5])
    def test_text_is_unchanged(self, heads: Any, n: int) -> None:
        target, drafters = heads
        prompt = torch.randint(0, VOCAB, (1, 12), generator=torch.Generator().manual_seed(n))
        metasd = MetaSD(target, drafters=drafters, draft_length=n, reward="bd")
        text = metasd.generate(prompt, max_new_tokens=60, do_sample=False)
        assert text[0].tolist() == greedy_text(target.model, prompt[0].tolist(), 60)

    def test_the_graphs_are_used(self, heads: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        """For few new pairs and chains; not where many are read, nor for the very first."""

        def refuse(*arguments: Any) -> None:
            raise AssertionError("an eager step")

        head = heads[1][0].clone()
        monkeypatch.setattr(head, "_eager_step", refuse)
        for first, used in ((2, True), (8, True), (9, False), (1, False)):
            text = list(range(first + 1))
            head.start(text)
            head.commit(text, torch.zeros(first, 2 * head.shape.hidden))
            if used:
                assert len(head.propose(text, 3, Sampling()).tokens) == 3
                head.commit([*text, 5], torch.zeros(1, 2 * head.shape.hidden))
                assert len(head.propose([*text, 5], 3, Sampling()).tokens) == 3
            else:
                with pytest.raises(AssertionError, match="eager"):
                    head.propose(text, 3, Sampling())

    @pytest.mark.usefixtures("_in_cache")
    def test_trees_grow_through_them(self, heads: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        """Only the graph of a level is compiled anew; long and short texts, full levels and not."""
        made: list[object] = []
        compile_ = graphs._compile
        monkeypatch.setattr(graphs, "_compile", lambda *a: [made.append(a), compile_(*a)])
        tree = new_head(heads[0], 0, tree=True)
        compile_steps([tree, new_head(heads[0], 1, tree=True)])
        assert tree.compiled is not None
        assert len(made) == 1
        own = eager_twin(tree)
        monkeypatch.setattr(own, "_eager_level", counted := Counted(own._eager_level))
        monkeypatch.setattr(tree, "_eager_level", lambda *arguments: pytest.fail("eager"))
        for length in (2, 5, 30):
            text = [(5 * i + length) % VOCAB for i in range(length)]
            draws = torch.Generator().manual_seed(length)
            features = torch.randn(length - 1, 2 * tree.shape.hidden, generator=draws)
            drafts = []
            for one in (tree, own):
                one.start(text)
                one.commit(text, features)
                drafts.append(one.propose(text, 4, Sampling()))
            assert drafts[0].tokens == drafts[1].tokens
            assert drafts[0].parents == drafts[1].parents
        assert counted.calls == 9
        narrow = EagleTree(DynamicTree(breadth=1), *rest_of(heads[0], 0))
        compile_steps([narrow])
        narrow.start([1, 2])
        narrow.commit([1, 2], torch.zeros(1, 2 * narrow.shape.hidden))
        assert len(narrow.propose([1, 2], 4, Sampling()).tokens) == 4

    @pytest.mark.usefixtures("_in_cache")
    def test_compiled_once_for_a_shape(self, heads: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(graphs, "_compile", lambda *arguments: pytest.fail("compiled again"))
        head = new_head(heads[0], 7)
        said: list[str] = []
        compile_steps([head], said.append)
        assert head.compiled is not None
        assert not said

    @pytest.mark.usefixtures("_in_cache")
    def test_graphs_that_are_not_the_eager_step_are_refused(
        self, heads: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        load = torch._inductor.aoti_load_package

        def wrong(path: str) -> Any:
            run = load(path).loader.run
            off = SimpleNamespace(run=lambda inputs: [x + 0.1 * x.std() for x in run(inputs)])
            return SimpleNamespace(loader=off)

        monkeypatch.setattr(torch._inductor, "aoti_load_package", wrong)
        head = new_head(heads[0], 7)
        with pytest.warns(RuntimeWarning, match="steps are not compiled .*is off by"):
            compile_steps([head])
        assert head.compiled is None


def test_a_damaged_file_is_not_used(
    tiny_llama: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("METASD_CACHE", str(tmp_path))
    monkeypatch.setattr(graphs, "_compile", lambda *a: a[2].write_bytes(b"PK\x03\x04 no graph"))
    head = new_head(new_target(tiny_llama, 64), 0)
    with pytest.warns(RuntimeWarning, match="steps are not compiled") as told:
        compile_steps([head, head.clone()])
    assert len(told) == 1
    assert head.compiled is None


def test_without_a_compiler_decoding_goes_on(
    tiny_llama: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_compiler(*arguments: Any) -> None:
        raise RuntimeError("no C++ compiler found\nand much more")

    monkeypatch.setenv("METASD_CACHE", str(tmp_path))
    monkeypatch.setattr(graphs, "_compile", no_compiler)
    target = new_target(tiny_llama, 64)
    with pytest.warns(RuntimeWarning) as told:
        metasd = MetaSD(target, drafters=[new_head(target, 0)], compiled=True)
    assert [str(one.message).partition(" (")[0] for one in told] == [
        "the target is not compiled",
        "the EAGLE heads' steps are not compiled",
    ]
    text = metasd.generate([3, 1, 4], max_new_tokens=12, do_sample=False)
    assert text[0].tolist() == greedy_text(target.model, [3, 1, 4], 12)
    assert not list(tmp_path.rglob("*.pt2"))


def test_the_name_is_of_all_that_matters(tiny_llama: Any) -> None:
    def name(head: Eagle) -> str:
        return graphs.graph_name(*compiled._about(head))

    target = new_target(tiny_llama, 64)
    one, same = new_head(target, 0), new_head(target, 1)
    same.start(range(VOCAB))  # other weights, another prompt
    assert name(one) == name(same)
    floats = new_head(new_target(tiny_llama, 32), 0)
    half = new_head(Target(tiny_llama(5, vocab=VOCAB, hidden=64).bfloat16()), 0)
    assert len({name(one), name(floats), name(half)}) == 3


def test_others_are_left_alone(tiny_llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "_compile", lambda *arguments: pytest.fail("compiled"))
    metasd = MetaSD(new_target(tiny_llama, 32), drafters=["suffix", "none"])
    compile_steps(metasd.router.bases)
    assert not any(hasattr(drafter, "compiled") for drafter in metasd.router.bases)
