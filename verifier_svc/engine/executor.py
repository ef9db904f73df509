"""How plans reach the device and outcomes come back."""

from __future__ import annotations

from collections import deque
from typing import Protocol

from common.errors import EngineClosedError
from verifier_svc.orchestrator.step import StepOutcome, StepPlan


class StepRunner(Protocol):
    """A device that runs one step after the other."""

    def run(self, plan: StepPlan) -> StepOutcome: ...

    def close(self) -> None: ...


class StepExecutor(Protocol):
    """Takes plans, and gives their outcomes in the same order."""

    def submit(self, plan: StepPlan) -> None:
        """Hand over a plan; returns without waiting for the step."""
        ...

    def result(self) -> StepOutcome:
        """Outcome of the oldest plan handed over; waits for it. Raises what the step raised."""
        ...

    def close(self) -> None:
        """Let the step that runs now end, and stop."""
        ...


class InlineExecutor:
    """Runs a step when its outcome is asked for, in the caller's thread: for a device that is this CPU.

    The plans of later steps are made before the outcome is known all the same. A thread for the steps would hide the
    host time of a plan and cost far more (docs/adr/0004-steps-on-a-cpu.md).
    """

    def __init__(self, runner: StepRunner) -> None:
        self._runner = runner
        self._plans: deque[StepPlan] = deque()
        self._is_broken = False

    def submit(self, plan: StepPlan) -> None:
        self._plans.append(plan)

    def result(self) -> StepOutcome:
        if self._is_broken:
            raise EngineClosedError("an earlier step failed")
        plan = self._plans.popleft()
        self._is_broken = True  # also when an interrupt ends the step in the middle
        outcome = self._runner.run(plan)
        self._is_broken = False
        return outcome

    def close(self) -> None:
        self._plans.clear()
        self._runner.close()
