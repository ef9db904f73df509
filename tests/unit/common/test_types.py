"""Draft statistics."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from common.types import DraftStats


def stats_of(steps: list[tuple[int, int]]) -> DraftStats:
    stats = DraftStats()
    for num_draft_tokens, num_accepted_tokens in steps:
        stats.add(num_draft_tokens, num_accepted_tokens)
    return stats


def test_counts() -> None:
    stats = stats_of([(3, 2), (0, 0), (1, 1), (5, 0)])
    assert (stats.num_drafts, stats.num_draft_tokens, stats.num_accepted_tokens) == (3, 9, 3)
    assert stats.num_accepted_tokens_per_pos == [2, 1, 0, 0, 0]
    assert stats.acceptance_length == 2.0


def test_without_a_draft_nothing_is_counted() -> None:
    stats = stats_of([(0, 0)] * 5)
    assert stats == DraftStats()
    assert stats.acceptance_length == 1.0


def test_merge_leaves_the_other_alone() -> None:
    total, other = stats_of([(1, 1)]), stats_of([(3, 3), (2, 0)])
    total.merge(other)
    assert total == stats_of([(1, 1), (3, 3), (2, 0)])
    assert other == stats_of([(3, 3), (2, 0)])
    assert total.num_accepted_tokens_per_pos is not other.num_accepted_tokens_per_pos


step = st.integers(0, 6).flatmap(lambda drafted: st.tuples(st.just(drafted), st.integers(0, drafted)))


@given(first=st.lists(step), second=st.lists(step))
def test_merged_is_counted_together(first: list[tuple[int, int]], second: list[tuple[int, int]]) -> None:
    total = stats_of(first)
    total.merge(stats_of(second))
    assert total == stats_of(first + second)
    assert sum(total.num_accepted_tokens_per_pos) == total.num_accepted_tokens <= total.num_draft_tokens
