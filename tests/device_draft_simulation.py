"""The simulation of drafts for a device that chooses them itself: steps are handed over before outcomes are known."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from common.draft_exchange import BranchBatch, VerifierHello
from model_executor.kernels.select_drafts import select_drafts_ref
from model_executor.landing_tensors import FROM_BRANCH, LandingTensors, make_landing_tensors
from model_executor.row_state import RowState
from tests.draft_simulation import (
    MAX_DRAFT_TOKENS,
    DraftingDevice,
    DraftSimulation,
    LongSimulation,
    Weather,
)
from tests.fake_transport import Network
from tests.staged_writes import FakeStagedWrites
from verifier_svc.drafts.device_drafts import RemoteDeviceDrafts
from verifier_svc.drafts.device_landing import DeviceLanding
from verifier_svc.orchestrator.step import PlannedRow, StepOutcome, StepPlan

_LONGEST = 4  # of the n-gram search, which finds nothing here


@dataclass(frozen=True, slots=True)
class _Inputs:
    """The part of a step's inputs that drafts are chosen from."""

    width: int
    idx_mapping: Tensor
    num_tokens: Tensor
    max_draft_tokens: Tensor
    best_match: Tensor
    period: Tensor
    draft_len: Tensor


class CountingDeviceLanding(DeviceLanding):
    """Knows how many branches have landed."""

    num_landed_branches = 0

    def put(self, branches: BranchBatch) -> None:
        self.num_landed_branches += len(branches)
        super().put(branches)


class ChoosingDevice(DraftingDevice):
    """Drafts as the kernels do, from what was staged for the step when it was handed over."""

    def __init__(
        self,
        rng: random.Random,
        stop_rate: float,
        rows: RowState,
        landing: LandingTensors,
        writes: FakeStagedWrites,
        network: Network,
        step_s: float,
        are_drafts_right: bool,
    ) -> None:
        super().__init__(rng, stop_rate, rows, network, step_s, are_drafts_right)
        self._landing = landing
        self._writes = writes
        self.sources: deque[list[int]] = deque()
        """Of each step that has run and whose outcome the host does not know."""

    def _draft(self, planned_rows: Sequence[PlannedRow], starts: Sequence[int]) -> None:
        self._draft_tokens.clear()
        self._writes.apply()
        numbers = [planned.row for planned in planned_rows]
        state = self._row_state
        state.finished[numbers] = torch.tensor([self.rows[number].finished for number in numbers], dtype=torch.bool)
        state.num_computed_tokens[numbers] = torch.tensor(starts, dtype=torch.int64)
        none = torch.zeros(len(numbers), dtype=torch.int64)
        inputs = _Inputs(
            width=MAX_DRAFT_TOKENS + 1,
            idx_mapping=torch.tensor(numbers, dtype=torch.int64),
            num_tokens=torch.tensor([planned.num_tokens for planned in planned_rows], dtype=torch.int64),
            max_draft_tokens=torch.tensor([planned.max_draft_tokens for planned in planned_rows], dtype=torch.int64),
            best_match=none - 1,
            period=none.clone(),
            draft_len=none.clone(),
        )
        source = torch.zeros(len(numbers), dtype=torch.int32)
        select_drafts_ref(state, inputs, _LONGEST, self._landing, source)
        limits = [self._limit(planned, start) for planned, start in zip(planned_rows, starts, strict=True)]
        counts: list[int] = inputs.draft_len.tolist()
        sources: list[int] = source.tolist()
        assert [found == FROM_BRANCH for found in sources] == [count > 0 for count in counts]
        self.sources.append(sources)
        self._note_drafts(numbers, limits, counts)


class DeviceDraftSimulation(DraftSimulation):
    """One schedule: up to three steps are handed over before the outcome of the first is known."""

    def __init__(self, seed: int, weather: Weather) -> None:
        self.num_branch_steps = 2 + seed % 3  # the depth of the base, and one more
        self._untold: deque[StepPlan] = deque()
        super().__init__(seed, weather)

    def connect(
        self, rng: random.Random, hello: VerifierHello, rows: RowState, step_s: float, are_drafts_right: bool
    ) -> ChoosingDevice:
        writes = self._writes = FakeStagedWrites()
        tensors = make_landing_tensors(self.max_num_seqs, hello.branch_budget, hello.branch_len, rows.device)
        self.landing = CountingDeviceLanding(tensors, writes)
        self.drafts = RemoteDeviceDrafts(self._exchange(self.landing), self.landing)
        self._choosing = ChoosingDevice(
            rng, self.stop_rate, rows, tensors, writes, self.network, step_s, are_drafts_right
        )
        return self._choosing

    def hand_over(self, plan: StepPlan) -> None:
        before_s = self.network.now
        self.drafts.before_step(plan)
        self._writes.hand_over()
        self._untold.append(plan)
        if self.network.now > before_s:
            self._choosing.waits_s.append((before_s, self.network.now - before_s))

    def take(self, outcome: StepOutcome) -> None:
        self.drafts.after_step(self._untold.popleft(), outcome, self._choosing.sources.popleft())


class LongDeviceSimulation(LongSimulation, DeviceDraftSimulation):
    """With time for something to happen and to pass."""
