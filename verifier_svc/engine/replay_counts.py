"""How often each captured step of an executor ran, for whoever looks from outside."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol, runtime_checkable

from verifier_svc.engine.executor import StepExecutor
from verifier_svc.engine.step_shape import StepShape
from verifier_svc.messages import GraphReplays, ReplayCounts


class ReplayStats(Protocol):
    """Counters since the start."""

    @property
    def num_replays(self) -> Mapping[StepShape, int]:
        """Of every graph."""
        ...

    @property
    def num_eager_steps(self) -> int: ...


@runtime_checkable
class CountsReplays(Protocol):
    """An executor whose steps are graphs."""

    @property
    def stats(self) -> ReplayStats: ...


def replay_counter(executor: StepExecutor) -> Callable[[], ReplayCounts] | None:
    """What reads the counts of an executor; None where steps are no graphs."""
    if not isinstance(executor, CountsReplays):
        return None
    stats = executor.stats
    return lambda: read_replays(stats)


def read_replays(stats: ReplayStats) -> ReplayCounts:
    """The counts as they are now, the smallest graph first."""
    graphs = [
        GraphReplays(
            shape.num_reqs, shape.num_draft, shape.num_input_tokens, shape.num_tokens is not None, shape.is_plain, count
        )
        for shape, count in stats.num_replays.items()
    ]
    graphs.sort(key=lambda graph: (graph.num_draft_tokens, graph.num_reqs, graph.num_tokens))
    return ReplayCounts(graphs, stats.num_eager_steps)
