"""Host time of an engine's steps, by what it is spent on, and how even the steps are."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from verifier_svc.engine.engine import Engine
from verifier_svc.engine.executor import StepExecutor
from verifier_svc.orchestrator.step import Event, StepOutcome, StepPlan


@dataclass(slots=True)
class HostTime:
    """Seconds since the start, by what they were spent on. Waiting for the device is not host time."""

    plan_s: float = 0.0
    submit_s: float = 0.0
    read_s: float = 0.0
    """Making an outcome of what the device wrote."""
    apply_s: float = 0.0
    wait_s: float = 0.0
    step_s: list[float] = field(default_factory=list[float])
    """Of each whole step, waiting included."""

    @property
    def host_s(self) -> float:
        return self.plan_s + self.submit_s + self.read_s + self.apply_s

    @property
    def host_share(self) -> float:
        return self.host_s / sum(self.step_s)

    def us_per_step(self) -> dict[str, float]:
        parts = {"plan": self.plan_s, "submit": self.submit_s, "read": self.read_s, "apply": self.apply_s}
        return {name: 1e6 * seconds / len(self.step_s) for name, seconds in (parts | {"wait": self.wait_s}).items()}


class StepTimer:
    """Times the steps of an engine while `installed`.

    Args:
        engine: whose steps are to be timed.
        clock: seconds.
        event_class: whose `synchronize` is what the executor waits with.
    """

    def __init__(
        self, engine: Engine, clock: Callable[[], float] = time.perf_counter, event_class: Any = torch.cuda.Event
    ) -> None:
        self._engine = engine
        self._clock = clock
        self._event_class = event_class
        self.time = HostTime()

    def step(self) -> list[Event]:
        start = self._clock()
        events = self._engine.step()
        self.time.step_s.append(self._clock() - start)
        return events

    @contextmanager
    def installed(self) -> Iterator[StepTimer]:
        """Put clocks around the calls of a step."""
        engine, orchestrator, event_class = self._engine, self._engine.orchestrator, self._event_class
        executor, plan, apply = engine._executor, orchestrator.plan, orchestrator.apply
        synchronize = event_class.synchronize
        engine._executor = _TimedExecutor(executor, self)
        orchestrator.plan = self.timed(plan, "plan_s")
        orchestrator.apply = self.timed(apply, "apply_s")
        event_class.synchronize = self.timed(synchronize, "wait_s")
        try:
            yield self
        finally:
            engine._executor = executor
            del orchestrator.plan, orchestrator.apply  # those of the class again
            event_class.synchronize = synchronize

    def timed(self, call: Callable[..., Any], part: str) -> Callable[..., Any]:
        """`call`, adding the time it takes to a part of the host time."""
        clock, host_time = self._clock, self.time

        def timed_call(*args: Any) -> Any:
            start = clock()
            try:
                return call(*args)
            finally:
                setattr(host_time, part, getattr(host_time, part) + clock() - start)

        return timed_call


class _TimedExecutor:
    """An executor whose calls are timed; what it waits for is no time of its own."""

    def __init__(self, executor: StepExecutor, timer: StepTimer) -> None:
        self._timer = timer
        self._submit = timer.timed(executor.submit, "submit_s")
        self._result = timer.timed(executor.result, "read_s")
        self.close = executor.close

    def submit(self, plan: StepPlan) -> None:
        before_s = self._timer.time.wait_s
        self._submit(plan)
        self._timer.time.submit_s -= self._timer.time.wait_s - before_s

    def result(self) -> StepOutcome:
        before_s = self._timer.time.wait_s
        outcome = self._result()
        self._timer.time.read_s -= self._timer.time.wait_s - before_s
        return outcome


def ratios_to_local_median(times: Sequence[float], reach: int = 50) -> list[float]:
    """Each time over the median of those around it.

    Steps get slower as contexts grow, and over thousands of steps that is more than any unevenness: the 99th percentile
    of these ratios says how even the steps are, that of the times does not.

    Args:
        times: of consecutive steps.
        reach: steps on either side that make the median.
    """
    return [
        value / statistics.median(times[max(0, index - reach) : index + reach + 1]) for index, value in enumerate(times)
    ]
