"""Steps on a CUDA device: decode steps are enqueued as graphs and read back later, all others run as they come.

A decode step costs the host two small copies, a graph launch and an event; it does not wait for the device. A step with
prefill, or with sampling that the graph does not know, goes through `ModelRunner`, on the same stream and so in order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from common.errors import EngineClosedError
from common.types import FinishReason
from model_executor.kernels.commit_tokens import OUTCOME_HEADER
from model_executor.row_state import RowState
from verifier_svc.engine.decode_graph import DecodeStep
from verifier_svc.engine.model_runner import ModelRunner
from verifier_svc.orchestrator.step import RowOutcome, StepOutcome, StepPlan

_FINISH_REASONS = (None, FinishReason.STOP, FinishReason.LENGTH)


@dataclass(slots=True)
class GraphStats:
    """How steps ran; a graph that is captured and never replayed shows here."""

    num_replays: dict[tuple[int, int], int]
    """By (requests, draft tokens) of the graph."""
    num_eager_steps: int = 0


@dataclass(frozen=True, slots=True)
class _Slot:
    """Pinned memory of one step in flight."""

    batch: Tensor  # [2, max_reqs] int64
    outcome: Tensor  # [max_reqs * (OUTCOME_HEADER + max_width)] int32
    done: torch.cuda.Event


@dataclass(frozen=True, slots=True)
class _InFlight:
    plan: StepPlan
    step: DecodeStep
    slot: _Slot


class CudaExecutor:
    """Runs plans on the current CUDA device.

    Args:
        runner: stages rows, and runs the steps that no graph knows.
        steps: captured decode steps of different sizes.
        rows: row state, one row more than requests can have.
        depth: steps in flight at most.
    """

    def __init__(self, runner: ModelRunner, steps: Sequence[DecodeStep], rows: RowState, depth: int) -> None:
        self._runner = runner
        self._steps = sorted(steps, key=lambda step: (step.num_draft, step.num_reqs))
        self._pad_row = rows.committed_len.shape[0] - 1
        self._pending: deque[_InFlight | StepOutcome] = deque()
        self.stats = GraphStats({(step.num_reqs, step.num_draft): 0 for step in steps})
        max_reqs = max((step.num_reqs for step in steps), default=1)
        max_width = max((step.num_draft for step in steps), default=0) + 1
        self._slots = deque(_make_slot(max_reqs, max_width) for _ in range(depth))
        self._is_broken = False

    def submit(self, plan: StepPlan) -> None:
        """Hand over a plan. A decode step is enqueued; any other runs now."""
        step = self._graph_for(plan)
        if step is None:
            self.stats.num_eager_steps += 1
            self._pending.append(self._runner.run(plan))
            return
        self._runner.stage(plan)
        slot = self._slots.popleft()
        count = len(plan.rows)
        batch = slot.batch[:, : step.num_reqs]
        batch[0, :count] = torch.tensor([planned.row for planned in plan.rows])
        batch[0, count:] = self._pad_row
        batch[1, :count] = torch.tensor([planned.max_draft_tokens for planned in plan.rows])
        batch[1, count:] = 0
        step.enqueue(batch)
        slot.outcome[: step.outcome.numel()].copy_(step.outcome.view(-1), non_blocking=True)
        slot.done.record()
        self.stats.num_replays[step.num_reqs, step.num_draft] += 1
        self._pending.append(_InFlight(plan, step, slot))

    def result(self) -> StepOutcome:
        """Outcome of the oldest plan; waits for its event, and for nothing else."""
        if self._is_broken:
            raise EngineClosedError("an earlier step failed")
        pending = self._pending.popleft()
        if isinstance(pending, StepOutcome):
            return pending
        self._is_broken = True
        pending.slot.done.synchronize()
        self._is_broken = False
        outcome = _read_outcome(pending)
        self._slots.append(pending.slot)
        self._runner.observe(pending.plan, outcome)
        return outcome

    def close(self) -> None:
        """Wait for the steps in flight and let go of the runner."""
        torch.cuda.synchronize()
        self._pending.clear()
        self._runner.close()

    def _graph_for(self, plan: StepPlan) -> DecodeStep | None:
        """The smallest captured step that can do `plan`, if one can."""
        if not plan.rows or plan.new_rows or not self._runner.is_plain_decode(plan):
            return None
        num_draft = max(planned.max_draft_tokens for planned in plan.rows)
        for step in self._steps:
            if step.num_draft >= num_draft and step.num_reqs >= len(plan.rows):
                return step
        return None


def _make_slot(max_reqs: int, max_width: int) -> _Slot:
    return _Slot(
        batch=torch.zeros(2, max_reqs, dtype=torch.int64, pin_memory=True),
        outcome=torch.zeros(max_reqs * (OUTCOME_HEADER + max_width), dtype=torch.int32, pin_memory=True),
        done=torch.cuda.Event(),
    )


def _read_outcome(pending: _InFlight) -> StepOutcome:
    step = pending.step
    table = pending.slot.outcome[: step.outcome.numel()].view(step.num_reqs, -1).tolist()
    rows: list[RowOutcome] = []
    for planned, (count, num_draft, num_accepted, finish, *tokens) in zip(pending.plan.rows, table, strict=False):
        if count == 0:
            rows.append(RowOutcome(planned.row, planned.generation, [], 0, 0))
            continue
        reason = _FINISH_REASONS[finish]
        rows.append(RowOutcome(planned.row, planned.generation, tokens[:count], num_draft, num_accepted, reason))
    return StepOutcome(pending.plan.step_id, rows)
