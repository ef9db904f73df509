"""Who runs the steps: the caller's thread, or a thread of their own that lets the next plan be made meanwhile."""

from __future__ import annotations

import queue
import threading
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
    """Runs a step when its outcome is asked for. With one step in flight this is the synchronous loop."""

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


class ThreadExecutor:
    """Runs steps in a thread, which torch keeps out of the interpreter for most of a step.

    Args:
        runner: used from that thread alone.
        depth: steps that may be handed over and not yet taken back.
    """

    def __init__(self, runner: StepRunner, depth: int) -> None:
        self._runner = runner
        self._plans: queue.Queue[StepPlan | None] = queue.Queue(depth + 1)
        self._outcomes: queue.Queue[StepOutcome | Exception] = queue.Queue(depth + 1)
        self._thread = threading.Thread(target=self._run, name="outrider-steps", daemon=True)
        self._thread.start()

    def submit(self, plan: StepPlan) -> None:
        self._plans.put_nowait(plan)

    def result(self) -> StepOutcome:
        outcome = self._outcomes.get()
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def close(self) -> None:
        self._plans.put(None)
        self._thread.join()
        self._runner.close()

    def _run(self) -> None:
        failure: BaseException | None = None
        while (plan := self._plans.get()) is not None:
            if failure is not None:  # the steps behind a failed one stand on a state that does not exist
                self._outcomes.put(EngineClosedError("an earlier step failed"))
                continue
            try:
                self._outcomes.put(self._runner.run(plan))
            except BaseException as error:  # handed to whoever waits for the outcome
                failure = error
                # An exit of this thread is none of the caller's, but no step can follow it either.
                self._outcomes.put(error if isinstance(error, Exception) else EngineClosedError(repr(error)))
