"""Time of GPU work in a CUDA graph, where launches cost the host nothing."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch


def graph_ms(work: Callable[[], object], replays: int = 10, repeats: int = 5) -> float:
    """Median milliseconds of `work` captured in a graph."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        work()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    times: list[float] = []
    for _ in range(repeats + 1):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(replays):
            graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / replays)
    return statistics.median(times[1:])
