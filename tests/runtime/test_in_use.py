"""A second call in the middle of one is refused by name, and the first goes on undisturbed."""

from __future__ import annotations

import contextlib
import gc
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from scripted import ByTurns, Script, greedy_text

from metasd_bandits import make_policy
from metasd_bandits.carried import Carried
from metasd_runtime.decoding.in_use import InUseError
from metasd_runtime.metasd import MetaSD
from metasd_runtime.model.target import Target

VOCAB, PROMPT, OTHER, N = 24, [5, 6, 7, 5, 6], [1, 2, 3], 8
POOL = ("prompt-lookup", "early-exit:1")


@pytest.fixture(scope="module")
def model(tiny_llama):
    return tiny_llama(0, vocab=VOCAB, layers=3)


def session(model, **options) -> MetaSD:
    return MetaSD(model, **{"drafters": POOL, "reward": "bd", **options})


def texts_of(metasd, kind, on_round=None) -> list[list[int]]:
    """What a call of that kind makes of the prompt."""
    settings = {"max_new_tokens": N, "on_round": on_round, "seed": 0}
    ids = torch.tensor([PROMPT])
    if kind == "generate":
        return metasd.generate(ids, **settings).tolist()
    if kind == "custom_generate":
        settings |= {"do_sample": False, "pad_token_id": 0, "custom_generate": metasd}
        return metasd.target.model.generate(ids, **settings).tolist()
    mode = "heterogeneous" if kind == "rows" else "homogeneous"
    outputs = metasd.generate_many([PROMPT], mode=mode, **settings)
    return [output.sequences[0].tolist() for output in outputs]


KINDS = ["generate", "custom_generate", "many", "rows"]


@pytest.mark.parametrize("scope", ["query", "carried"])
@pytest.mark.parametrize("second", KINDS)
@pytest.mark.parametrize("first", KINDS)
@pytest.mark.parametrize("elsewhere", [False, True], ids=["same thread", "another thread"])
def test_a_second_call_on_one_session(model, first, second, scope, elsewhere):
    """From the callback, in its own thread or another, which waits for what comes of it."""
    truth, metasd, refusals = greedy_text(model, PROMPT, N), session(model, scope=scope), []

    def enter():
        with pytest.raises(InUseError, match="this MetaSD is in use") as error:
            texts_of(metasd, second)
        refusals.append(error)

    def on_round(round_):
        if elsewhere:
            with ThreadPoolExecutor(1) as pool:
                pool.submit(enter).result()
        else:
            enter()

    assert texts_of(metasd, first, on_round) == [truth]
    assert len(refusals) > 1
    assert texts_of(metasd, second) == [truth]  # afterwards it serves as ever


def shared_target(model):
    target = Target(model)
    return [session(target), session(target)], "the Target"


def shared_policy(model):
    policy = make_policy("ucb")
    return [session(model, policy=policy) for _ in range(2)], "policy 'ucb'"


def shared_policy_of_ones_own(model):
    policy = ByTurns([0, 1])
    return [session(model, policy=policy) for _ in range(2)], "policy 'by-turns'"


def shared_below_what_carries_it(model):
    policy = make_policy("ucb")
    both = session(model, policy=policy, scope="carried"), session(model, policy=Carried(policy))
    return both, "policy 'ucb'"


def shared_drafter(model):
    drafter = Script("one", lambda tokens, n: [1] * n)
    return [session(model, drafters=[drafter]) for _ in range(2)], "drafter 'one'"


@pytest.mark.parametrize(
    "make",
    [
        shared_target,
        shared_policy,
        shared_policy_of_ones_own,
        shared_below_what_carries_it,
        shared_drafter,
    ],
)
def test_two_sessions_that_share_something_take_turns(model, make):
    (one, other), what = make(model)
    truth = greedy_text(model, PROMPT, N)
    refused = []

    def enter(round_):
        with pytest.raises(InUseError, match=f"{what} is in use"):
            texts_of(other, "generate")
        refused.append(round_)

    assert texts_of(one, "generate", enter) == [truth]
    assert refused
    assert texts_of(other, "generate") == [truth]


def test_a_calls_own_policy_is_held_as_well(model):
    policy, metasd, other = make_policy("exp3"), session(model), session(model)
    ids = torch.tensor([PROMPT])

    def enter(round_):
        with pytest.raises(InUseError, match="policy 'exp3'"):
            other.generate(ids, policy=policy, max_new_tokens=4)

    metasd.generate(ids, policy=policy, max_new_tokens=N, on_round=enter)


def test_sessions_that_share_a_model_alone_may_call_each_other(model):
    one, other, nested = session(model), session(model), []
    truth = greedy_text(model, PROMPT, N)
    texts = texts_of(one, "generate", lambda r: nested.extend(texts_of(other, "generate")))
    assert texts == [truth]
    assert nested == [truth] * len(nested) != []


def test_a_refused_call_counts_nowhere(model):
    """Neither the running number of queries nor torch's random numbers know of it."""
    metasd = session(model)
    draws = []

    def enter(round_):
        before = torch.random.get_rng_state()
        with contextlib.suppress(InUseError):
            metasd.generate(torch.tensor([OTHER]), max_new_tokens=2)
        draws.append(torch.equal(before, torch.random.get_rng_state()))

    ids = torch.tensor([PROMPT])
    arguments = {"max_new_tokens": N, "return_dict_in_generate": True}
    metasd.generate(ids, on_round=enter, **arguments)
    assert draws == [True] * len(draws) != []
    assert {r.query for r in metasd.generate(ids, **arguments).trace} == {"1"}


@pytest.mark.parametrize("scope", ["query", "carried"])
def test_between_the_results_of_many(model, scope):
    """The session is free, but for a policy that is carried on; an iterator let go frees it."""
    metasd, prompts = session(model, policy="ucb", scope=scope), [PROMPT, OTHER, PROMPT]
    truths = [greedy_text(model, prompt, N) for prompt in prompts]
    outputs = metasd.generate_many(prompts, max_batch=2, order="completed", max_new_tokens=N)
    texts = []
    for output in outputs:
        texts.append((output.index, output.sequences[0].tolist()))
        last = len(texts) == len(prompts)
        if scope == "query":
            assert texts_of(metasd, "generate") == [truths[0]]
        elif not last:
            with pytest.raises(InUseError, match="policy 'ucb, carried'"):
                texts_of(metasd, "generate")
    assert sorted(texts) == list(enumerate(truths))
    abandoned = metasd.generate_many(prompts, max_batch=2, order="completed", max_new_tokens=N)
    next(abandoned)
    del abandoned, outputs
    gc.collect()
    assert texts_of(metasd, "generate") == [truths[0]]


def test_an_iterator_asked_from_within_itself(model):
    metasd, refused = session(model), []

    def enter(round_):
        with pytest.raises(InUseError, match="this MetaSD"):
            next(outputs)
        refused.append(round_)

    outputs = metasd.generate_many([PROMPT], max_new_tokens=N, on_round=enter)
    assert [o.sequences[0].tolist() for o in outputs] == [greedy_text(model, PROMPT, N)]
    assert refused


def test_a_call_that_fails_lets_everything_go(model):
    metasd = session(model)

    def fail(round_):
        raise KeyError("the caller's own")

    for kind in KINDS:
        with pytest.raises(KeyError):
            texts_of(metasd, kind, fail)
        assert texts_of(metasd, kind) == [greedy_text(model, PROMPT, N)]


def overlap(model, first, second):
    """Run two functions in threads so that the second begins a forward amid one of the first's,
    and ends it after; what both return."""
    inside, ended = threading.Event(), threading.Event()
    names: dict[int, str] = {}
    done: set[str] = set()

    def in_between(*_):
        name = names.get(threading.get_ident())
        if name is None or name in done:
            return
        done.add(name)
        if name == "first":
            assert inside.wait(120)
        else:
            inside.set()
            assert ended.wait(120)

    def run(name, function):
        names[threading.get_ident()] = name
        return function()

    hook = model.model.layers[1].register_forward_pre_hook(in_between)
    try:
        with ThreadPoolExecutor(2) as pool:
            one = pool.submit(run, "first", first)
            two = pool.submit(run, "second", second)
            one.add_done_callback(lambda _: ended.set())
            return one.result(), two.result()
    finally:
        hook.remove()


@pytest.mark.parametrize("second", ["generate", "rows", "plain"])
@pytest.mark.parametrize("first", ["generate", "rows"])
def test_threads_with_sessions_of_their_own_share_a_model(tiny_llama, first, second):
    """Their forwards overlap; each attends by its own function, and the model is left as it was."""
    model = tiny_llama(0, vocab=VOCAB, layers=3)
    truths = [greedy_text(model, prompt, N) for prompt in (PROMPT, OTHER)]
    one, other = (session(model, drafters=["prompt-lookup"]) for _ in range(2))
    for metasd in (one, other):
        list(metasd.generate_many([PROMPT, OTHER], max_new_tokens=2))  # the model's trials

    def call(metasd, kind):
        if kind == "plain":
            return [greedy_text(model, PROMPT, N)]
        if kind == "generate":
            return metasd.generate(torch.tensor([PROMPT]), max_new_tokens=N).tolist()
        outputs = metasd.generate_many([PROMPT, OTHER], mode="heterogeneous", max_new_tokens=N)
        return [output.sequences[0].tolist() for output in outputs]

    texts = overlap(model, lambda: call(one, first), lambda: call(other, second))
    for kind, made in zip((first, second), texts, strict=True):
        assert made == truths[: 2 if kind == "rows" else 1]
    assert model.config._attn_implementation == "sdpa"
