"""Replaying drafts over a text: positions, lengths and abstention are counted as the words say."""

import numpy as np

from models.acceptance import AcceptanceCount, ngram_draft, replay


def test_every_step_takes_the_matching_tokens_and_one_of_the_target() -> None:
    text = [9, 1, 2, 3, 4, 5, 6, 7, 8]
    count = AcceptanceCount(3)
    drafts = {1: [1, 2, 0], 4: [], 5: [5, 6, 7]}
    replay(text, 1, lambda base_len: drafts[base_len], count)
    assert count.num_steps == 3
    assert count.num_drafts == 2
    assert count.num_draft_tokens == 6
    assert count.accepted_per_position == [2, 2, 1]
    assert count.summary()["acceptance_length"] == 1 + 5 / 2
    assert count.summary()["tokens_per_step"] == 1 + 5 / 3


def test_nothing_after_a_rejected_draft_token_counts() -> None:
    count = AcceptanceCount(3)
    replay([9, 1, 2, 3], 1, lambda base_len: [0, 2, 3], count)
    assert count.accepted_per_position == [0, 0, 0]


def test_a_longer_match_wins_over_a_more_recent_shorter_one() -> None:
    context = np.array([1, 2, 3, 50, 60, 2, 3, 70, 80, 1, 2, 3])
    assert ngram_draft(context, 2) == [50, 60]


def test_of_equal_matches_the_most_recent_one_is_copied() -> None:
    context = np.array([1, 2, 50, 60, 1, 2, 70, 80, 1, 2])
    assert ngram_draft(context, 2) == [70, 80]


def test_without_a_match_of_two_tokens_there_is_no_draft() -> None:
    assert ngram_draft(np.array([1, 2, 3, 4, 2]), 3) == []
    assert ngram_draft(np.array([1]), 3) == []
