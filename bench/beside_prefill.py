"""What a long prompt that arrives does to rows that decode: their inter-token latency, and the prompt's TTFT."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from common.types import Request
from verifier_svc.engine.engine import Engine
from verifier_svc.orchestrator.step import Event


@dataclass(slots=True)
class Arrival:
    """One prompt that arrived. Intervals are those between two steps that brought tokens to the same running row."""

    before_s: list[float]
    """Intervals that ended in the steps before the arrival."""
    during_s: list[float] = field(default_factory=list[float])
    """Intervals that ended between the arrival and the prompt's first token, that step included."""
    num_steps: int = 0
    """From the arrival to the prompt's first token."""
    ttft_s: float = 0.0

    @property
    def median_ratio(self) -> float:
        return statistics.median(self.during_s) / statistics.median(self.before_s)

    @property
    def max_ratio(self) -> float:
        return max(self.during_s) / statistics.median(self.before_s)


def measure_arrivals(
    engine: Engine,
    running: Sequence[Request],
    prompts: Sequence[Request],
    num_steps_between: int,
    clock: Callable[[], float] = time.perf_counter,
) -> list[Arrival]:
    """Let `running` decode, and add one of `prompts` after every `num_steps_between` steps of nothing else.

    Args:
        engine: idle; with rows for all of `running` and one more. Whatever is left at the end is aborted.
        running: long enough to outlive all arrivals.
        prompts: the first one warms up, and is left out of the result.
        num_steps_between: steps whose intervals a prompt is compared with.
        clock: seconds.

    Raises:
        RuntimeError: a running request ended too early.
    """
    rows = _Rows(engine, {request.request_id for request in running}, clock)
    for request in running:
        engine.add(request)
    while not rows.all_started:
        rows.step()
    arrivals: list[Arrival] = []
    for prompt in prompts:
        for _ in range(4):  # the outcome of a step in flight belongs to what was before
            rows.step()
        before = [interval for _ in range(num_steps_between) for interval in rows.step()]
        arrival = Arrival(before)
        start = clock()
        engine.add(prompt)
        has_token = False
        while not has_token:
            arrival.during_s += rows.step()
            arrival.num_steps += 1
            has_token = any(event.request_id == prompt.request_id and event.tokens for event in rows.events)
        arrival.ttft_s = clock() - start
        arrivals.append(arrival)
    for request in (*running, *prompts):
        engine.abort(request.request_id)
    engine.drain()
    return arrivals[1:]


class _Rows:
    """Steps of an engine, and when each watched request last got tokens."""

    def __init__(self, engine: Engine, watched: set[str], clock: Callable[[], float]) -> None:
        self._engine = engine
        self._watched = watched
        self._clock = clock
        self._last_s: dict[str, float] = {}
        self.events: list[Event] = []
        """Of the last step."""

    @property
    def all_started(self) -> bool:
        return len(self._last_s) == len(self._watched)

    def step(self) -> list[float]:
        """One step; returns the intervals that ended in it."""
        self.events = self._engine.step()
        now = self._clock()
        intervals: list[float] = []
        for event in self.events:
            if event.request_id not in self._watched or not event.tokens:
                continue
            if event.finish_reason is not None:
                raise RuntimeError(f"request {event.request_id} ended while it was measured: give it more tokens")
            if event.request_id in self._last_s:
                intervals.append(now - self._last_s[event.request_id])
            self._last_s[event.request_id] = now
        return intervals
