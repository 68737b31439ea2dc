"""Many rows at once: every row is what it would be alone, whatever its neighbours do."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import StoppingCriteria, StoppingCriteriaList

from metasd_bandits import ConfigError, Policy, read_trace
from metasd_bandits.policies.uniform import Uniform
from metasd_runtime.decoding.batch import _PlainSteps
from metasd_runtime.decoding.drafter import Draft, Drafter
from metasd_runtime.decoding.stopping import Finish
from metasd_runtime.drafters.language_model import LanguageModel
from metasd_runtime.generation.continuous import InterruptedMany, Progress
from metasd_runtime.metasd import MetaSD

VOCAB = 24
MODES = ("homogeneous", "heterogeneous")


def prompts_of(n: int, seed: int = 0, longest: int = 30) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, longest + 1, (n,), generator=generator).tolist()
    return [torch.randint(VOCAB, (length,), generator=generator).tolist() for length in lengths]


@pytest.fixture(scope="module")
def target(tiny_llama):
    return tiny_llama(0, vocab=VOCAB, layers=3)


@pytest.fixture(scope="module")
def pool(tiny_llama, target):
    """Every kind of drafter; one language model is the target itself, so that much is accepted."""

    def make() -> list[str | Drafter]:
        return [
            "prompt-lookup",
            "suffix",
            "early-exit:1",
            "prompt-lookup:4:3>early-exit:2",
            LanguageModel(tiny_llama(5, vocab=VOCAB, layers=1), VOCAB, "weak"),
            LanguageModel(target, VOCAB, "strong"),
            LanguageModel(tiny_llama(6, vocab=VOCAB, layers=1), VOCAB, "window", "streaming"),
            "none",
        ]

    return make


def plain(model, prompt: list[int], n: int, eos: int | None = None) -> list[int]:
    """Greedy decoding without a cache: the truth."""
    text = list(prompt)
    with torch.inference_mode():
        for _ in range(n):
            text.append(int(model(torch.tensor([text])).logits[0, -1].argmax()))
            if text[-1] == eos:
                break
    return text


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("reward", "policy"), [("bd", "ucb"), ("throughput", "exp3")])
def test_every_row_is_what_plain_decoding_gives(target, pool, mode, reward, policy):
    metasd = MetaSD(target, drafters=pool(), reward=reward, policy=policy)
    prompts = prompts_of(9)
    outputs = list(metasd.generate_many(prompts, max_batch=4, mode=mode, seed=3, max_new_tokens=20))
    assert [output.index for output in outputs] == list(range(9))
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.sequences[0].tolist() == plain(target, prompt, 20)
        assert output.finish is Finish.LENGTH
        assert output.statistics.tokens == 20
        assert output.prompt_length == len(prompt)


@pytest.mark.parametrize("seed", range(2))
def test_a_sampled_row_is_what_it_is_alone_with_its_seed(target, pool, seed):
    """Its tokens, its arms, what was accepted and every reward (which no clock enters)."""
    options = {"reward": "bd", "policy": "exp3"}
    sampling = {"do_sample": True, "temperature": 1.3, "top_p": 0.95, "max_new_tokens": 25}
    make = lambda: [d for d in pool() if d != "suffix"]  # noqa: E731 (it remembers other rows)
    batch = MetaSD(target, drafters=make(), **options)
    outputs = batch.generate_many(
        prompts_of(7, seed), max_batch=3, mode="heterogeneous", seed=seed, **sampling
    )
    for prompt, output in zip(prompts_of(7, seed), outputs, strict=True):
        single = MetaSD(target, drafters=make(), **options)
        alone = single.generate(
            torch.tensor([prompt]), seed=output.seed, return_dict_in_generate=True, **sampling
        )
        assert output.sequences.tolist() == alone.sequences.tolist()
        for ours, theirs in zip(output.trace.rounds, alone.trace.rounds, strict=True):
            for name in ("arm", "drafted", "accepted", "emitted"):
                assert getattr(ours, name) == getattr(theirs, name)
            assert ours.block_divergence == pytest.approx(theirs.block_divergence, abs=1e-4)
            assert ours.reward == pytest.approx(theirs.reward, abs=1e-4)


def test_the_same_seed_gives_the_same_rows_whatever_the_batch(target, pool):
    """Without speculation nothing but (seed, row, position) decides what is drawn."""
    sampled = {"do_sample": True, "temperature": 2.0, "max_new_tokens": 15, "seed": 5}
    runs = [
        [
            output.new_tokens
            for output in MetaSD(target, drafters=["none"]).generate_many(
                prompts_of(6), max_batch=size, **sampled
            )
        ]
        for size in (1, 2, 6)
    ]
    assert runs[0] == runs[1] == runs[2]
    assert len({tuple(row) for row in runs[0]}) > 1


def test_each_row_stops_by_its_own_criteria(target):
    prompts = prompts_of(5)
    texts = [plain(target, prompt, 30) for prompt in prompts]
    stop = texts[1][len(prompts[1]) + 4]
    metasd = MetaSD(target, drafters=["prompt-lookup", "early-exit:2"], reward="bd")

    class Until(StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            return torch.tensor([input_ids.shape[1] >= len(prompts[2]) + 7])

    rows = [
        {"input_ids": prompts[0], "max_new_tokens": 3},
        {"input_ids": prompts[1], "eos_token_id": stop},
        {"input_ids": prompts[2], "stopping_criteria": StoppingCriteriaList([Until()])},
        prompts[3],
        {"input_ids": prompts[4], "query": "named", "max_new_tokens": 1},
    ]
    outputs = list(metasd.generate_many(rows, max_batch=5, max_new_tokens=30))
    emitted = [len(output.new_tokens) for output in outputs]
    assert emitted[0] == 3
    assert outputs[1].new_tokens == plain(target, prompts[1], 30, eos=stop)[len(prompts[1]) :]
    assert emitted[2:] == [7, 30, 1]
    finishes = [output.finish for output in outputs]
    assert finishes == ["length", "eos", "criteria", "length", "length"]
    assert {r.query for r in outputs[4].trace.rounds} == {"named"}


def test_results_come_as_completed_or_in_order(target):
    metasd = MetaSD(target, drafters=["prompt-lookup"], reward="bd")
    rows = [{"input_ids": [1, 2, 3], "max_new_tokens": n} for n in (40, 3, 20, 3, 3)]
    completed = [o.index for o in metasd.generate_many(rows, max_batch=3, order="completed")]
    assert sorted(completed) == [0, 1, 2, 3, 4]
    assert completed[0] == 1
    assert completed.index(3) < completed.index(0)
    in_order = [o.index for o in metasd.generate_many(rows, max_batch=3)]
    assert in_order == [0, 1, 2, 3, 4]


def test_prompts_are_drawn_as_slots_come_free(target):
    """The input may be endless; no more than the batch is taken ahead of what was handed over."""
    taken = []

    def endless():
        while True:
            taken.append(len(taken))
            yield [1 + len(taken) % 5, 2]

    metasd = MetaSD(target, drafters=["prompt-lookup"])
    outputs = metasd.generate_many(endless(), max_batch=3, order="completed", max_new_tokens=4)
    assert not taken
    for done in range(1, 12):
        next(outputs)
        assert len(taken) <= done + 3 + 2
    outputs.close()


def test_progress_and_trace_tell_of_all_rows(target, tmp_path):
    seen: list[Progress] = []
    metasd = MetaSD(target, drafters=["prompt-lookup", "early-exit:1"], reward="bd")
    path = tmp_path / "trace.jsonl"
    outputs = list(
        metasd.generate_many(
            prompts_of(5), max_batch=2, max_new_tokens=8, progress=seen.append, trace=path
        )
    )
    assert (seen[-1].done, seen[-1].active, seen[-1].total, seen[-1].tokens) == (5, 0, 5, 40)
    assert all(0 < p.active + p.done <= 5 for p in seen)
    trace = read_trace(path)
    for output in outputs:
        mine = [r for r in trace.rounds if r.query == str(output.index)]
        assert mine == output.trace.rounds
        assert [r.index for r in mine] == list(range(len(mine)))
    assert sum(r.emitted for r in trace.rounds) == 40


class Counted(Policy):
    """Counts what is decided and learned; three arms in turn."""

    name = "counted"

    def __init__(self):
        self.resets, self.decided, self.learned = 0, [], []

    def reset(self, n_arms, seed=None):
        self.resets += 1
        self.n_arms = n_arms

    def select(self, available=None):
        self.decided.append(len(self.decided) % self.n_arms)
        return self.decided[-1]

    def update(self, arm, reward, *, cost=1.0, propensity=0.0, rewards=None):
        self.learned.append((arm, len(self.decided)))

    def __deepcopy__(self, memo):
        return self


def test_homogeneous_takes_one_arm_a_round_and_learns_from_every_row(target):
    policy = Counted()
    metasd = MetaSD(
        target,
        drafters=["prompt-lookup", "early-exit:1", "early-exit:2"],
        policy=policy,
        reward="bd",
    )
    outputs = list(metasd.generate_many(prompts_of(3), max_batch=3, max_new_tokens=12))
    assert policy.resets == 1
    rounds = max(len(output.trace.rounds) for output in outputs)
    assert len(policy.decided) == rounds
    assert len(policy.learned) == sum(len(output.trace.rounds) for output in outputs)
    for i in range(rounds):
        arms = {o.trace.rounds[i].arm for o in outputs if i < len(o.trace.rounds)}
        assert arms == {i % 3}


class CountedAtOnce(Counted):
    """Records the feedback that comes for several rows."""

    def __init__(self):
        super().__init__()
        self.together = []

    def update_many(self, arms, rewards, *, costs, propensities):
        assert len(arms) == len(rewards) == len(costs) == len(propensities)
        self.together.append(list(arms))


@pytest.mark.parametrize(
    ("mode", "scope"), [("homogeneous", "query"), ("heterogeneous", "carried")]
)
def test_the_feedback_of_a_round_comes_at_once_where_rows_share_a_policy(target, mode, scope):
    policy = CountedAtOnce()
    metasd = MetaSD(
        target, drafters=["prompt-lookup", "early-exit:1"], policy=policy, reward="bd", scope=scope
    )
    rows = [{"input_ids": [1 + n], "max_new_tokens": n} for n in (1, 6, 12)]
    outputs = list(metasd.generate_many(rows, mode=mode))
    rounds = [[r.arm for r in output.trace.rounds] for output in outputs]
    expected = [[arms[i] for arms in rounds if i < len(arms)] for i in range(max(map(len, rounds)))]
    assert policy.together == expected
    assert policy.learned == []


@given(
    st.floats(0.01, 10),
    st.floats(0, 10),
    st.lists(st.integers(1, 8), min_size=1, max_size=9),
)
def test_a_rows_share_of_a_forward_is_what_its_tokens_cost(fixed, token, lengths):
    """Where a forward over n tokens takes fixed + token * n, as measured for 1 and for 8."""
    steps = object.__new__(_PlainSteps)
    steps._measured = {1: fixed + token, 8: fixed + 8 * token}
    seconds = fixed + token * sum(lengths)
    for n, share in zip(lengths, steps.shares(lengths), strict=True):
        assert share * seconds == pytest.approx(fixed / len(lengths) + token * n)


def test_a_carried_policy_has_the_pulls_of_all_rows_in_flight(target):
    """Heterogeneous rows that share a policy: all decide, then all learn."""
    policy = Counted()
    metasd = MetaSD(
        target,
        drafters=["prompt-lookup", "early-exit:1", "early-exit:2"],
        policy=policy,
        reward="bd",
        scope="carried",
    )
    list(metasd.generate_many([[1, 2], [3, 4, 5], [6]], mode="heterogeneous", max_new_tokens=1))
    assert policy.decided == [0, 1, 2]
    assert policy.learned == [(0, 3), (1, 3), (2, 3)]


def test_unplayed_arms_in_flight_are_not_drawn_again_and_again(target):
    """ucb-js #4: with feedback delayed, the first decisions of a batch spread over the arms."""
    metasd = MetaSD(
        target,
        drafters=["prompt-lookup", "early-exit:1", "early-exit:2"],
        policy="ucb",
        reward="bd",
        scope="carried",
    )
    outputs = list(
        metasd.generate_many([[1, 2], [3, 4, 5], [6]], mode="heterogeneous", max_new_tokens=1)
    )
    assert {output.trace.rounds[0].arm for output in outputs} == {0, 1, 2}


class Breaks(Drafter):
    """Raises in rows whose text begins with an odd token, after two rounds."""

    name = "breaks"

    def start(self, tokens):
        self.calls = 0

    def propose(self, tokens, n, sampling):
        self.calls += 1
        if tokens[0] % 2 and self.calls > 2:
            raise RuntimeError("broken")
        return Draft([1] * n)


@pytest.mark.parametrize("mode", MODES)
def test_a_drafter_that_breaks_in_one_row_serves_the_others(target, mode):
    metasd = MetaSD(target, drafters=[Breaks()], reward="bd")
    prompts = [[1, 5, 6], [2, 7], [4]]
    with pytest.warns(RuntimeWarning, match="broken"):
        outputs = list(metasd.generate_many(prompts, mode=mode, max_new_tokens=15))
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.sequences[0].tolist() == plain(target, prompt, 15)
        drafted = [r.drafted for r in output.trace.rounds]
        assert (0 in drafted[2:-1]) == bool(prompt[0] % 2)


def test_nan_in_one_rows_drafts_touches_no_other(tiny_llama, target):
    """A language model that gives NaN behind one token, drafting for all rows in one forward."""
    bad = tiny_llama(7, vocab=VOCAB, layers=1)
    bad.model.embed_tokens.weight[3] = float("nan")
    drafters = [LanguageModel(bad, VOCAB), LanguageModel(target, VOCAB, "strong")]
    prompts = [[1, 2, 4], [5, 3, 6], [7, 8], [3], [2, 2]]
    for sampled in (False, True):
        metasd = MetaSD(target, drafters=drafters, reward="bd", policy="uniform")
        with pytest.warns(RuntimeWarning, match="disabled"):
            outputs = list(
                metasd.generate_many(
                    prompts * 2, max_batch=3, seed=1, max_new_tokens=10, do_sample=sampled
                )
            )
        for prompt, output in zip(prompts * 2, outputs, strict=True):
            assert output.statistics.tokens == 10
            if not sampled:
                assert output.sequences[0].tolist() == plain(target, prompt, 10)


def test_a_bad_prompt_loses_none_of_those_before_it(target):
    metasd = MetaSD(target, drafters=["prompt-lookup"])
    outputs = metasd.generate_many([[1, 2], [3], [], [4]], max_batch=2, max_new_tokens=5)
    assert [next(outputs).index, next(outputs).index] == [0, 1]
    with pytest.raises(ConfigError, match=r"prompt 2: .*empty"):
        next(outputs)


def test_an_iterator_that_raises_loses_none_of_those_before_it(target):
    def prompts():
        yield [1, 2]
        raise OSError("the disk is gone")

    outputs = MetaSD(target, drafters=["none"]).generate_many(prompts(), max_new_tokens=5)
    assert next(outputs).index == 0
    with pytest.raises(OSError, match="the disk is gone"):
        next(outputs)


def test_an_interruption_hands_over_what_was_made(target):
    def interrupt(round_):
        if round_.query == "1" and round_.index == 3:
            raise KeyboardInterrupt

    metasd = MetaSD(target, drafters=["none"])
    rows = [
        {"input_ids": [1, 2], "max_new_tokens": 20},
        [3],
        {"input_ids": [4], "max_new_tokens": 2},
    ]
    outputs = metasd.generate_many(rows, max_new_tokens=20, on_round=interrupt)
    with pytest.raises(InterruptedMany) as interrupted:
        list(outputs)
    made = {output.index: output for output in interrupted.value.outputs}
    assert set(made) == {0, 1, 2}
    assert made[2].finish is Finish.LENGTH
    assert made[0].finish is made[1].finish is Finish.INTERRUPTED
    assert made[0].new_tokens == plain(target, [1, 2], len(made[0].new_tokens))[2:]


@pytest.mark.parametrize("mode", MODES)
def test_a_round_cut_short_is_in_no_rows_text(target, mode):
    """The trace and the texts tell one story, wherever the callback stops everything."""
    for stop in range(1, 8):
        seen = []

        def interrupt(round_, seen=seen, stop=stop):
            seen.append(round_)
            if len(seen) == stop:
                raise KeyboardInterrupt

        metasd = MetaSD(target, drafters=["prompt-lookup", "early-exit:1"], reward="bd")
        rows = [[1, 2], {"input_ids": [3], "max_new_tokens": 1}, [4, 5, 6]]
        outputs = metasd.generate_many(rows, mode=mode, max_new_tokens=9, on_round=interrupt)
        with pytest.raises(InterruptedMany) as interrupted:
            list(outputs)
        for output in interrupted.value.outputs:
            assert len(output.new_tokens) == sum(r.emitted for r in output.trace.rounds)
            done = output.index == 1 and len(output.new_tokens) == 1
            assert output.finish is (Finish.LENGTH if done else Finish.INTERRUPTED)


def test_a_calls_own_wishes_hold_for_all_its_rows(target):
    pool = ["prompt-lookup", "suffix", "early-exit:2"]
    metasd = MetaSD(target, drafters=pool, policy="ucb", reward="bd")
    prompts = prompts_of(3)

    def rounds(**wishes):
        outputs = list(metasd.generate_many(prompts, max_new_tokens=12, **wishes))
        for prompt, output in zip(prompts, outputs, strict=True):
            assert output.sequences[0].tolist() == plain(target, prompt, 12)
        return [r for output in outputs for r in output.trace.rounds], outputs[0].trace.header

    assert max(r.drafted for r in rounds(draft_length=2)[0]) == 2
    assert rounds(pool=["early-exit:2", "suffix"])[1].arms[:2] == ("early-exit:2", "suffix")
    assert {r.arm for r in rounds(policy="fixed:arm=2")[0]} == {2}
    assert {r.drafted for r in rounds(speculate=False)[0]} == {0}
    early = {"pool": ["early-exit:2"]}
    surest = rounds(**early, draft_threshold=0.99)[0]
    assert sum(r.drafted for r in surest) < sum(r.drafted for r in rounds(**early)[0])


@pytest.mark.parametrize("option", ["shadow", "draft_all"])
def test_what_is_not_done_for_rows_together_is_refused_by_name(target, option):
    """Of the session or of the call; a call may take back what the session asks for."""
    wants = MetaSD(target, drafters=["prompt-lookup", "suffix"], **{option: True})
    silent = MetaSD(target, drafters=["prompt-lookup", "suffix"])
    with pytest.raises(ConfigError, match=option):
        wants.generate_many([[1]])
    with pytest.raises(ConfigError, match=option):
        silent.generate_many([[1]], **{option: True})
    [output] = wants.generate_many([[1, 2]], max_new_tokens=3, **{option: False})
    assert output.sequences[0].tolist() == plain(target, [1, 2], 3)


@pytest.mark.parametrize(
    ("call", "own", "message"),
    [
        ({"query": "a"}, {}, "query names one prompt"),
        ({}, {"draft_length": 2}, "draft_length is of the whole call"),
        ({}, {"shadow": True}, "shadow is of the whole call"),
        ({}, {"seed": -1}, "seed=-1"),
        ({"draft_threshold": 1.0}, {}, "draft_threshold"),
        ({"pool": []}, {}, "selects nothing"),
        ({"streamer": object()}, {}, "streamer"),
        ({"num_beams": 2}, {}, "num_beams"),
    ],
)
def test_options_in_the_wrong_place_are_refused_by_name(target, call, own, message):
    metasd = MetaSD(target, drafters=["prompt-lookup"])
    with pytest.raises(ConfigError, match=message):
        list(metasd.generate_many([{"input_ids": [1], **own}], **call))


@pytest.mark.parametrize(
    ("argument", "value"),
    [("max_batch", 0), ("order", "any"), ("mode", "mixed"), ("prompts", "one text")],
)
def test_arguments_that_cannot_work_are_refused_when_called(target, argument, value):
    given_ = {"prompts": [[1]], argument: value}
    with pytest.raises(ConfigError):
        MetaSD(target, drafters=["none"]).generate_many(**given_)


def test_calls_in_between_leave_a_running_batch_alone(target, pool):
    metasd = MetaSD(target, drafters=pool(), reward="bd")
    prompts = prompts_of(6)
    outputs = metasd.generate_many(prompts, max_batch=2, order="completed", max_new_tokens=12)
    for output in outputs:
        assert output.sequences[0].tolist() == plain(target, prompts[output.index], 12)
        other = metasd.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=6)
        assert other[0].tolist() == plain(target, [5, 6, 7], 6)


def test_rows_reach_the_end_of_the_context_together_with_shorter_ones(tiny_llama):
    """Padding behind a row's last position must not ask for positions that do not exist."""
    small = tiny_llama(2, vocab=VOCAB, context=40)
    metasd = MetaSD(small, drafters=["prompt-lookup", "early-exit:1"], reward="bd")
    prompts = [[1] * 37, [2, 3], [4] * 30]
    outputs = list(metasd.generate_many(prompts, max_new_tokens=60))
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.sequences[0].tolist() == plain(small, prompt, 40 - len(prompt))
        assert output.finish is Finish.CONTEXT


@pytest.mark.slow
@settings(max_examples=8)
@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=7),
    st.integers(1, 4),
    st.sampled_from(MODES),
    st.integers(1, 7),
)
def test_ragged_batches_of_any_shape_equal_plain_decoding(
    target, pool, lengths, max_batch, mode, draft_length
):
    generator = torch.Generator().manual_seed(sum(lengths))
    prompts = [torch.randint(VOCAB, (n,), generator=generator).tolist() for n in lengths]
    metasd = MetaSD(
        target, drafters=pool(), policy=Uniform(), reward="bd", draft_length=draft_length
    )
    outputs = metasd.generate_many(prompts, max_batch=max_batch, mode=mode, max_new_tokens=9)
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.sequences[0].tolist() == plain(target, prompt, 9)
