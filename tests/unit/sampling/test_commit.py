"""Match and commit against a plain loop, and each cut by example."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch

from model_executor.row_state import RowState
from tests.sampling_reference import CPU, make_request
from verifier_svc.sampling.commit import FINISHED_LENGTH, FINISHED_STOP, NOT_FINISHED, CommitResult, match_and_commit
from verifier_svc.sampling.state import SamplingState

MAX_MODEL_LEN = 16
PROMPT = [9, 9, 9, 9]


class OneRow:
    """Row 1 of three, with `drafts` behind the committed tokens."""

    def __init__(self, drafts: Sequence[int], max_len: int = MAX_MODEL_LEN, stop: Sequence[int] = ()) -> None:
        self.rows = RowState(3, MAX_MODEL_LEN, 4, CPU)
        self.state = SamplingState(3, 32, CPU)
        self.rows.set_row(1, PROMPT, len(PROMPT), 0, max_len)
        self.state.set_row(1, make_request(PROMPT, max_len=max_len, stop=stop))
        self.num_drafts = len(drafts)
        self.rows.token_ids[1, 4 : 4 + len(drafts)] = torch.tensor(drafts, dtype=torch.int32)
        self.others = self.rows.token_ids[[0, 2]].clone()

    def commit(self, sampled: Sequence[int], samples: bool = True) -> CommitResult:
        result = match_and_commit(
            self.rows,
            self.state,
            torch.tensor([1]),
            torch.tensor([self.num_drafts]),
            torch.tensor([sampled]),
            torch.tensor([samples]),
        )
        assert torch.equal(self.rows.token_ids[[0, 2]], self.others)
        return result

    @property
    def output(self) -> list[int]:
        return self.rows.token_ids[1, 4 : int(self.rows.committed_len[1])].tolist()


def outcome(result: CommitResult) -> tuple[int, int, int]:
    return int(result.num_emitted[0]), int(result.num_accepted[0]), int(result.finished[0])


@pytest.mark.parametrize(
    ("drafts", "sampled", "output", "num_accepted"),
    [
        ([], [5], [5], 0),
        ([5, 6, 7], [5, 6, 7, 8], [5, 6, 7, 8], 3),
        ([5, 6, 7], [5, 6, 1, 8], [5, 6, 1], 2),
        ([5, 6, 7], [1, 6, 7, 8], [1], 0),
        ([5, 6, 7], [5, 1, 7, 8], [5, 1], 1),  # a draft that matches again behind a mismatch is not accepted
        ([5], [5, 2, -1, -1], [5, 2], 1),
        ([], [3, -1, -1, -1], [3], 0),
    ],
)
def test_emits_the_matching_run_and_one_more(
    drafts: list[int], sampled: list[int], output: list[int], num_accepted: int
) -> None:
    row = OneRow(drafts)
    assert outcome(row.commit(sampled)) == (len(output), num_accepted, NOT_FINISHED)
    assert row.output == output
    assert row.rows.num_computed_tokens[1].item() == len(PROMPT) + len(output) - 1
    assert not row.rows.finished[1]


def test_a_leftover_behind_the_drafts_is_no_draft() -> None:
    """An older claim that still stands in token_ids, and happens to match, is not counted."""
    row = OneRow([5])
    row.rows.token_ids[1, 5] = 6
    assert outcome(row.commit([5, 6, 7])) == (2, 1, NOT_FINISHED)


@pytest.mark.parametrize(
    ("drafts", "sampled", "output", "num_accepted"),
    [
        ([5, 6, 7], [5, 6, 7, 8], [5, 6], 2),  # 6 is a stop token inside the accepted run
        ([5, 4, 7], [5, 6, 7, 8], [5, 6], 1),  # at the mismatch
        ([5, 7, 5], [5, 7, 5, 6], [5, 7, 5, 6], 3),  # as the bonus token
        ([6, 6, 6], [6, 6, 6, 6], [6], 1),
    ],
)
def test_stop_token_cuts_what_follows(
    drafts: list[int], sampled: list[int], output: list[int], num_accepted: int
) -> None:
    row = OneRow(drafts, stop=[30, 6])
    assert outcome(row.commit(sampled)) == (len(output), num_accepted, FINISHED_STOP)
    assert row.output == output
    assert row.rows.finished[1]


def test_stop_token_behind_the_first_mismatch_does_not_stop() -> None:
    row = OneRow([5, 7, 7], stop=[6])
    assert outcome(row.commit([5, 4, 6, 6])) == (2, 1, NOT_FINISHED)


@pytest.mark.parametrize(
    ("room", "num_emitted", "finished"), [(1, 1, 2), (2, 2, 2), (3, 3, 2), (4, 4, 2), (5, 4, 0), (0, 0, 2)]
)
def test_length_limit_cuts_the_run(room: int, num_emitted: int, finished: int) -> None:
    row = OneRow([5, 6, 7], max_len=len(PROMPT) + room)
    assert outcome(row.commit([5, 6, 7, 8])) == (num_emitted, min(3, num_emitted), finished)
    assert row.output == [5, 6, 7, 8][:num_emitted]
    assert row.rows.token_ids[1, 4 + num_emitted :].tolist() == [5, 6, 7, 0, 0, 0, 0, 0, 0, 0, 0, 0][num_emitted:]


def test_stop_token_as_the_last_that_fits_is_a_stop() -> None:
    assert outcome(OneRow([5, 6], max_len=6, stop=[6]).commit([5, 6, 7])) == (2, 2, FINISHED_STOP)


def test_stop_token_beyond_the_length_limit_is_not_seen() -> None:
    assert outcome(OneRow([5, 6], max_len=5, stop=[6]).commit([5, 6, 7])) == (1, 1, FINISHED_LENGTH)


@pytest.mark.parametrize("max_len", [4, 16])
def test_a_chunk_that_does_not_sample_changes_nothing(max_len: int) -> None:
    row = OneRow([], max_len=max_len)
    row.rows.num_computed_tokens[1] = 2
    before = [tensor.clone() for tensor in (row.rows.token_ids, row.rows.committed_len, row.rows.num_computed_tokens)]
    assert outcome(row.commit([7, 7, 7, 7], samples=False)) == (0, 0, NOT_FINISHED)
    after = (row.rows.token_ids, row.rows.committed_len, row.rows.num_computed_tokens)
    assert all(map(torch.equal, before, after))
    assert not row.rows.finished[1]


@pytest.mark.parametrize("seed", range(40))
def test_batch_agrees_with_a_loop_over_rows(seed: int) -> None:
    """Rows of every kind together, in any order, close to max_model_len: tokens, lengths and codes of a plain loop."""
    rng = random.Random(seed)
    num_rows, num_entries, num_drafts = 24, 16, rng.randint(0, 4)
    rows, state = RowState(num_rows, MAX_MODEL_LEN, 4, CPU), SamplingState(num_rows, 8, CPU)
    rows.token_ids.copy_(torch.randint(0, 8, rows.token_ids.shape, generator=torch.Generator().manual_seed(seed)))
    for row in range(num_rows):
        length = rng.randint(1, MAX_MODEL_LEN - 1)
        tokens = [rng.randrange(8) for _ in range(length)]
        max_len = rng.randint(length + 1, MAX_MODEL_LEN)
        rows.set_row(row, tokens, rng.randint(1, length), length - 1, max_len)
        state.set_row(row, make_request(tokens, stop=rng.sample(range(8), rng.randint(0, 3))))
    idx = rng.sample(range(num_rows), num_entries)
    samples = [rng.random() < 0.85 for _ in idx]
    draft_len = [0 if not ok else rng.randint(0, num_drafts) for ok in samples]
    draft_len = [
        min(n, int(rows.max_len[row] - rows.committed_len[row]) - 1) for n, row in zip(draft_len, idx, strict=True)
    ]
    sampled: list[list[int]] = []
    expected_tokens = rows.token_ids.tolist()
    expected: list[tuple[int, int, int]] = []
    for row, num, ok in zip(idx, draft_len, samples, strict=True):
        length, max_len = int(rows.committed_len[row]), int(rows.max_len[row])
        drafts = expected_tokens[row][length : length + num]
        drawn = [draft if rng.random() < 0.7 else rng.randrange(8) for draft in drafts] + [rng.randrange(8)]
        sampled.append(drawn + [-1] * (num_drafts - num))
        emitted = accepted = code = 0
        while ok and code == 0 and emitted <= num:
            token = drawn[emitted]
            expected_tokens[row][length + emitted] = token
            emitted += 1
            if token in state.stop_token_ids[row].tolist():
                code = FINISHED_STOP
            elif length + emitted == max_len:
                code = FINISHED_LENGTH
            if emitted > num or token != drafts[emitted - 1]:
                break
            accepted += 1
        expected.append((emitted, accepted, code))
    old_len, old_computed = rows.committed_len.clone(), rows.num_computed_tokens.clone()

    result = match_and_commit(
        rows, state, torch.tensor(idx), torch.tensor(draft_len), torch.tensor(sampled), torch.tensor(samples)
    )

    got = list(zip(result.num_emitted.tolist(), result.num_accepted.tolist(), result.finished.tolist(), strict=True))
    assert got == expected
    assert rows.token_ids.tolist() == expected_tokens
    for row in range(num_rows):
        emitted, _, code = expected[idx.index(row)] if row in idx else (0, 0, 0)
        assert rows.committed_len[row] == old_len[row] + emitted
        assert rows.num_computed_tokens[row] == (old_len[row] + emitted - 1 if emitted else old_computed[row])
        assert rows.finished[row].item() == (code != NOT_FINISHED)
