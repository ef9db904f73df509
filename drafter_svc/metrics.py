"""Metrics of a drafter. The worker counts; the process that speaks gRPC asks it when somebody scrapes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import TimeoutError as FutureTimeoutError

import msgspec
from prometheus_client.core import Metric

from common.errors import OutriderError
from common.metrics import Families

METHOD_BOUNDS = (
    0.00002, 0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0,
)  # fmt: skip
"""Seconds."""

_ANSWER_LIMIT_S = 2.0


class WorkerCounts(msgspec.Struct, frozen=True):
    """What the worker has counted since its start."""

    method: str
    num_rows: int
    max_rows: int
    num_verifiers: int
    num_opened: int
    num_closed: int
    num_stale: int
    num_duplicates: int
    num_row_errors: int
    num_frames: int
    num_malformed_frames: int
    num_repeated_frames: int
    num_branches: int
    num_draft_tokens: int
    method_counts: list[int]
    method_total_s: float


class DrafterMetrics:
    """Asks the worker at each scrape; one that does not answer is not up, and its last counts stand.

    Args:
        ask: WorkerCounts as bytes, from the worker.
        loop: where `ask` runs.
    """

    def __init__(self, ask: Callable[[], Awaitable[bytes]], loop: asyncio.AbstractEventLoop) -> None:
        self._ask = ask
        self._loop = loop
        self._decoder = msgspec.msgpack.Decoder(WorkerCounts)
        self._counts: WorkerCounts | None = None

    def collect(self) -> Iterable[Metric]:
        """Called in a thread of the metrics server."""
        is_up = self._refresh()
        families = Families({})
        families.gauge("outrider_drafting_worker_up", "1: the draft worker answers.", is_up)
        if self._counts is not None:
            _collect(families, self._counts)
        return families

    def _refresh(self) -> bool:
        future = asyncio.run_coroutine_threadsafe(self._answer(), self._loop)
        try:
            self._counts = self._decoder.decode(future.result(_ANSWER_LIMIT_S))
        except (FutureTimeoutError, OutriderError):
            future.cancel()
            return False
        return True

    async def _answer(self) -> bytes:
        return await self._ask()


def _collect(families: Families, counts: WorkerCounts) -> None:
    method = counts.method
    for name, text, value in (
        ("outrider_drafting_rows", "Rows that are open.", counts.num_rows),
        ("outrider_drafting_max_rows", "Rows that can be open.", counts.max_rows),
        ("outrider_drafting_verifiers", "Verifiers that are connected.", counts.num_verifiers),
    ):
        families.gauge(name, text, value, method=method)
    for name, text, value in (
        ("outrider_drafting_sessions_opened", "Rows opened.", counts.num_opened),
        ("outrider_drafting_sessions_closed", "Rows closed.", counts.num_closed),
        ("outrider_drafting_stale_changes", "Changes of rows that had changed hands.", counts.num_stale),
        ("outrider_drafting_duplicate_changes", "Changes that were known.", counts.num_duplicates),
        ("outrider_drafting_row_errors", "Rows that were refused or dropped.", counts.num_row_errors),
        ("outrider_drafting_frames", "Frames of verifiers.", counts.num_frames),
        ("outrider_drafting_malformed_frames", "Frames that could not be read.", counts.num_malformed_frames),
        ("outrider_drafting_repeated_frames", "Frames that had come before.", counts.num_repeated_frames),
        ("outrider_drafting_branches", "Branches made.", counts.num_branches),
        ("outrider_drafting_draft_tokens", "Tokens of these.", counts.num_draft_tokens),
    ):
        families.counter(name, text, value, method=method)
    families.labelled_histogram(
        "outrider_drafting_method_seconds",
        "One call of the draft method, for all rows that changed.",
        METHOD_BOUNDS,
        counts.method_counts,
        counts.method_total_s,
        {"method": method},
    )
