"""Where a GPU's time goes: kernels and copies of a profiler's trace, and the gaps between them."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

_CATEGORIES = ("kernel", "gpu_memcpy", "gpu_memset")


class Interval(NamedTuple):
    """Something that the GPU did. Microseconds."""

    start_us: float
    end_us: float
    launch: int
    """What the host started it with: all nodes of a graph that is launched have the same."""
    name: str


@dataclass(frozen=True, slots=True)
class Idle:
    """Gaps in the union of intervals, over whole steps. A step is a launch of several intervals, so a graph."""

    num_steps: int
    us_per_step: float
    busy_us_per_step: float
    inside_share: float
    """Idle between two intervals of one launch, of all time."""
    between_share: float
    """Idle between the intervals of different launches: the GPU waits for the host, or for copies at a step's ends."""

    @property
    def share(self) -> float:
        return self.inside_share + self.between_share


@dataclass(frozen=True, slots=True)
class KernelTime:
    """All runs of one kernel."""

    name: str
    us_per_step: float
    per_step: float
    share: float
    """Of the time of all kernels, which is more than the elapsed time where they overlap."""


def read_trace(path: Path) -> list[Interval]:
    """Kernels, copies and fills of a Chrome trace that `torch.profiler` wrote, in order of their start."""
    events: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    intervals = [
        Interval(event["ts"], event["ts"] + event["dur"], event["args"]["correlation"], event["name"])
        for event in events
        if event.get("cat") in _CATEGORIES
    ]
    return sorted(intervals)


def whole_steps(intervals: Sequence[Interval], skip_first: int, skip_last: int) -> list[Interval]:
    """The part from the first interval of one step to the last one of another.

    Args:
        intervals: in order of their start.
        skip_first, skip_last: steps to leave out at the ends, where the profiler starts and the queue runs dry.

    Raises:
        RuntimeError: too few steps are left.
    """
    sizes = Counter(interval.launch for interval in intervals)
    steps = list(dict.fromkeys(i.launch for i in intervals if sizes[i.launch] > 1))
    if len(steps) < skip_first + skip_last + 2:
        raise RuntimeError(f"{len(steps)} graph launches in the trace: expected over {skip_first + skip_last + 1}")
    first_launch, last_launch = steps[skip_first], steps[len(steps) - 1 - skip_last]
    start_us = min(i.start_us for i in intervals if i.launch == first_launch)
    end_us = max(i.end_us for i in intervals if i.launch == last_launch)
    return [i for i in intervals if i.start_us >= start_us and i.end_us <= end_us]


def measure_idle(intervals: Sequence[Interval]) -> Idle:
    """Idle time of `whole_steps`."""
    sizes = Counter(interval.launch for interval in intervals)
    num_steps = sum(count > 1 for count in sizes.values())
    first, inside_us, between_us = intervals[0], 0.0, 0.0
    end_us, end_launch = first.end_us, first.launch
    for interval in intervals[1:]:
        gap_us = interval.start_us - end_us
        if gap_us > 0:
            if interval.launch == end_launch:
                inside_us += gap_us
            else:
                between_us += gap_us
        if interval.end_us > end_us:
            end_us, end_launch = interval.end_us, interval.launch
    total_us = end_us - first.start_us
    return Idle(
        num_steps,
        total_us / num_steps,
        (total_us - inside_us - between_us) / num_steps,
        inside_us / total_us,
        between_us / total_us,
    )


def top_kernels(intervals: Sequence[Interval], num_steps: int, count: int) -> list[KernelTime]:
    """The `count` names that took the most time."""
    times: defaultdict[str, float] = defaultdict(float)
    runs: Counter[str] = Counter()
    for interval in intervals:
        times[interval.name] += interval.end_us - interval.start_us
        runs[interval.name] += 1
    total_us = sum(times.values())
    names = sorted(times, key=lambda name: -times[name])[:count]
    return [KernelTime(name, times[name] / num_steps, runs[name] / num_steps, times[name] / total_us) for name in names]
