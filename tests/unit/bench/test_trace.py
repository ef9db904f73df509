"""`python -m bench trace`: what it counts, and what it makes of a timeline."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bench.random_engine import repetitive_request
from bench.step_times import StepTimer, ratios_to_local_median
from bench.timeline import Interval, measure_idle, read_trace, top_kernels, whole_steps
from bench.trace import fill, time_steps
from tests.unit.bench.test_prefill import TickingClock
from verifier_svc.engine.engine import Engine
from verifier_svc.engine.executor import StepExecutor
from verifier_svc.orchestrator.step import StepOutcome, StepPlan


def step(start: float, launch: int) -> list[Interval]:
    """100 us: a copy, then three kernels of a graph, of which two overlap, with a gap of 4 us before the third."""
    return [
        Interval(start, start + 6.0, 1000 + launch, "Memcpy HtoD"),
        Interval(start + 7.0, start + 50.0, launch, "gemm"),
        Interval(start + 40.0, start + 80.0, launch, "gemm"),
        Interval(start + 84.0, start + 100.0, launch, "commit"),
    ]


STEPS = [interval for index in range(8) for interval in step(index * 102.0, index)]


def test_idle_time_inside_and_between_launches() -> None:
    intervals = whole_steps(STEPS, 2, 1)
    assert {i.launch for i in intervals if i.launch < 1000} == {2, 3, 4, 5, 6}
    idle = measure_idle(intervals)
    assert idle.num_steps == 5
    # From the first kernel of the first step to the last of the last: 5 steps without the first copy.
    total_us = 5 * 102.0 - 7.0 - 2.0
    assert idle.us_per_step == pytest.approx(total_us / 5)
    assert idle.inside_share == pytest.approx(5 * 4.0 / total_us)
    # Behind a step 2 us to the copy, and from the copy 1 us to the graph.
    assert idle.between_share == pytest.approx(4 * 3.0 / total_us)
    assert idle.busy_us_per_step == pytest.approx((total_us - 20.0 - 12.0) / 5)


def test_kernel_times_are_sums_over_their_runs() -> None:
    first, second, *_ = top_kernels(STEPS, 8, 3)
    assert (first.name, first.us_per_step, first.per_step) == ("gemm", pytest.approx(83.0), 2.0)
    assert (second.name, second.us_per_step) == ("commit", pytest.approx(16.0))
    assert first.share == pytest.approx(83.0 / (83.0 + 16.0 + 6.0))


def test_a_trace_without_graphs_is_refused() -> None:
    with pytest.raises(RuntimeError, match="8 graph launches"):
        whole_steps(STEPS, 4, 3)


def test_what_is_no_work_of_the_gpu_is_left_out_of_a_trace(tmp_path: Path) -> None:
    def event(category: str, start: float, launch: int) -> dict[str, Any]:
        return {"cat": category, "ts": start, "dur": 2.5, "name": category, "args": {"correlation": launch}}

    events = [event("kernel", 5.0, 1), event("cuda_runtime", 1.0, 1), event("gpu_memcpy", 2.0, 2), {"ph": "M"}]
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": events}), encoding="utf-8")
    assert read_trace(path) == [Interval(2.0, 4.5, 2, "gpu_memcpy"), Interval(5.0, 7.5, 1, "kernel")]


class FakeEvent:
    """What an executor on a GPU waits with."""

    def synchronize(self) -> None:
        CLOCK.now += 1000.0


class WaitingExecutor:
    """Waits before each outcome, as one on a GPU does."""

    def __init__(self, executor: StepExecutor) -> None:
        self._executor = executor

    def submit(self, plan: StepPlan) -> None:
        self._executor.submit(plan)

    def close(self) -> None:
        self._executor.close()

    def result(self) -> StepOutcome:
        FakeEvent().synchronize()
        return self._executor.result()


CLOCK = TickingClock()


@pytest.mark.parametrize("num_draft", [0, 3])
def test_host_time_is_what_is_not_waited_for(build_engine: Callable[..., Engine], num_draft: int) -> None:
    engine = build_engine(num_draft, max_num_seqs=4)
    engine._executor = WaitingExecutor(engine._executor)
    fill(engine, [repetitive_request(f"r{i}", 40, 300, 256, num_draft, seed=i) for i in range(4)], 5)
    timer = StepTimer(engine, CLOCK, FakeEvent)
    found = time_steps(timer, 20, num_rows=4)
    assert len(found.step_s) == 20
    assert found.wait_s == 20 * 1001.0
    assert found.plan_s == found.submit_s == found.apply_s == 20.0  # one call of each a step
    assert found.read_s == 20 * 2.0  # the two looks around the wait
    assert found.host_share == pytest.approx(100.0 / sum(found.step_s))
    before = list(found.step_s)
    engine.step()
    assert found.step_s == before
    assert found.plan_s == 20.0, "the clocks are gone"


def test_a_row_that_ends_makes_the_times_worthless(build_engine: Callable[..., Engine]) -> None:
    engine = build_engine(0, max_num_seqs=2)
    fill(engine, [repetitive_request(f"r{i}", 40, 12, 256, 0, seed=i) for i in range(2)], 2)
    with pytest.raises(RuntimeError, match="rows that go on"):
        time_steps(StepTimer(engine, CLOCK, FakeEvent), 20, num_rows=2)


def test_steps_that_only_get_slower_are_even() -> None:
    slower = [1.0 + index / 1000 for index in range(2000)]
    assert max(ratios_to_local_median(slower)) < 1.03
    slower[777] *= 1.5
    assert max(ratios_to_local_median(slower)) == pytest.approx(1.5, rel=0.01)
