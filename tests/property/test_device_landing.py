"""The landing buffer of a device against that of a CPU, and what its mirror says against one in plain Python."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from common.draft_exchange import Branch, BranchBatch
from model_executor.landing_tensors import BASE_LEN, GENERATION, HEADER, LENGTH, LandingTensors, make_landing_tensors
from tests.staged_writes import FakeStagedWrites
from verifier_svc.drafts.device_landing import DeviceLanding
from verifier_svc.drafts.landing import LandingBuffer

NUM_ROWS, NUM_BRANCHES, BRANCH_LEN, K = 40, 3, 6, 3

rows = st.sampled_from([0, 1, 2, 11, 12, 30, NUM_ROWS - 1])  # some a few rows apart, some many
tokens = st.integers(0, 1)  # two only, so that wrong branches are often right for a while
branches = st.lists(
    st.builds(Branch, rows, st.integers(0, 1), st.integers(0, 12), st.lists(tokens, min_size=1, max_size=9)),
    max_size=9,
)
actions = st.lists(st.one_of(branches, st.lists(rows, max_size=2).map(tuple), st.just("step")), max_size=8)


class OpenLandingBuffer(LandingBuffer):
    """One whose branches can be looked at."""

    def records(self) -> torch.Tensor:
        header = torch.stack([self._base_len, self._length, self._generation], dim=-1)
        return torch.cat([header, self._token_ids], dim=-1)


@dataclass
class Setup:
    tensors: LandingTensors
    writes: FakeStagedWrites
    landing: DeviceLanding


def make() -> Setup:
    tensors = make_landing_tensors(NUM_ROWS, NUM_BRANCHES, BRANCH_LEN, torch.device("cpu"))
    writes = FakeStagedWrites()
    return Setup(tensors, writes, DeviceLanding(tensors, writes))


def branches_of(records: torch.Tensor) -> list[list[list[int]]]:
    """[row][slot]: base_len, length, generation and tokens; nothing where there is no branch."""
    table: list[list[list[int]]] = records.tolist()
    return [[record[: HEADER + record[LENGTH]] if record[LENGTH] else [] for record in slots] for slots in table]


@settings(max_examples=200)
@given(actions)
def test_holds_after_each_step_what_the_one_of_a_cpu_holds(
    actions: list[list[Branch] | tuple[int, ...] | str],
) -> None:
    setup = make()
    buffer = OpenLandingBuffer(NUM_ROWS, NUM_BRANCHES, BRANCH_LEN, K, torch.device("cpu"))
    for action in [*actions, "step"]:
        if isinstance(action, list):
            setup.landing.put(BranchBatch.of(action))
            buffer.put(BranchBatch.of(action))
        elif isinstance(action, tuple):
            setup.landing.clear(list(action))
            buffer.clear(list(action))
        else:
            before = setup.tensors.records.clone()
            setup.landing.flush()
            assert torch.equal(setup.tensors.records, before), "written before the step began"
            assert sum(len(write.values) for write in setup.writes.staged) <= before.numel()
            setup.writes.hand_over()
            setup.writes.apply()
            assert branches_of(setup.tensors.records) == branches_of(buffer.records())
    setup.landing.flush()
    assert not setup.writes.staged, "nothing has changed, and something is written"


def test_the_branches_of_neighbours_are_one_write() -> None:
    setup = make()
    setup.landing.put(BranchBatch.of([Branch(row, 0, 0, [1]) for row in (*range(0, 20, 2), 39)]))
    setup.landing.flush()
    row_size = NUM_BRANCHES * (HEADER + BRANCH_LEN)
    assert [(write.start, len(write.values)) for write in setup.writes.staged] == [
        (0, 19 * row_size),
        (39 * row_size, row_size),
    ]


@settings(max_examples=300)
@given(
    branches,
    st.lists(st.lists(tokens, min_size=1, max_size=14), min_size=3, max_size=3),
    st.lists(st.integers(0, 1), min_size=3, max_size=3),
)
def test_num_claimed(batch: list[Branch], texts: list[list[int]], generations: list[int]) -> None:
    setup = make()
    setup.landing.put(BranchBatch.of(batch))
    setup.landing.flush()
    setup.writes.hand_over()
    setup.writes.apply()
    asked = [11, 0, 2]
    expected: list[int] = []
    for row, text, generation in zip(asked, texts, generations, strict=True):
        best = 0
        for record in setup.tensors.records[row].tolist():
            skip = len(text) - record[BASE_LEN]
            claimed = record[HEADER : HEADER + record[LENGTH]]
            is_current = record[GENERATION] == generation
            if is_current and 0 <= skip < len(claimed) and text[record[BASE_LEN] :] == claimed[:skip]:
                best = max(best, len(claimed) - skip)
        expected.append(best)
    found = setup.landing.num_claimed(asked, generations, texts)
    assert found.dtype == np.int64
    assert found.tolist() == expected
