"""Host time of the orchestrator: plan + apply of a steady decode batch, with outcomes made up beforehand."""

from __future__ import annotations

import gc
import random
import statistics
import time
from dataclasses import dataclass

from common.config import BLOCK_SIZE
from common.sampling_params import SamplingParams
from common.types import Request
from verifier_svc.orchestrator.block_pool import BlockPool
from verifier_svc.orchestrator.orchestrator import Orchestrator
from verifier_svc.orchestrator.step import RowOutcome, StepOutcome, StepPlan

PROMPT_LEN = 1024
NUM_DRAFT = 3


@dataclass(frozen=True, slots=True)
class HostTime:
    """Microseconds a step of `num_rows` rows: plan and apply together."""

    num_rows: int
    num_steps: int
    median_us: float
    p99_us: float


def measure_host_time(num_rows: int, num_steps: int = 400, depth: int = 2) -> HostTime:
    """Rows that decode with K = 3 drafts and accept 0 to 3 of them at random, with `depth` steps in flight.

    Outcomes and garbage collection stay outside of what is timed; everything the orchestrator does is inside, block
    allocation and prefix-cache filing included.
    """
    rng = random.Random(0)
    max_len = PROMPT_LEN + 4 * num_steps
    pool = BlockPool(num_rows * (max_len // BLOCK_SIZE + 2) + 1, BLOCK_SIZE)
    orchestrator = Orchestrator(
        pool, max_num_seqs=num_rows, max_num_batched_tokens=num_rows * PROMPT_LEN, max_num_waiting=num_rows
    )
    for row in range(num_rows):
        prompt = [rng.randrange(50_000) for _ in range(PROMPT_LEN)]
        request = Request(f"r{row}", prompt, SamplingParams(), row, max_len, num_speculative_tokens=NUM_DRAFT)
        orchestrator.add(request)
    in_flight: list[StepPlan] = []
    times: list[float] = []
    gc.collect()
    gc.disable()
    try:
        for step in range(num_steps + 10):
            start = time.perf_counter()
            planned: list[StepPlan] = []
            while len(in_flight) + len(planned) < depth:
                plan = orchestrator.plan()
                if plan is None:
                    break
                planned.append(plan)
            spent = time.perf_counter() - start
            in_flight += planned
            outcome = _make_outcome(in_flight.pop(0), rng)
            start = time.perf_counter()
            orchestrator.apply(outcome)
            spent += time.perf_counter() - start
            if step >= 10:  # prefill and the first steps
                times.append(spent * 1e6)
    finally:
        gc.enable()
    times.sort()
    return HostTime(num_rows, len(times), statistics.median(times), times[int(len(times) * 0.99)])


def _make_outcome(plan: StepPlan, rng: random.Random) -> StepOutcome:
    rows: list[RowOutcome] = []
    for planned in plan.rows:
        accepted = rng.randint(0, planned.max_draft_tokens)
        tokens = [rng.randrange(50_000) for _ in range(accepted + 1)] if planned.max_new_tokens else []
        rows.append(RowOutcome(planned.row, planned.generation, tokens, planned.max_draft_tokens, accepted))
    return StepOutcome(plan.step_id, rows)
