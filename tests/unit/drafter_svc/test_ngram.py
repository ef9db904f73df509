"""n-gram drafting against a search written out in plain Python."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import InvalidArgumentError
from drafter_svc.methods.ngram import NgramMethod
from model_executor.row_state import RowState

MAX_LEN = 64


def naive_draft(tokens: list[int], longest: int, shortest: int, limit: int) -> list[int]:
    for size in range(min(longest, len(tokens) - 1), shortest - 1, -1):
        for end in range(len(tokens) - 2, size - 2, -1):
            if tokens[end - size + 1 : end + 1] == tokens[-size:]:
                period = len(tokens) - 1 - end
                count = limit if size == longest else min(size, limit)
                text = list(tokens)
                for _ in range(count):
                    text.append(text[-period])
                return text[len(tokens) :]
    return []


def make_rows(texts: list[list[int]]) -> RowState:
    rows = RowState(len(texts), MAX_LEN, 16, torch.device("cpu"))
    rows.token_ids.fill_(-9)  # whatever lies behind the text must not matter
    for row, text in enumerate(texts):
        rows.set_row(row, text, len(text), 0, MAX_LEN)
    return rows


def draft(texts: list[list[int]], limits: list[int], longest: int = 5, shortest: int = 2) -> list[list[int]]:
    rows = make_rows(texts)
    counts = NgramMethod(longest, shortest).propose(rows, torch.arange(len(texts)), torch.tensor(limits)).tolist()
    assert rows.committed_len.tolist() == [len(text) for text in texts]
    for row, text in enumerate(texts):
        assert rows.token_ids[row, : len(text)].tolist() == text
        assert (rows.token_ids[row, len(text) + counts[row] :] == -9).all()
    return [rows.token_ids[r, len(t) : len(t) + counts[r]].tolist() for r, t in enumerate(texts)]


text_and_limit = st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=40), st.integers(0, 6))


@settings(max_examples=300, deadline=None)
@given(
    batch=st.lists(text_and_limit, min_size=1, max_size=5),
    longest=st.integers(1, 6),
    shortest=st.integers(1, 3),
)
def test_equals_the_plain_search(batch: list[tuple[list[int], int]], longest: int, shortest: int) -> None:
    shortest = min(shortest, longest)
    texts, limits = [text for text, _ in batch], [limit for _, limit in batch]
    expected = [naive_draft(text, longest, shortest, limit) for text, limit in batch]
    assert draft(texts, limits, longest, shortest) == expected


def test_longest_match_wins_over_a_more_recent_one() -> None:
    assert draft([[1, 2, 3, 7, 9, 3, 8, 1, 2, 3]], [1], shortest=1) == [[7]]


def test_most_recent_match_among_equals() -> None:
    assert draft([[1, 2, 7, 1, 2, 8, 1, 2]], [1]) == [[8]]


def test_abstains_without_a_match() -> None:
    assert draft([[1, 2, 3, 4], [5], [1, 9, 1]], [3, 3, 3]) == [[], [], []]


def test_draft_is_as_long_as_the_match_up_to_the_limit() -> None:
    text = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert draft([[*text, 40, 1, 2]], [5]) == [[3, 4]]
    assert draft([[*text, 40, 1, 2, 3]], [5]) == [[4, 5, 6]]
    assert draft([[*text, 40, 1, 2, 3, 4, 5]], [4]) == [[6, 7, 8, 9]]
    assert draft([[*text, 40, 1, 2, 3]], [1]) == [[4]]


def test_a_loop_goes_on_with_its_period() -> None:
    assert draft([[1, 2, 1, 2, 1, 2]], [5], longest=4) == [[1, 2, 1, 2, 1]]
    assert draft([[7] * 9], [4]) == [[7, 7, 7, 7]]


def test_limit_zero_drafts_nothing() -> None:
    assert draft([[7] * 9, [7] * 9], [0, 2]) == [[], [7, 7]]


def test_bounds_are_checked() -> None:
    with pytest.raises(InvalidArgumentError, match="prompt_lookup_min = 3"):
        NgramMethod(2, 3)
