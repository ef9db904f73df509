"""Executors: plans in, outcomes out in the same order, and an end without hanging whatever a step does."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from common.errors import EngineClosedError
from verifier_svc.engine.executor import InlineExecutor, StepExecutor, ThreadExecutor
from verifier_svc.orchestrator.step import StepOutcome, StepPlan

TIMEOUT = 10.0  # seconds; only a hang takes this long


class FakeRunner:
    """Runs plans by number: fails at some, waits for a permit at each."""

    def __init__(self, fails_at: int | None = None, error: BaseException | None = None) -> None:
        self.fails_at = fails_at
        self.error = error or RuntimeError("the device is gone")
        self.ran: list[int] = []
        self.threads: set[threading.Thread] = set()
        self.permits = threading.Semaphore(1000)
        self.is_closed = False

    def run(self, plan: StepPlan) -> StepOutcome:
        assert self.permits.acquire(timeout=TIMEOUT)
        self.threads.add(threading.current_thread())
        self.ran.append(plan.step_id)
        if plan.step_id == self.fails_at:
            raise self.error
        return StepOutcome(plan.step_id, [])

    def close(self) -> None:
        self.is_closed = True


def make_plan(step_id: int) -> StepPlan:
    return StepPlan(step_id=step_id, released=[], new_rows=[], block_appends=[], rows=[])


def in_thread(runner: FakeRunner) -> StepExecutor:
    return ThreadExecutor(runner, depth=2)


MAKERS: list[Callable[[FakeRunner], StepExecutor]] = [InlineExecutor, in_thread]


@pytest.mark.parametrize("make", MAKERS)
def test_outcomes_come_in_the_order_of_the_plans(make: Callable[[FakeRunner], StepExecutor]) -> None:
    runner = FakeRunner()
    executor = make(runner)
    executor.submit(make_plan(0))
    for step_id in range(1, 50):
        executor.submit(make_plan(step_id))
        assert executor.result().step_id == step_id - 1
    assert executor.result().step_id == 49
    assert runner.ran == list(range(50))
    executor.close()
    assert runner.is_closed


@pytest.mark.parametrize("make", MAKERS)
def test_later_plans_of_a_failed_step_fail_too(make: Callable[[FakeRunner], StepExecutor]) -> None:
    runner = FakeRunner(fails_at=0)
    executor = make(runner)
    executor.submit(make_plan(0))
    executor.submit(make_plan(1))
    with pytest.raises(RuntimeError):
        executor.result()
    with pytest.raises(EngineClosedError, match="an earlier step failed"):
        executor.result()
    assert runner.ran == [0]
    executor.close()


@pytest.mark.parametrize("make", MAKERS)
def test_what_a_step_raises_comes_out_of_its_result(make: Callable[[FakeRunner], StepExecutor]) -> None:
    executor = make(FakeRunner(fails_at=1))
    executor.submit(make_plan(0))
    executor.submit(make_plan(1))
    assert executor.result().step_id == 0
    with pytest.raises(RuntimeError, match="the device is gone"):
        executor.result()
    executor.close()


def test_inline_runs_a_step_when_its_outcome_is_asked_for() -> None:
    runner = FakeRunner()
    executor = InlineExecutor(runner)
    executor.submit(make_plan(0))
    assert runner.ran == []
    executor.result()
    assert runner.threads == {threading.current_thread()}


def test_inline_forgets_its_plans_when_closed() -> None:
    runner = FakeRunner()
    executor = InlineExecutor(runner)
    executor.submit(make_plan(0))
    executor.close()
    assert runner.ran == []


def test_thread_runs_all_steps_in_one_thread_of_its_own() -> None:
    runner = FakeRunner()
    executor = ThreadExecutor(runner, depth=2)
    for step_id in range(4):
        executor.submit(make_plan(step_id))
        executor.result()
    assert len(runner.threads) == 1
    assert threading.current_thread() not in runner.threads
    executor.close()


def test_thread_takes_plans_while_a_step_runs() -> None:
    runner = FakeRunner()
    runner.permits = threading.Semaphore(0)
    executor = ThreadExecutor(runner, depth=2)
    executor.submit(make_plan(0))
    executor.submit(make_plan(1))  # returns though no step can end
    runner.permits.release(2)
    assert [executor.result().step_id for _ in range(2)] == [0, 1]
    executor.close()


def test_an_exit_in_a_step_does_not_end_the_thread_in_silence() -> None:
    executor = ThreadExecutor(FakeRunner(fails_at=0, error=SystemExit(3)), depth=2)
    executor.submit(make_plan(0))
    with pytest.raises(EngineClosedError, match="SystemExit"):
        executor.result()
    executor.close()


@pytest.mark.parametrize("num_steps", [0, 1, 2])
@pytest.mark.parametrize("fails_at", [None, 0])
def test_close_waits_for_the_thread_and_leaves_none(num_steps: int, fails_at: int | None) -> None:
    before = threading.active_count()
    runner = FakeRunner(fails_at=fails_at)
    executor = ThreadExecutor(runner, depth=2)
    for step_id in range(num_steps):
        executor.submit(make_plan(step_id))
    executor.close()
    assert threading.active_count() == before
    assert runner.is_closed
