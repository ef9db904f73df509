"""The orchestrator: which rows run in the next step, and what an earlier step's outcome means for them.

Pure Python; no torch, no clock, no threads. `plan()` assumes that every draft token in flight was accepted and reserves
blocks for that; `apply()` brings the truth. Any number of plans may be ahead of the outcomes, which arrive in order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from common.errors import InvalidArgumentError, ResourceExhaustedError
from common.types import DraftStats, Request
from verifier_svc.orchestrator.block_pool import ROOT_UID, BlockPool
from verifier_svc.orchestrator.request_state import RequestState
from verifier_svc.orchestrator.row_table import RowTable
from verifier_svc.orchestrator.step import BlockAppend, Event, NewRow, PlannedRow, RowOutcome, StepOutcome, StepPlan


@dataclass(slots=True)
class OrchestratorStats:
    """Counters since the start."""

    num_preemptions: int = 0
    num_stale_outcomes: int = 0
    """Row outcomes dropped because their row had moved to another generation."""
    num_prefix_queries: int = 0
    """Tokens looked up in the prefix cache."""
    num_prefix_hits: int = 0
    """Tokens found there."""


class Orchestrator:
    """Owns the requests: queue, admission, scheduling, KV blocks, draft budget.

    Args:
        pool: KV blocks; must hold the longest request, so that one request alone always gets through.
        max_num_seqs: rows.
        max_num_batched_tokens: tokens of one step, draft tokens included; at least max_num_seqs, so that every running
            row gets its token.
        max_num_waiting: bound of the queue.
        max_prefill_beside_decode: prompt tokens of a step in which rows decode, which wait for them. What the rows take
            is part of it, but half of it is left to prompts, and a token at least. None: no bound but that of all
            steps.
    """

    def __init__(
        self,
        pool: BlockPool,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_num_waiting: int,
        max_prefill_beside_decode: int | None = None,
    ) -> None:
        if max_num_batched_tokens < max_num_seqs:
            limit = f"at least max_num_seqs = {max_num_seqs}"
            raise InvalidArgumentError("max_num_batched_tokens", max_num_batched_tokens, limit)
        self.pool = pool
        self.stats = OrchestratorStats()
        self.draft_stats = DraftStats()
        self.on_admitted: Callable[[str], None] | None = None
        """Called with the id of a request that gets its first row: there is no clock here to say how long it took."""
        self._max_num_batched_tokens = max_num_batched_tokens
        self._max_num_waiting = max_num_waiting
        self._max_prefill_beside_decode = max_prefill_beside_decode or max_num_batched_tokens
        self._requests: dict[str, RequestState] = {}
        self._waiting: deque[RequestState] = deque()
        self._running: list[RequestState] = []  # oldest admission first; preemption takes from the end
        self._rows = RowTable(max_num_seqs, pool)
        self._in_flight: deque[StepPlan] = deque()
        self._next_step_id = 0

    # -- requests ------------------------------------------------------------------------------------------------

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_in_flight(self) -> int:
        """Steps planned and not yet applied."""
        return len(self._in_flight)

    @property
    def num_planned(self) -> int:
        """Steps planned since the start."""
        return self._next_step_id

    @property
    def has_work(self) -> bool:
        return bool(self._requests or self._in_flight or self._rows.closed)

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises:
            ResourceExhaustedError: the queue is full.
            InvalidArgumentError: the id is in use.
        """
        if len(self._waiting) >= self._max_num_waiting:
            raise ResourceExhaustedError(
                f"{len(self._waiting)} requests are waiting already: expected fewer than "
                f"max_num_waiting = {self._max_num_waiting}"
            )
        if request.request_id in self._requests:
            raise InvalidArgumentError("request_id", request.request_id, "an id that no running request has")
        state = RequestState(request)
        self._requests[request.request_id] = state
        self._waiting.append(state)

    def abort(self, request_id: str) -> bool:
        """Forget a request. Its steps in flight end as no-ops. False: no such request (it may have just finished)."""
        state = self._requests.pop(request_id, None)
        if state is None:
            return False
        if state.row < 0:
            self._waiting.remove(state)
        else:
            self._running.remove(state)
            self._release_row(state)
        return True

    # -- plan ----------------------------------------------------------------------------------------------------

    def plan(self) -> StepPlan | None:
        """The next step, or None when there is nothing to run before another outcome is applied.

        A plan without rows only says which rows were released.
        """
        planned: list[PlannedRow] = []
        block_appends: list[BlockAppend] = []
        budget = self._plan_decode(planned, block_appends)
        if planned:
            most, num_decode_tokens = self._max_prefill_beside_decode, self._max_num_batched_tokens - budget
            budget = min(budget, max(most - num_decode_tokens, most // 2, 1))
        budget = self._plan_prefill(budget, planned)
        new_rows = self._admit(budget, planned, block_appends)
        if not planned and not self._rows.closed:
            return None
        plan = StepPlan(self._next_step_id, self._rows.take_closed(), new_rows, block_appends, planned)
        self._next_step_id += 1
        self._in_flight.append(plan)
        return plan

    def _plan_decode(self, planned: list[PlannedRow], block_appends: list[BlockAppend]) -> int:
        """Plan one token and its drafts for every decode row; returns the tokens left in the step."""
        budget = self._max_num_batched_tokens
        running = self._running
        if not running:
            return budget
        # Every running row gets at least one token, and the first request that waits for a row its share of the budget:
        # drafts give way, or they would keep it waiting until a row ends.
        num_shares = len(running) + bool(self._waiting and self._rows.num_free)
        max_draft = budget // num_shares - 1
        block_size = self.pool.block_size
        index = 0
        while index < len(running):  # preemption takes rows off the end while this runs
            state = running[index]
            index += 1
            if state.num_computed_tokens < state.prefill_len:
                continue
            max_len = state.request.max_len
            room = max_len - len(state.tokens) - state.num_samples_in_flight
            if room <= 0:
                continue  # the steps in flight are sure to reach max_len
            num_draft = min(state.request.num_speculative_tokens, max_draft, room - 1)
            # KV is written for the last committed token and the drafts; the last token of all never needs any.
            num_kv_tokens = min(state.optimistic_len + num_draft, max_len - 1)
            if num_kv_tokens > len(state.block_ids) * block_size and not self._reserve(
                state, num_kv_tokens, block_appends
            ):
                continue
            planned.append(PlannedRow(state.row, state.generation, 1, num_draft, num_draft + 1))
            state.max_tokens_in_flight += num_draft + 1
            state.num_samples_in_flight += 1
            budget -= num_draft + 1
        return budget

    def _plan_prefill(self, budget: int, planned: list[PlannedRow]) -> int:
        for state in self._running:
            if budget == 0:
                break
            if state.in_prefill:
                budget -= self._plan_chunk(state, budget, planned)
        return budget

    def _plan_chunk(self, state: RequestState, budget: int, planned: list[PlannedRow]) -> int:
        """Plan the next chunk of a prefill, whose blocks the row has; returns its tokens."""
        chunk = min(budget, state.prefill_len - state.num_computed_tokens)
        state.num_computed_tokens += chunk
        samples = 0 if state.in_prefill else 1
        planned.append(PlannedRow(state.row, state.generation, chunk, 0, samples))
        state.max_tokens_in_flight += samples
        state.num_samples_in_flight += samples
        # Steps run in order, so a prompt that is planned from here on may share these blocks already.
        state.register_full_blocks(self.pool, state.num_computed_tokens)
        return chunk

    def _admit(self, budget: int, planned: list[PlannedRow], block_appends: list[BlockAppend]) -> list[NewRow]:
        """Give rows and blocks to waiting requests, first come first served."""
        new_rows: list[NewRow] = []
        while self._waiting and self._rows.num_free and budget > 0:
            state = self._waiting[0]
            can_wait = bool(self._running or self._in_flight)
            # One more block for each running row: without it the newcomer is preempted by the next step that grows.
            if can_wait and self.pool.num_free < state.num_new_blocks + len(self._running):
                break
            prompt_logprobs = state.request.params.prompt_logprobs
            if state.committed_len > len(state.request.prompt_token_ids):
                prompt_logprobs = None  # resumed after a preemption: they were reported before the first output token
            # Prompt logprobs need the logits of every position, so nothing may be skipped.
            blocks, uid = ([], ROOT_UID) if prompt_logprobs is not None else self.pool.lookup(state.tokens)
            state.num_new_blocks = self.pool.num_blocks_for(state.prefill_len) - len(blocks)
            if can_wait and self.pool.num_free < state.num_new_blocks + len(self._running):
                self.pool.free(blocks)
                break
            self._waiting.popleft()
            self._rows.take(state)
            self._running.append(state)
            state.last_uid = uid
            state.num_registered_blocks = len(blocks)
            state.num_computed_tokens = len(blocks) * self.pool.block_size
            if state.num_cached_tokens < 0:
                state.num_cached_tokens = state.num_computed_tokens
                if self.on_admitted is not None:
                    self.on_admitted(state.request.request_id)
            if prompt_logprobs is None:
                self.stats.num_prefix_queries += state.prefill_len
                self.stats.num_prefix_hits += state.num_computed_tokens
            state.block_ids = blocks + self.pool.allocate(state.num_new_blocks)
            block_appends.append(BlockAppend(state.row, 0, state.block_ids.copy()))
            new_rows.append(
                NewRow(state.row, state.request, state.tokens.copy(), state.num_computed_tokens, prompt_logprobs)
            )
            budget -= self._plan_chunk(state, budget, planned)
        return new_rows

    # -- apply ---------------------------------------------------------------------------------------------------

    def apply(self, outcome: StepOutcome) -> list[Event]:
        """The truth about the oldest step in flight: correct lengths, finish rows, give blocks back."""
        plan = self._in_flight.popleft()
        if plan.step_id != outcome.step_id:
            raise AssertionError(f"outcome of step {outcome.step_id} came where step {plan.step_id} was due")
        events: list[Event] = []
        for planned, result in zip(plan.rows, outcome.rows, strict=True):
            state = self._rows[planned.row]
            if state is None or state.generation != result.generation or planned.generation != result.generation:
                self.stats.num_stale_outcomes += 1
                continue
            self._apply_row(state, planned, result, events)
        self._rows.free_released(outcome.step_id)
        return events

    def _apply_row(self, state: RequestState, planned: PlannedRow, result: RowOutcome, events: list[Event]) -> None:
        prompt_logprobs = result.prompt_logprobs
        if prompt_logprobs is not None:
            prompt_logprobs = state.take_prompt_logprobs(prompt_logprobs)
        if planned.max_new_tokens == 0:
            if prompt_logprobs:
                request_id = state.request.request_id
                events.append(Event(request_id, [], 0, 0, None, None, prompt_logprobs, state.num_cached_tokens))
            return
        state.max_tokens_in_flight -= planned.max_new_tokens
        state.num_samples_in_flight -= 1
        tokens = result.tokens
        state.tokens += tokens
        if result.num_draft_tokens:
            self.draft_stats.add(result.num_draft_tokens, result.num_accepted_tokens)
        request = state.request
        events.append(
            Event(
                request.request_id,
                tokens,
                result.num_draft_tokens,
                result.num_accepted_tokens,
                result.finish_reason,
                result.logprobs,
                prompt_logprobs,
                state.num_cached_tokens,
            )
        )
        if result.finish_reason is not None:
            del self._requests[request.request_id]
            self._running.remove(state)
            self._release_row(state)
            return
        num_valid = len(state.tokens) - 1  # the last token's KV is written by the next step
        if num_valid // self.pool.block_size > state.num_registered_blocks:
            state.register_full_blocks(self.pool, num_valid)
        state.trim(self.pool)

    # -- rows and blocks -----------------------------------------------------------------------------------------

    def _reserve(self, state: RequestState, num_tokens: int, block_appends: list[BlockAppend]) -> bool:
        """Blocks for the KV of `num_tokens` tokens, taken from the newest requests if it must be.

        False: not in this step; blocks are on their way back, or the row itself was preempted.
        """
        pool = self.pool
        count = pool.num_blocks_for(num_tokens) - len(state.block_ids)
        while pool.num_free < count:
            if pool.num_free + self._rows.num_releasing_blocks >= count:
                return False
            victim = self._running[-1]
            self._preempt(victim)
            if victim is state:
                return False
        blocks = pool.allocate(count)
        block_appends.append(BlockAppend(state.row, len(state.block_ids), blocks))
        state.block_ids += blocks
        return True

    def _preempt(self, state: RequestState) -> None:
        """Back to the head of the queue with its committed tokens. What its steps in flight yield is drawn again."""
        self.stats.num_preemptions += 1
        self._running.remove(state)
        self._release_row(state)
        self._waiting.appendleft(state)

    def _release_row(self, state: RequestState) -> None:
        self._rows.release(state, self._in_flight[-1].step_id if self._in_flight else None)
