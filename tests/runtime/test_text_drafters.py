"""Prompt lookup and suffix drafting against brute force over the whole text."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from metasd_runtime.decoding.sampling import Sampling
from metasd_runtime.drafters.prompt_lookup import PromptLookup
from metasd_runtime.drafters.suffix import Suffix, SuffixAutomaton

GREEDY = Sampling()
texts = st.lists(st.integers(0, 2), min_size=1, max_size=40)
pieces = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=6), max_size=8)


def latest_match(text: list[int], ngram: int, least: int) -> int | None:
    """Where the longest n-gram at the end of the text, of those lengths, last ended before it."""
    for n in range(min(ngram, len(text)), least - 1, -1):
        for end in range(len(text) - 1, n - 1, -1):
            if text[end - n : end] == text[-n:]:
                return end
    return None


@given(texts, pieces, st.integers(1, 4), st.integers(1, 4), st.integers(1, 6))
@example([0, 0, 0, 0], [], 3, 1, 5)
@example([1], [[1]], 1, 1, 1)
def test_prompt_lookup_is_a_search_of_the_whole_text(prompt, rounds, ngram, least, n):
    least = min(least, ngram)
    drafter = PromptLookup(ngram, least)
    text = list(prompt)
    drafter.start(text)
    for piece in [[], *rounds]:
        text += piece
        drafter.commit(text)
        end = latest_match(text, ngram, least)
        expected = [] if end is None else text[end : end + n]
        draft = drafter.propose(text, n, GREEDY)
        assert draft.tokens == expected
        assert draft.probs is None


@given(texts, texts)
def test_prompt_lookup_forgets_the_last_query(first, second):
    used, fresh = PromptLookup(), PromptLookup()
    used.start(first)
    used.commit([*first, 1, 2])
    used.start(second)
    fresh.start(second)
    assert used.propose(second, 5, GREEDY).tokens == fresh.propose(second, 5, GREEDY).tokens


def longest_repeat(text: list[int]) -> int:
    """Length of the longest suffix that occurs earlier in the text (it may overlap itself)."""
    for n in range(len(text) - 1, 0, -1):
        if any(text[end - n : end] == text[-n:] for end in range(n, len(text))):
            return n
    return 0


@given(st.lists(st.integers(0, 3), min_size=1, max_size=60))
@example([0] * 12)
@example([0, 1] * 8)
def test_the_automaton_finds_the_longest_repeated_suffix(text):
    automaton = SuffixAutomaton()
    for i, token in enumerate(text, start=1):
        automaton.append(token)
        prefix = text[:i]
        length = longest_repeat(prefix)
        if length == 0:
            assert automaton.earlier is None
            continue
        assert automaton.earlier is not None
        found, end = automaton.earlier
        assert found == length
        assert end < i
        assert prefix[end - length : end] == prefix[-length:]


@given(st.lists(texts, max_size=3), texts, pieces, st.integers(1, 3), st.integers(1, 6))
def test_a_suffix_draft_follows_a_longest_match_within_one_document(
    corpus, prompt, rounds, min_match, n
):
    """The draft continues some earlier occurrence of the longest repeated suffix."""
    drafter = Suffix(corpus, min_match)
    text = list(prompt)
    drafter.start(text)
    for piece in [[], *rounds]:
        text += piece
        drafter.commit(text)
        draft = drafter.propose(text, n, GREEDY).tokens
        length, continuations = _matches(corpus, text, n)
        assert draft in (continuations if length >= min_match else [[]])


def _matches(corpus, text, n):
    """Length of the longest suffix seen before in any document, and what followed each time."""
    for length in range(len(text), 0, -1):
        found = [
            document[end : end + n]
            for document in [*corpus, text]
            for end in range(length, len(document) + 1)
            if document[end - length : end] == text[-length:]
            and not (document is text and end == len(text))
        ]
        if found:
            return length, found
    return 0, [[]]


@given(st.lists(texts, min_size=1, max_size=5))
def test_suffix_remembers_earlier_queries(queries):
    """A pool that served queries drafts as one that was given them as its corpus."""
    served = Suffix()
    for query in queries:
        served.start(query[:1])
        served.commit(query)
    given_all = Suffix(queries[:-1])
    given_all.start(queries[-1])
    last = queries[-1]
    assert served.propose(last, 6, GREEDY).tokens == given_all.propose(last, 6, GREEDY).tokens


def test_suffix_memory_is_bounded():
    drafter = Suffix(max_tokens=100)
    longest = 0
    for query in range(200):
        drafter.start([query % 7, 1, 2] * 5)
        longest = max(longest, len(drafter._automaton.text))
        assert len(drafter._automaton.text) == sum(len(d) + 1 for d in drafter._documents)
    assert longest <= 100 + 16
    drafter.start([1, 2, 3, 1, 2])
    assert drafter.propose([1, 2, 3, 1, 2], 2, GREEDY).tokens  # it still drafts


@given(texts)
def test_drafts_hold_only_tokens(text):
    """The separators between documents never leave the suffix drafter."""
    drafter = Suffix([[0], [1], text, [2, 0]], min_match=1)
    drafter.start(text)
    assert all(token >= 0 for token in drafter.propose(text, 9, GREEDY).tokens)
