"""The landing buffer against one that is written out in plain Python."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from common.draft_exchange import Branch, BranchBatch
from model_executor.row_state import RowState
from verifier_svc.drafts.landing import LandingBuffer

NUM_ROWS, NUM_BRANCHES, BRANCH_LEN, K, MAX_LEN = 3, 2, 6, 3, 24

# Two tokens only, so that wrong branches are often right for a while.
token = st.integers(0, 1)
texts = st.lists(st.lists(token, min_size=1, max_size=MAX_LEN - K - 1), min_size=NUM_ROWS, max_size=NUM_ROWS)
branch = st.builds(
    Branch, st.integers(0, NUM_ROWS - 1), st.integers(0, 1), st.integers(0, MAX_LEN + 3), st.lists(token, max_size=9)
)
batches = st.lists(st.lists(branch, max_size=6), max_size=4)


class NaiveLanding:
    def __init__(self) -> None:
        self.branches: dict[int, list[Branch]] = {row: [] for row in range(NUM_ROWS)}

    def put(self, batch: list[Branch]) -> None:
        for one in batch:
            if one.token_ids:
                kept = self.branches[one.row]
                kept.append(one._replace(token_ids=one.token_ids[:BRANCH_LEN]))
                del kept[:-NUM_BRANCHES]

    def match(self, row: int, generation: int, text: list[int], limit: int) -> list[list[int]]:
        """All drafts that may be chosen: the longest rests of the youngest branches."""
        found: list[tuple[int, int, list[int]]] = []
        for one in self.branches[row]:
            skip = len(text) - one.base_len
            is_within = one.generation == generation and 0 <= skip < len(one.token_ids)
            if is_within and text[one.base_len :] == one.token_ids[:skip]:
                rest = one.token_ids[skip:]
                found.append((len(rest), one.base_len, rest[:limit]))
        if not found:
            return [[]]
        best = max(found)[:2]
        return [rest for length, base_len, rest in found if (length, base_len) == best]


@settings(max_examples=400)
@given(
    texts=texts,
    batches=batches,
    generations=st.lists(st.integers(0, 1), min_size=NUM_ROWS, max_size=NUM_ROWS),
    limits=st.lists(st.integers(0, K), min_size=NUM_ROWS, max_size=NUM_ROWS),
    order=st.permutations(range(NUM_ROWS)),
    cleared=st.lists(st.integers(0, NUM_ROWS - 1), max_size=1),
)
def test_equals_the_plain_one(
    texts: list[list[int]],
    batches: list[list[Branch]],
    generations: list[int],
    limits: list[int],
    order: list[int],
    cleared: list[int],
) -> None:
    rows = RowState(NUM_ROWS, MAX_LEN, 16, torch.device("cpu"))
    rows.token_ids.fill_(7)  # what stands behind the text must stay, but for the drafts
    for row, (text, generation) in enumerate(zip(texts, generations, strict=True)):
        rows.set_row(row, text, 1, 0, MAX_LEN, generation)
    landing = LandingBuffer(NUM_ROWS, NUM_BRANCHES, BRANCH_LEN, K, torch.device("cpu"))
    naive = NaiveLanding()
    for batch in batches:
        landing.put(BranchBatch.of(batch))
        naive.put(batch)
    landing.clear(cleared)
    for row in cleared:
        naive.branches[row].clear()
    before = rows.token_ids.clone()
    lengths = landing.match(rows, torch.tensor(order), torch.tensor([limits[row] for row in order])).tolist()
    for row, length in zip(order, lengths, strict=True):
        text = texts[row]
        drafted = rows.token_ids[row, len(text) : len(text) + length].tolist()
        assert drafted in naive.match(row, generations[row], text, limits[row])
        assert rows.token_ids[row, : len(text)].tolist() == text
        assert torch.equal(rows.token_ids[row, len(text) + length :], before[row, len(text) + length :])


def make(text: list[int], generation: int = 0) -> tuple[RowState, LandingBuffer]:
    rows = RowState(1, MAX_LEN, 16, torch.device("cpu"))
    rows.set_row(0, text, 1, 0, MAX_LEN, generation)
    return rows, LandingBuffer(1, NUM_BRANCHES, BRANCH_LEN, K, torch.device("cpu"))


def match(rows: RowState, landing: LandingBuffer) -> list[int]:
    (length,) = landing.match(rows, torch.tensor([0]), torch.tensor([K])).tolist()
    start = int(rows.committed_len[0])
    return rows.token_ids[0, start : start + length].tolist()


def test_a_late_branch_is_used_for_as_long_as_it_is_right() -> None:
    rows, landing = make([1, 2])
    landing.put(BranchBatch.of([Branch(0, 0, 2, [3, 4, 5, 6, 7, 8])]))
    assert match(rows, landing) == [3, 4, 5]
    rows.set_row(0, [1, 2, 3, 4], 1, 0, MAX_LEN)
    assert match(rows, landing) == [5, 6, 7]
    rows.set_row(0, [1, 2, 3, 4, 5, 6, 7], 1, 0, MAX_LEN)
    assert match(rows, landing) == [8]
    rows.set_row(0, [1, 2, 3, 4, 5, 6, 7, 8], 1, 0, MAX_LEN)
    assert match(rows, landing) == []


def test_a_branch_that_was_wrong_is_not_used() -> None:
    rows, landing = make([1, 2, 9])
    landing.put(BranchBatch.of([Branch(0, 0, 2, [3, 4, 5, 6])]))
    assert match(rows, landing) == []


def test_a_branch_of_a_future_that_has_not_come_waits_for_it() -> None:
    rows, landing = make([1, 2])
    landing.put(BranchBatch.of([Branch(0, 0, 3, [4, 5])]))
    assert match(rows, landing) == []
    rows.set_row(0, [1, 2, 3], 1, 0, MAX_LEN)
    assert match(rows, landing) == [4, 5]


def test_another_generation_is_another_request() -> None:
    rows, landing = make([1, 2], generation=1)
    landing.put(BranchBatch.of([Branch(0, 0, 2, [3])]))
    assert match(rows, landing) == []
