"""One block put together from several drafters' tokens: the likeliest to stand, whoever drafts.

A round (1) takes all that copying has to offer, as a tree; (2) asks a drafter only if what it is
expected to add is worth its time, and lets it go on while its next token is; (3) verifies the nodes
of largest chance, as many as pay. Equal prefixes are one node. Chances are learned for each kind
of evidence: the emitted text tells of every candidate whose parent stood, verified or not, whether
it stands. Times are measured while decoding.

Nothing is drawn: a drafter is asked for its likeliest tokens, under sampling as well. Which nodes
are verified is then a function of earlier rounds, and the output is the target's (docs/method.md).
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from metasd_bandits import checks, make_policy
from metasd_bandits.blocks import Calibrator, Rate, best_width, marginal_gain, path_chances
from metasd_runtime.decoding.drafter import Ask, Draft, Drafter, RowsDrafter, features_of
from metasd_runtime.decoding.no_draft import NoDraft
from metasd_runtime.decoding.rows import RowDrafter
from metasd_runtime.decoding.sampling import Sampling
from metasd_runtime.drafters.copies import Copies
from metasd_runtime.drafters.evidence import AGAINST, ALONE, RANKS, Evidence
from metasd_runtime.drafters.prompt_lookup import PromptLookup
from metasd_runtime.drafters.suffix import Suffix
from metasd_runtime.drafters.timing import Steps, VerifyTimes
from metasd_runtime.model.ragged import RaggedModel
from metasd_runtime.model.tree import depths

__all__ = ["PROPOSERS", "Candidates", "Learned", "Merged"]

PROPOSERS = ("copy", "recall")
"""Who copies: from this text, from earlier queries. The drafters' places come behind these."""

_FEW = 5  # nodes: with the token before them they take a CPU no longer than one token
_FAINT = 0.02  # nothing is sought behind a path less likely than this
_KEPT = 0.9995  # what a round's outcomes count for a round later: some two thousand are remembered
_WIDE = 0.1  # of the bandit's bonus: rewards are means over a query
_UNTRAINED, _TRAINED, _WIDEST = 0.05, 0.3, 0.4  # what it believes of drafters at first

Reader = Callable[[Sequence[int]], str]


class Candidates:
    """The tokens that a round could verify, as one tree.

    Attributes
    ----------
    parents, tokens, chances
        Of each node; the chance is that of its best evidence, the latest.
    owners, keys : list of lists
        Who proposed the node, and the bins of what speaks for it.
    """

    def __init__(self, chances: Sequence[float]) -> None:
        self._chance_of = chances
        self.parents, self.tokens, self.chances = list[int](), list[int](), list[float]()
        self.owners, self.keys = list[list[int]](), list[list[int]]()
        self._places: dict[tuple[int, int], int] = {}
        self._children: dict[int, list[int]] = {}

    def add(self, parent: int, token: int, owner: int, key: int) -> int:
        """Propose a token behind a node, or join those who did; its place."""
        place = self._places.get((parent, token))
        if place is None:
            place = self._places[parent, token] = len(self.tokens)
            self._children.setdefault(parent, []).append(place)
            self.parents.append(parent)
            self.tokens.append(token)
            self.chances.append(0.0)
            self.owners.append([])
            self.keys.append([])
        if owner not in self.owners[place]:
            self.owners[place].append(owner)
            self.keys[place].append(key)
            self.chances[place] = self._chance_of[key]
        return place

    def children(self, parent: int) -> list[int]:
        """The nodes behind one, -1 being the text."""
        return self._children.get(parent, [])

    def at(self, parent: int, token: int) -> int | None:
        """The node of this token behind that one, if there is one."""
        return self._places.get((parent, token))

    def reached(self, node: int) -> float:
        """The chance that a node stands."""
        chance = 1.0
        while node >= 0:
            chance *= self.chances[node]
            node = self.parents[node]
        return chance

    def stands(self) -> list[float]:
        """The chance of each node to stand; of siblings no more than one does."""
        for siblings in self._children.values():
            total = sum(self.chances[i] for i in siblings)
            if total > 1.0:
                for i in siblings:
                    self.chances[i] /= total
        return path_chances(self.parents, self.chances)

    def seen(self, emitted: Sequence[int]) -> list[tuple[int, bool]]:
        """The nodes whose parent stands in the text that was emitted, and whether they do."""
        seen, here = list[tuple[int, bool]](), -1
        for token in emitted:
            seen += [(i, self.tokens[i] == token) for i in self.children(here)]
            place = self.at(here, token)
            if place is None:
                break
            here = place
        return seen


class Learned:
    """What decoding has shown, for all rows and queries of a session.

    Parameters
    ----------
    drafters : sequence of Drafter
        Those that draft rather than copy.
    prior : mapping of str to (mean, strength), optional
        Of bins, by the names of `Evidence`.
    """

    def __init__(
        self, drafters: Sequence[Drafter], prior: Mapping[str, tuple[float, float]] | None = None
    ) -> None:
        self.evidence = Evidence([drafter.name for drafter in drafters])
        believed = self.evidence.prior | dict(prior or {})
        # Under sampling a token of probability p stands with p, under greedy decoding otherwise.
        self.calibrators = {
            drawn: Calibrator(self.evidence.names, prior=believed, discount=_KEPT)
            for drawn in (False, True)
        }
        self.bins = np.arange(len(self.evidence.names))
        self.verify = VerifyTimes()
        self.steps = [Steps() for _ in drafters]
        self.rate: Rate | None = None
        self.policy = make_policy("ucb", beta=_WIDE)
        self.policy.reset(max(1, len(drafters)), seed=0)
        widest = max((len(drafter.domains) for drafter in drafters), default=0)
        for i, drafter in enumerate(drafters):
            own = len(drafter.domains)
            self.policy.update(i, _UNTRAINED if not own else _WIDEST if own == widest else _TRAINED)

    def round(self, tokens: int, seconds: float) -> None:
        """A round emitted so many tokens in this time."""
        if self.rate is None:
            self.rate = Rate(tokens / seconds)
        self.rate.observe(tokens, seconds)

    def price(self, drafter: int) -> float:
        """Tokens that the time of a drafter's step would bring elsewhere; 0 until it is known."""
        return 0.0 if self.rate is None else self.rate.value * self.steps[drafter].mean

    def state_dict(self) -> dict[str, Any]:
        """What it knows of tokens, as JSON holds it; of times it learns anew."""
        return {
            "greedy": self.calibrators[False].state_dict(),
            "sampled": self.calibrators[True].state_dict(),
            "policy": self.policy.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up what `state_dict` gave."""
        self.calibrators[False].load_state_dict(state["greedy"])
        self.calibrators[True].load_state_dict(state["sampled"])
        self.policy.load_state_dict(state["policy"])


class _Chain(Sampling):
    """Has a drafter draft its likeliest tokens, each while the next is worth its step."""

    def __init__(self, sampling: Sampling, goes_on: Callable[[int, Tensor], bool]) -> None:
        super().__init__(sampling.processors)
        self._goes_on = goes_on

    def confident(self, token: int, probs: Tensor) -> bool:
        return self._goes_on(token, probs)


class Merged(Drafter):
    """Several drafters' tokens in one block.

    Prompt lookup and suffix drafting become one search that finds all continuations (suffix
    drafting adds those of earlier queries); of all others one is asked in a query, which a bandit
    over queries chooses, or `reader`.

    Parameters
    ----------
    drafters : sequence of Drafter
        Whom arms of these ask takes part, each once.
    prior : mapping of str to (mean, strength), optional
        What to believe of bins at first (`Learned`).
    reader : callable, optional
        Names the drafter for a prompt, as a learned router does.

    Attributes
    ----------
    proposers : tuple of str
        Who proposes, in the order of `Draft.owners`.
    learned : Learned
    """

    name = "merged"

    def __init__(
        self,
        drafters: Sequence[Drafter],
        prior: Mapping[str, tuple[float, float]] | None = None,
        reader: Reader | None = None,
    ) -> None:
        every = {id(base): base for drafter in drafters for base in drafter.bases}.values()
        self._copying = any(isinstance(base, PromptLookup | Suffix) for base in every)
        recall = any(isinstance(base, Suffix) for base in every)
        copying = PromptLookup | Suffix | NoDraft
        self.drafters = [base for base in every if not isinstance(base, copying)]
        self.given = list(drafters)
        self.proposers = (*PROPOSERS, *(drafter.name for drafter in self.drafters))
        self.needs_features = tuple(
            sorted({layer for drafter in self.drafters for layer in drafter.needs_features})
        )
        self.learned = Learned(self.drafters, prior)
        self._reader = reader
        self._copies = Copies(recall)
        self._reset()

    def _reset(self) -> None:
        self._chosen: int | None = None
        self._asked: int | None = None
        self._n = 1
        self._calibrator = self.learned.calibrators[False]
        self._chance = list[float]()
        self._offered: Candidates | None = None
        self._chain = list[int]()
        self._before, self._nodes, self._begun, self._drafted = 0, 0, 0.0, 0.0
        self._worth = list[float]()

    @property
    def parts(self) -> list[Drafter]:
        return self.drafters

    def over(self, drafters: Sequence[Drafter]) -> Merged:
        """Another for another row, over its own drafters, that learns together with this one."""
        row = Merged([], reader=self._reader)
        row._copying, row._copies = self._copying, Copies(self._copies.recall)
        row.drafters, row.proposers = list(drafters), self.proposers
        row.needs_features, row.learned = self.needs_features, self.learned
        row._reset()
        return row

    def clone(self) -> Merged:
        return self.over([drafter.clone() for drafter in self.drafters])

    def for_rows(self, target: RaggedModel) -> RowsDrafter:
        """Blocks row by row, of drafters over the same rows."""
        return MergedRows(self, target)

    def blocks(self, n: int) -> set[int]:
        return {1 + min(n, _FEW), 1 + n}

    def start(self, tokens: Sequence[int]) -> None:
        self._judge()
        self._reset()
        if self._copying:
            self._copies.start(tokens)
        if self.drafters:
            self._chosen = self._choose(tokens)
            self._guarded(lambda drafter: drafter.start(tokens))

    def _choose(self, tokens: Sequence[int]) -> int:
        """Who drafts in this query."""
        if self._reader is not None:
            names = self.proposers[len(PROPOSERS) :]
            name = checks.choice("drafter named for the prompt", self._reader(tokens), names)
            return names.index(name)
        return self.learned.policy.select() if len(self.drafters) > 1 else 0

    def _judge(self) -> None:
        """The query is over: what was its drafter worth, in tokens of those asked for?"""
        if self._chosen is not None and self._worth and self._reader is None:
            mean = sum(self._worth) / len(self._worth)
            self.learned.policy.update(self._chosen, min(1.0, max(0.0, mean)))

    def _guarded(self, act: Callable[[Drafter], Any]) -> Any:
        """Have the query's drafter do something; without it for the rest, if it cannot."""
        if self._chosen is None:
            return None
        drafter = self.drafters[self._chosen]
        try:
            return act(drafter)
        except Exception as error:
            warnings.warn(
                f"drafter {drafter.name!r} is disabled for this query "
                f"({type(error).__name__}: {error}); decoding goes on without it, its output "
                "unchanged",
                RuntimeWarning,
                stacklevel=2,
            )
            self._chosen = None
            return None

    def commit(self, tokens: Sequence[int], features: Tensor | None = None) -> None:
        if self._offered is not None:
            self._learn(tokens[self._before :])
        if self._copying:
            self._copies.commit(tokens)
        given = self.needs_features
        self._guarded(lambda d: d.commit(tokens, features_of(d, features, given)))

    def _learn(self, emitted: Sequence[int]) -> None:
        """What the emitted tokens tell of the candidates, and the round of times."""
        offered, learned = self._offered, self.learned
        assert offered is not None
        self._offered = None
        now = time.perf_counter()
        learned.verify.observe(self._nodes, now - self._drafted)
        learned.round(max(1, len(emitted)), now - self._begun)
        seen = offered.seen(emitted)
        pairs = [(key, stood) for node, stood in seen for key in offered.keys[node]]
        if self._chain:
            pairs += self._learn_chain(offered, dict(seen))
        self._calibrator.observe([key for key, _ in pairs], [stood for _, stood in pairs])

    def _learn_chain(self, offered: Candidates, seen: Mapping[int, bool]) -> list[tuple[int, bool]]:
        """How far the drafter's own tokens stand: what it was worth, and what to expect of it."""
        assert self._asked is not None
        stood = [seen.get(node, False) for node in self._chain]
        length = stood.index(False) if False in stood else len(stood)
        price = self.learned.price(self._asked)
        self._worth.append((length - price * len(stood)) / self._n)
        copied = any(
            seen.get(i) and min(offered.owners[i]) < len(PROPOSERS) for i in offered.children(-1)
        )
        if copied or self._chain[0] not in seen:
            return []  # what it adds counts where copying fails
        at_depth = self.learned.evidence.at_depth
        known = [node for node in self._chain if node in seen]
        return [(at_depth(self._asked, d), seen[node]) for d, node in enumerate(known)]

    def propose(self, tokens: Sequence[int], n: int, sampling: Sampling) -> Draft:
        self._begun = time.perf_counter()
        self._before, self._n, self._chain, self._asked = len(tokens), n, [], self._chosen
        self._calibrator = self.learned.calibrators[sampling.do_sample]
        self._chance = self._calibrator.chance(self.learned.bins).tolist()
        offered = Candidates(self._chance)
        if self._copying:
            self._copy(offered, n)
        drafted = Draft()
        if self._chosen is not None and self._worth_asking(offered, n):
            drafted = self._ask(offered, tokens, n, sampling)
        draft = self._block(offered, n)
        draft.owed, draft.switch_seconds = drafted.owed, drafted.switch_seconds
        self._offered, self._nodes = offered, len(draft.tokens)
        self._drafted = time.perf_counter()
        return draft

    def _copy(self, offered: Candidates, n: int) -> None:
        """All that followed the text's end elsewhere, as far as it is likely."""
        copied = self.learned.evidence.copied
        places = list[int]()
        for level in self._copies.propose(n):
            likely = False
            for copy in level:
                parent = -1 if copy.parent < 0 else places[copy.parent]
                key = copied(copy.recalled, copy.length, copy.places, copy.share)
                places.append(offered.add(parent, copy.token, int(copy.recalled), key))
                likely = likely or offered.reached(places[-1]) > _FAINT
            if not likely:
                break

    def _worth_asking(self, offered: Candidates, n: int) -> bool:
        """Whether the query's drafter is expected to add more than its time is worth."""
        assert self._chosen is not None
        price = self.learned.price(self._chosen)
        if price == 0.0:  # nothing is known yet
            return True
        held = [offered.reached(i) for i in range(len(offered.tokens))]
        fails = max(0.0, 1.0 - sum(offered.chances[i] for i in offered.children(-1)))
        offers = list[float]()
        for depth in range(n):
            fails *= self._chance[self.learned.evidence.at_depth(self._chosen, depth)]
            offers.append(fails)
            if marginal_gain(held, offers, n) > price * len(offers):
                return True
        return False

    def _ask(self, offered: Candidates, tokens: Sequence[int], n: int, sampling: Sampling) -> Draft:
        """Let the query's drafter draft, and add its tokens and their runners-up."""
        chosen = self._chosen
        assert chosen is not None
        price, bar = self.learned.price(chosen), _bar(offered, n)
        at_depth, here = self.learned.evidence.at_depth, [-1]

        def goes_on(token: int, probs: Tensor) -> bool:
            here.append(self._add(offered, chosen, here[-1], 0, token, float(probs[token])))
            following = self._chance[at_depth(chosen, len(here) - 1)]
            return offered.reached(here[-1]) * following - bar > price

        begin = time.perf_counter()
        how = _Chain(sampling, goes_on)
        how.begin_block(len(tokens))
        draft = self._guarded(lambda drafter: drafter.propose(tokens, n, how))
        if not isinstance(draft, Draft) or not draft.tokens:
            return Draft()
        self.learned.steps[chosen].observe(
            (time.perf_counter() - begin - draft.switch_seconds) / max(1, draft.depth)
        )
        self._take(offered, chosen, draft, n)
        return draft

    def _take(self, offered: Candidates, drafter: int, draft: Draft, n: int) -> None:
        """A drafter's whole draft; of its first tokens the runners-up as well."""
        places, depth = list[int](), depths(draft.lineage)
        at_depth = self.learned.evidence.at_depth
        for node, (parent, token) in enumerate(zip(draft.lineage, draft.tokens, strict=True)):
            above = -1 if parent < 0 else places[parent]
            if draft.probs is not None:
                confidence = float(draft.probs[node, token])
            else:
                confidence = self._chance[at_depth(drafter, depth[node] - 1)]
            rank = min(RANKS - 1, sum(1 for p in draft.lineage[:node] if p == parent))
            places.append(self._add(offered, drafter, above, rank, token, confidence))
        self._chain = places if draft.parents is None else places[:1]
        if draft.probs is None or draft.parents is not None:
            return
        rows = draft.probs[: 2 if n <= _FEW else 3]
        best, which = rows.topk(min(RANKS, rows.shape[1]))
        for place, (ps, xs) in enumerate(zip(best.tolist(), which.tolist(), strict=True)):
            above = -1 if place == 0 else places[place - 1]
            others = [(x, p) for x, p in zip(xs, ps, strict=True) if x != draft.tokens[place]]
            for rank, (token, confidence) in enumerate(others[: RANKS - 1], start=1):
                if confidence > 0.0:
                    self._add(offered, drafter, above, rank, token, confidence)

    def _add(
        self,
        offered: Candidates,
        drafter: int,
        parent: int,
        rank: int,
        token: int,
        confidence: float,
    ) -> int:
        """A drafter's token among the candidates; what was copied speaks for it, or against."""
        owner = len(PROPOSERS) + drafter
        place = offered.at(parent, token)
        if place is not None and owner in offered.owners[place]:
            return place
        if place is not None:
            relation = Evidence.agreeing(offered.chances[place])
        else:
            copied = any(min(offered.owners[i]) < len(PROPOSERS) for i in offered.children(parent))
            relation = AGAINST if copied else ALONE
        key = self.learned.evidence.drafted(drafter, rank, confidence, relation)
        return offered.add(parent, token, owner, key)

    def _block(self, offered: Candidates, n: int) -> Draft:
        """The likeliest nodes, as many as pay."""
        stands = offered.stands()
        order = sorted(range(len(stands)), key=stands.__getitem__, reverse=True)[:n]
        order = [i for i in order if stands[i] > 0.0]
        seconds, spent = self.learned.verify, time.perf_counter() - self._begun
        if order and seconds(0) == seconds(0):
            order = order[: best_width([stands[i] for i in order], lambda m: spent + seconds(m))]
        kept = sorted(order)
        place = {-1: -1, **{node: i for i, node in enumerate(kept)}}
        return Draft(
            [offered.tokens[i] for i in kept],
            parents=[place[offered.parents[i]] for i in kept],
            owners=[tuple(offered.owners[i]) for i in kept],
            chances=[offered.chances[i] for i in kept],
        )


def _bar(offered: Candidates, n: int) -> float:
    """The chance that a node must beat to come into a block of n."""
    stands = sorted((offered.reached(i) for i in range(len(offered.tokens))), reverse=True)
    return stands[n - 1] if len(stands) >= n else 0.0


class MergedRows(RowsDrafter):
    """Blocks put together row by row, of drafters over the same rows; all rows learn together."""

    def __init__(self, drafter: Merged, target: RaggedModel) -> None:
        self.name = drafter.name
        self.needs_features = drafter.needs_features
        self._parts = [part.for_rows(target) for part in drafter.parts]
        self._rows = [
            drafter.over([RowDrafter(part, slot) for part in self._parts])
            for slot in range(target.storage.n_slots)
        ]

    def start(self, slot: int, tokens: Sequence[int]) -> None:
        self._rows[slot].start(tokens)

    def propose(self, asks: Sequence[Ask]) -> list[Draft | Exception]:
        return [self._rows[slot].propose(tokens, n, how) for slot, tokens, n, how in asks]

    def commit(self, slot: int, tokens: Sequence[int], features: Tensor | None) -> None:
        self._rows[slot].commit(tokens, features)

    def finish(self, slot: int) -> None:
        for part in self._parts:
            part.finish(slot)
