"""Random workloads for the orchestrator and a simulated device: delay, aborts and memory pressure."""

from __future__ import annotations

import random
from collections import deque

from common.sampling_params import SamplingParams
from common.types import FinishReason, Request
from tests.simulated_device import SimulatedDevice, text_token, true_stream
from verifier_svc.orchestrator.block_pool import BlockPool
from verifier_svc.orchestrator.orchestrator import Orchestrator
from verifier_svc.orchestrator.step import Event, PlannedRow, StepOutcome, StepPlan

BLOCK_SIZE = 4


class SimulatedRun:
    """One random schedule of one random workload: `execute` it, then `check` what came out.

    Args:
        seed: of everything that is random.
        depth: plans that may be ahead of their outcomes.
        max_prefill_beside_decode: see `Orchestrator`.
    """

    MAX_MODEL_LENS = (12, 24, 40)
    MIN_REQUESTS = 1
    MAX_REQUESTS = 8
    MAX_PROMPT_SHARE = 1.0
    STOP_RATES = (0.0, 0.05)
    SPARE_TOKENS = (0, 3, 40)
    """Of a step, beyond one a row."""
    ABORT_RATE = 0.02

    def __init__(self, seed: int, depth: int, max_prefill_beside_decode: int | None = None) -> None:
        rng = self.rng = random.Random(seed)
        self.depth = depth
        self.max_prefill_beside_decode = max_prefill_beside_decode
        self.num_bounded = 0
        """Plans whose prompts took all that they may beside rows that decode."""
        self.prefill_left: dict[int, int] = {}
        """Tokens of each row's prompt that no plan has yet; 0: the row decodes."""
        self.max_num_seqs = max_num_seqs = rng.choice([1, 2, 5])
        self.max_model_len = max_model_len = rng.choice(self.MAX_MODEL_LENS)
        num_blocks = 1 + -(-max_model_len // BLOCK_SIZE) + rng.choice([0, 2, 30])
        self.stop_rate = rng.choice(self.STOP_RATES)
        self.pool = BlockPool(num_blocks, BLOCK_SIZE, enable_prefix_caching=rng.random() < 0.7)
        self.device = self.build_device(rng)
        self.max_num_batched_tokens = max_num_seqs + rng.choice(self.SPARE_TOKENS)
        self.orchestrator = Orchestrator(
            self.pool,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_num_waiting=self.MAX_REQUESTS,
            max_prefill_beside_decode=max_prefill_beside_decode,
        )
        # Requests of one seed continue one text, so that a prompt can hit blocks which another request generated.
        self.requests: list[Request] = []
        for index in range(rng.randint(self.MIN_REQUESTS, self.MAX_REQUESTS)):
            text_seed = rng.randrange(2)
            prompt_len = rng.randint(1, int(self.MAX_PROMPT_SHARE * (max_model_len - 1)))
            prompt = [text_token(text_seed, p) for p in range(prompt_len)]
            max_len = rng.randint(len(prompt) + 1, max_model_len)
            params = SamplingParams(prompt_logprobs=1 if rng.random() < 0.2 else None)
            num_draft = rng.randint(0, 5)
            request = Request(f"r{index}", prompt, params, text_seed, max_len, num_speculative_tokens=num_draft)
            self.requests.append(request)
        self.outputs: dict[str, list[int]] = {r.request_id: [] for r in self.requests}
        self.prompt_logprobs: dict[str, list[float]] = {r.request_id: [] for r in self.requests}
        self.finished: dict[str, FinishReason] = {}
        self.aborted: set[str] = set()
        self.planned: deque[StepPlan] = deque()  # handed out, not run
        self.outcomes: deque[StepOutcome] = deque()  # run, not applied

    def build_device(self, rng: random.Random) -> SimulatedDevice:
        return SimulatedDevice(rng, BLOCK_SIZE, rng.random(), self.stop_rate)

    def execute(self) -> None:
        todo = deque(self.requests)
        for _ in range(5000):
            if todo and self.rng.random() < 0.3:
                self.orchestrator.add(todo.popleft())
            if self.rng.random() < self.ABORT_RATE:
                self.abort(self.rng.choice(self.requests))
            self.step()
            if not todo and not self.orchestrator.has_work:
                return
        raise AssertionError("no end after 5000 steps")

    def step(self) -> None:
        while len(self.planned) + len(self.outcomes) < self.depth:
            plan = self.orchestrator.plan()
            if plan is None:
                break
            self.check_plan(plan)
            self.hand_over(plan)
            self.planned.append(plan)
        # The device may lag behind the plans by any number of steps.
        while self.planned and (not self.outcomes or self.rng.random() < 0.5):
            self.outcomes.append(self.device.run(self.planned.popleft()))
        if self.outcomes:
            outcome = self.outcomes.popleft()
            self.take(outcome)
            for event in self.orchestrator.apply(outcome):
                self.record(event)
        elif self.orchestrator.num_running + self.orchestrator.num_waiting:
            raise AssertionError("requests are left and nothing is planned")

    def hand_over(self, plan: StepPlan) -> None:
        """The device gets a plan, and runs it later."""

    def take(self, outcome: StepOutcome) -> None:
        """The host learns of an outcome."""

    def check_plan(self, plan: StepPlan) -> None:
        assert sum(p.num_tokens + p.max_draft_tokens for p in plan.rows) <= self.max_num_batched_tokens
        self.check_prefill(plan)
        for planned in plan.rows:
            if planned.max_new_tokens:
                self.check_not_past_the_end(planned)
        rows = [p.row for p in plan.rows]
        assert len(rows) == len(set(rows))
        # Blocks of a prefix hit may be in the making; all others must be out of reach of every step not yet run.
        num_hits = {new.row: new.num_computed_tokens // BLOCK_SIZE for new in plan.new_rows}
        generations = {p.row: p.generation for p in plan.rows}
        writable = self.device.writable_blocks(self.planned)
        for append in plan.block_appends:
            row = self.device.rows.get(append.row)
            is_same_request = row is not None and row.generation == generations[append.row]
            own = set(row.blocks) if row is not None and is_same_request else set[int]()
            taken = set(append.block_ids[num_hits.get(append.row, 0) :]) - own
            assert not taken & writable, "a block was reused while in flight"

    def check_prefill(self, plan: StepPlan) -> None:
        """Prompts leave rows that decode the share of a step that they are to have."""
        left = self.prefill_left
        left.update((new.row, len(new.tokens) - new.num_computed_tokens) for new in plan.new_rows)
        num_decode = sum(p.num_tokens + p.max_draft_tokens for p in plan.rows if not left[p.row])
        num_prefill = 0
        for planned in plan.rows:
            if left[planned.row]:
                num_prefill += planned.num_tokens
                left[planned.row] -= planned.num_tokens
        bound = self.max_prefill_beside_decode
        if bound is None or not num_decode:
            return
        bound = max(bound - num_decode, bound // 2, 1)
        assert num_prefill <= bound, "prompts keep rows that decode waiting"
        self.num_bounded += num_prefill == bound

    def check_not_past_the_end(self, planned: PlannedRow) -> None:
        """A step that samples is planned only if the steps before it may leave something to sample."""
        row = self.device.rows.get(planned.row)
        if row is None or row.generation != planned.generation or row.finished or self.outcomes:
            return  # with outcomes not yet applied the device knows more than the orchestrator can
        samples = sum(p.max_new_tokens > 0 for plan in self.planned for p in plan.rows if p.row == planned.row)
        assert len(row.tokens) + samples < row.request.max_len

    def record(self, event: Event) -> None:
        assert event.request_id not in self.aborted
        assert event.request_id not in self.finished
        self.outputs[event.request_id] += event.tokens
        if event.prompt_logprobs:
            self.prompt_logprobs[event.request_id] += [entry.logprobs[0] for entry in event.prompt_logprobs]
        if event.finish_reason is not None:
            self.finished[event.request_id] = event.finish_reason

    def abort(self, request: Request) -> None:
        if self.orchestrator.abort(request.request_id):
            self.aborted.add(request.request_id)

    def check(self) -> None:
        for request in self.requests:
            expected, reason = true_stream(request, self.stop_rate)
            got = self.outputs[request.request_id]
            if request.request_id in self.aborted:
                assert got == expected[: len(got)]
                continue
            assert got == expected
            assert self.finished[request.request_id] == reason
            if request.params.prompt_logprobs is not None:
                positions = [float(p) for p in range(1, len(request.prompt_token_ids))]
                assert self.prompt_logprobs[request.request_id] == positions
        assert self.pool.num_free == self.pool.num_blocks - 1, "blocks were lost"
        assert self.orchestrator.num_running == self.orchestrator.num_waiting == 0
        stats = self.orchestrator.draft_stats
        assert sum(stats.num_accepted_tokens_per_pos) == stats.num_accepted_tokens <= stats.num_draft_tokens
