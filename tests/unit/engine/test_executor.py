"""The executor: plans in, outcomes out in the same order, and an end whatever a step does."""

from __future__ import annotations

import pytest

from common.errors import EngineClosedError
from verifier_svc.engine.executor import InlineExecutor
from verifier_svc.orchestrator.step import StepOutcome, StepPlan


class FakeRunner:
    """Runs plans by number, and fails at one."""

    def __init__(self, fails_at: int | None = None) -> None:
        self.fails_at = fails_at
        self.ran: list[int] = []
        self.is_closed = False

    def run(self, plan: StepPlan) -> StepOutcome:
        self.ran.append(plan.step_id)
        if plan.step_id == self.fails_at:
            raise RuntimeError("the device is gone")
        return StepOutcome(plan.step_id, [])

    def close(self) -> None:
        self.is_closed = True


def make_plan(step_id: int) -> StepPlan:
    return StepPlan(step_id=step_id, released=[], new_rows=[], block_appends=[], rows=[])


def test_outcomes_come_in_the_order_of_the_plans() -> None:
    runner = FakeRunner()
    executor = InlineExecutor(runner)
    executor.submit(make_plan(0))
    for step_id in range(1, 50):
        executor.submit(make_plan(step_id))
        assert executor.result().step_id == step_id - 1
    assert executor.result().step_id == 49
    assert runner.ran == list(range(50))
    executor.close()
    assert runner.is_closed


def test_later_plans_of_a_failed_step_fail_too() -> None:
    runner = FakeRunner(fails_at=0)
    executor = InlineExecutor(runner)
    executor.submit(make_plan(0))
    executor.submit(make_plan(1))
    with pytest.raises(RuntimeError):
        executor.result()
    with pytest.raises(EngineClosedError, match="an earlier step failed"):
        executor.result()
    assert runner.ran == [0]
    executor.close()


def test_what_a_step_raises_comes_out_of_its_result() -> None:
    executor = InlineExecutor(FakeRunner(fails_at=1))
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
    assert runner.ran == [0]


def test_inline_forgets_its_plans_when_closed() -> None:
    runner = FakeRunner()
    executor = InlineExecutor(runner)
    executor.submit(make_plan(0))
    executor.close()
    assert runner.ran == []
