"""Steps on a CUDA device: enqueued one after the other and read back later; the host never waits for the device.

A step costs the host the staged writes of what changed, a graph launch, two small kernels and an event. The one
exception are the log probabilities of a prompt, which need the logits of every position: their steps wait.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from common.errors import EngineClosedError
from common.types import FinishReason, TokenLogprobs
from model_executor.kernels.commit_tokens import OUTCOME_HEADER
from model_executor.kernels.copy_to_host import copy_to_host
from model_executor.kernels.token_logprobs import PACKED_WIDTH
from model_executor.row_state import RowState
from verifier_svc.drafts.device_drafts import DeviceDrafts
from verifier_svc.engine.device_step import DeviceStep
from verifier_svc.engine.prompt_logprobs import PromptChunk, PromptLogprobs
from verifier_svc.engine.staging import WriteStager
from verifier_svc.engine.step_shape import StepShape
from verifier_svc.orchestrator.step import PlannedRow, RowOutcome, StepOutcome, StepPlan
from verifier_svc.sampling.device_sampler import unpack_logprobs
from verifier_svc.sampling.state import NO_LOGPROBS, SamplingState

_FINISH_REASONS = (None, FinishReason.STOP, FinishReason.LENGTH)


@dataclass(slots=True)
class GraphStats:
    """How steps ran; a graph that is captured and never replayed shows here."""

    num_replays: dict[StepShape, int]
    """Of every graph."""
    num_eager_steps: int = 0


@dataclass(frozen=True, slots=True)
class _Slot:
    """Pinned memory of one step in flight."""

    outcome: Tensor  # [max_reqs * (OUTCOME_HEADER + max_width)] int32
    logprobs: Tensor  # [max_reqs * max_width, PACKED_WIDTH] int32
    done: torch.cuda.Event


@dataclass(slots=True)
class _InFlight:
    plan: StepPlan
    step: DeviceStep | None
    """None: a plan without rows."""
    slot: _Slot
    num_logprobs: list[int] | None = None
    """Of each row of the plan, if one asks for log probabilities. The row may have another request by the outcome."""
    prompt_logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict[int, list[TokenLogprobs]])


class CudaExecutor:
    """Runs plans on the current CUDA device.

    Args:
        steps: of all shapes; there is one that can do any plan.
        rows: row state, one row more than requests can have.
        sampling: parameters of the rows.
        drafts: the host's share of drafting.
        stager: brings changes to the device.
        prompt_logprobs: computes them.
        depth: steps in flight at most.
        is_checked: raise if handing over a step allocates memory or waits for the device.
    """

    def __init__(
        self,
        steps: Sequence[DeviceStep],
        rows: RowState,
        sampling: SamplingState,
        drafts: DeviceDrafts,
        stager: WriteStager,
        prompt_logprobs: PromptLogprobs,
        depth: int,
        is_checked: bool = False,
    ) -> None:
        self._steps = sorted(
            steps, key=lambda step: (step.shape.num_draft, step.shape.num_reqs, step.shape.num_input_tokens)
        )
        self._rows = rows
        self._sampling = sampling
        self._drafts = drafts
        self._stager = stager
        self._prompt_logprobs = prompt_logprobs
        self._max_draft = max(step.shape.num_draft for step in steps)
        """A request may ask for more draft tokens than there are steps for."""
        self._pad_row = rows.committed_len.shape[0] - 1
        self._pending: deque[_InFlight] = deque()
        self.stats = GraphStats({step.shape: 0 for step in steps if step.is_captured})
        max_reqs = max(step.shape.num_reqs for step in steps)
        max_width = max(step.inputs.width for step in steps)
        self._batch = np.zeros((3, max_reqs), dtype=np.int64)
        self._slots = deque(_make_slot(max_reqs, max_width) for _ in range(depth))
        copy_to_host(steps[0].outcome, self._slots[0].outcome)  # compiled before the first request comes
        self._is_broken = False
        self._is_checked = is_checked

    def submit(self, plan: StepPlan) -> None:
        """Hand over a plan: it is enqueued."""
        self._drafts.before_step(plan)
        if not self._is_checked or self._wants_prompt_logprobs(plan):
            self._submit(plan)
            return
        with _no_waiting_no_allocation():
            self._submit(plan)

    def _submit(self, plan: StepPlan) -> None:
        slot = self._slots.popleft()
        pending = _InFlight(plan, None, slot)
        self._stage(plan)
        if plan.rows:
            step = pending.step = self._step_for(plan)
            self._stage_batch(plan, step)
            self._stager.flush()
            step.enqueue()
            copy_to_host(step.outcome, slot.outcome)
            if self._sampling.wants_logprobs(planned.row for planned in plan.rows):
                packed = step.logprobs()
                slot.logprobs[: packed.shape[0]].copy_(packed, non_blocking=True)
                pending.num_logprobs = [self._sampling.num_logprobs_host[planned.row] for planned in plan.rows]
            if step.shape.keeps_hidden:
                pending.prompt_logprobs = self._prompt_logprobs.compute(_prompt_chunks(plan.rows, step))
            self._count(step)
        self._stager.flush()
        slot.done.record()
        self._pending.append(pending)

    def result(self) -> StepOutcome:
        """Outcome of the oldest plan; waits for its event, and for nothing else."""
        if self._is_broken:
            raise EngineClosedError("an earlier step failed")
        pending = self._pending.popleft()
        self._is_broken = True
        pending.slot.done.synchronize()
        outcome, sources = _read_outcome(pending, self._sampling.vocab_size)
        self._is_broken = False
        self._slots.append(pending.slot)
        self._drafts.after_step(pending.plan, outcome, sources)
        return outcome

    def close(self) -> None:
        """Wait for the steps in flight and let go of the drafters."""
        torch.cuda.synchronize()
        self._pending.clear()
        self._drafts.close()

    def _stage(self, plan: StepPlan) -> None:
        """Bring new rows and blocks of a plan to the device."""
        write = self._stager.write
        generations = {planned.row: planned.generation for planned in plan.rows} if plan.new_rows else {}
        for new in plan.new_rows:
            request, computed = new.request, new.num_computed_tokens
            generation = generations[new.row]
            self._rows.set_row(new.row, new.tokens, request.prompt_len, computed, request.max_len, generation, write)
            self._sampling.set_row(new.row, request, write)
            self._prompt_logprobs.set_row(new.row, new.num_prompt_logprobs)
        for append in plan.block_appends:
            self._rows.append_blocks(append.row, append.start, append.block_ids, write)

    def _stage_batch(self, plan: StepPlan, step: DeviceStep) -> None:
        """Row, tokens and draft limit of every entry; those that are left get the row that is finished for ever."""
        count, num_reqs = len(plan.rows), step.shape.num_reqs
        batch = self._batch[:, :num_reqs]
        batch[0, :count] = [planned.row for planned in plan.rows]
        batch[1, :count] = [planned.num_tokens for planned in plan.rows]
        batch[2, :count] = [min(planned.max_draft_tokens, step.shape.num_draft) for planned in plan.rows]
        batch[0, count:] = self._pad_row
        batch[1:, count:] = 0
        self._stager.write(step.inputs.batch, 0, batch.reshape(-1))

    def _step_for(self, plan: StepPlan) -> DeviceStep:
        """The smallest step that can do `plan`."""
        rows, most = plan.rows, self._max_draft
        num_draft = min(most, max(planned.max_draft_tokens for planned in rows))
        num_tokens = 0  # of a mixed step
        keeps_hidden = self._wants_prompt_logprobs(plan)
        # A new row may share blocks that another one fills in this step: a mixed step writes them before it reads.
        if keeps_hidden or plan.new_rows or any(planned.num_tokens > 1 for planned in rows):
            num_tokens = sum(planned.num_tokens + min(most, planned.max_draft_tokens) for planned in rows)
        is_plain = self._sampling.is_plain(planned.row for planned in rows)
        for step in self._steps:
            shape = step.shape
            if (
                shape.is_plain == is_plain
                and shape.keeps_hidden == keeps_hidden
                and (shape.num_tokens is None) == (num_tokens == 0)
                and shape.num_draft >= num_draft
                and shape.num_reqs >= len(rows)
                and shape.num_input_tokens >= num_tokens
            ):
                return step
        raise AssertionError(f"no step for {len(rows)} rows with {num_tokens} tokens and {num_draft} draft tokens")

    def _wants_prompt_logprobs(self, plan: StepPlan) -> bool:
        new = any(row.num_prompt_logprobs is not None for row in plan.new_rows)
        return new or any(self._prompt_logprobs.wants(planned.row) for planned in plan.rows)

    def _count(self, step: DeviceStep) -> None:
        if step.is_captured:
            self.stats.num_replays[step.shape] += 1
        else:
            self.stats.num_eager_steps += 1


def _make_slot(max_reqs: int, max_width: int) -> _Slot:
    def pinned(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.int32, pin_memory=True)

    return _Slot(
        outcome=pinned(max_reqs * (OUTCOME_HEADER + max_width)),
        logprobs=pinned(max_reqs * max_width, PACKED_WIDTH),
        done=torch.cuda.Event(),
    )


def _prompt_chunks(planned: Sequence[PlannedRow], step: DeviceStep) -> dict[int, PromptChunk]:
    """What a mixed step computed, by row. Waits for the device."""
    inputs = step.inputs
    columns = (column.tolist() for column in (inputs.query_start, inputs.query_len, inputs.seq_lens))
    return {
        row.row: PromptChunk(step.hidden[start : start + count], seq_len - count)
        for row, start, count, seq_len in zip(planned, *columns, strict=False)
        if count > 0
    }


def _read_outcome(pending: _InFlight, vocab_size: int) -> tuple[StepOutcome, list[int]]:
    """The outcome of a step that is over, and where the draft of each row came from."""
    plan, step, slot = pending.plan, pending.step, pending.slot
    if step is None:
        return StepOutcome(plan.step_id, []), []
    table = slot.outcome[: step.outcome.numel()].view(step.shape.num_reqs, -1).tolist()
    packed = slot.logprobs.numpy()
    rows: list[RowOutcome] = []
    sources: list[int] = []
    for entry, (planned, line) in enumerate(zip(plan.rows, table, strict=False)):
        count, num_draft, num_accepted, finish, source, *tokens = line
        sources.append(source if count else 0)
        prompt_logprobs = pending.prompt_logprobs.get(planned.row)
        if count == 0:
            rows.append(RowOutcome(planned.row, planned.generation, [], 0, 0, None, None, prompt_logprobs))
            continue
        logprobs = None
        if pending.num_logprobs is not None and pending.num_logprobs[entry] != NO_LOGPROBS:
            first = entry * step.inputs.width
            wanted = pending.num_logprobs[entry]
            logprobs = [unpack_logprobs(packed, first + place, wanted, vocab_size) for place in range(count)]
        reason = _FINISH_REASONS[finish]
        rows.append(
            RowOutcome(
                planned.row,
                planned.generation,
                tokens[:count],
                num_draft,
                num_accepted,
                reason,
                logprobs,
                prompt_logprobs,
            )
        )
    return StepOutcome(plan.step_id, rows), sources


@contextmanager
def _no_waiting_no_allocation() -> Iterator[None]:
    """Raise if what runs inside waits for the device, or allocates memory on it or pinned memory on the host."""
    before = _num_allocations()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says each time that the mode does not find everything
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
    after = _num_allocations()
    if after != before:
        raise RuntimeError(f"a step allocated memory while it was handed over: (device, host) {before} became {after}")


def _num_allocations() -> tuple[int, int]:
    """On the device and of pinned memory, since the start."""
    device = torch.cuda.memory_stats().get("allocation.all.allocated", 0)
    return device, torch.cuda.host_memory_stats().get("active_requests.allocated", 0)
