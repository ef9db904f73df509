"""What the front counts, under the names, types and buckets of vLLM, and what the engine counts beyond them."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from prometheus_client.core import Metric

from common.histogram import Histogram
from common.metrics import Families
from common.types import FinishReason
from verifier_svc.messages import DrafterCounts, EngineLoad, ExchangeCounts, ReplayCounts, Report

# vLLM's, so that its dashboards and alerts fit.
TTFT_BOUNDS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
    160.0, 640.0, 2560.0,
)  # fmt: skip
TOKEN_BOUNDS = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
REQUEST_BOUNDS = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0,
    1920.0, 7680.0,
)  # fmt: skip

_THROUGHPUT_WINDOW_S = 10.0

ERROR = "error"
"""`finished_reason` of an output that ended with a status."""


@dataclass(slots=True, eq=False)
class OutputTimes:
    """When things happened to one output, on the clock of `FrontMetrics`, seconds."""

    prompt_len: int
    arrival_s: float
    queue_s: float | None = None
    """How long it waited in the engine for a row."""
    first_s: float = 0.0
    last_s: float = 0.0
    num_tokens: int = 0

    @property
    def ttft_s(self) -> float | None:
        return self.first_s - self.arrival_s if self.num_tokens else None

    @property
    def tpot_s(self) -> float | None:
        """Mean time between output tokens."""
        return (self.last_s - self.first_s) / (self.num_tokens - 1) if self.num_tokens > 1 else None


class FrontMetrics:
    """Counts what happens to outputs, once a report of the engine. The event loop counts; scrapes only read."""

    clock = staticmethod(time.monotonic)

    def __init__(self) -> None:
        self.model_name = ""
        self.num_speculative_tokens = 0
        self.load = EngineLoad()
        self.exchange: ExchangeCounts | None = None
        self.replays: ReplayCounts | None = None
        self.num_prompt_tokens = 0
        self.num_generation_tokens = 0
        self.num_finished = {str(reason): 0 for reason in FinishReason} | {ERROR: 0}
        self.ttft = Histogram(TTFT_BOUNDS)
        self.itl = Histogram(TOKEN_BOUNDS)
        self.tpot = Histogram(TOKEN_BOUNDS)
        self.e2e = Histogram(REQUEST_BOUNDS)
        self.queue = Histogram(REQUEST_BOUNDS)
        self._outputs: dict[int, OutputTimes] = {}
        self._recent: deque[tuple[float, int]] = deque()  # (time, tokens) of the last seconds' reports

    # -- events --------------------------------------------------------------------------------------------------

    def added(self, key: int, times: OutputTimes) -> None:
        """An output was asked for."""
        self._outputs[key] = times

    def report(self, report: Report) -> None:
        """What the engine did since its last report."""
        now = self.clock()
        outputs = self._outputs
        self.load = report.load
        if report.exchange is not None:
            self.exchange = report.exchange
        if report.replays is not None:
            self.replays = report.replays
        for admitted in report.admitted:
            times = outputs.get(admitted.key)
            if times is not None:
                times.queue_s = admitted.queue_s
                self.queue.observe(admitted.queue_s)
        num_tokens = 0
        observe_itl = self.itl.observe
        for update in report.updates:
            times = outputs.get(update.key)
            if times is None:
                continue
            count = len(update.token_ids)
            if count:
                num_tokens += count
                if times.num_tokens:
                    observe_itl(now - times.last_s)
                else:
                    times.first_s = now
                    self.ttft.observe(now - times.arrival_s)
                    self.num_prompt_tokens += times.prompt_len
                times.last_s = now
                times.num_tokens += count
            if update.finish_reason is not None:
                self.finished(update.key, str(update.finish_reason))
        if num_tokens:
            self.num_generation_tokens += num_tokens
            recent = self._recent
            recent.append((now, num_tokens))
            while recent[0][0] < now - _THROUGHPUT_WINDOW_S:
                recent.popleft()

    def finished(self, key: int, reason: str) -> None:
        """An output has ended: a value of `FinishReason`, or `ERROR`. What is unknown or has ended is no news."""
        times = self._outputs.pop(key, None)
        if times is None:
            return
        self.num_finished[reason] += 1
        if reason == ERROR:
            return
        self.e2e.observe(self.clock() - times.arrival_s)
        if times.tpot_s is not None:
            self.tpot.observe(times.tpot_s)

    @property
    def generation_tokens_per_s(self) -> float:
        """Over the last seconds."""
        start = self.clock() - _THROUGHPUT_WINDOW_S
        return sum(count for moment, count in self._recent if moment >= start) / _THROUGHPUT_WINDOW_S

    # -- scrapes -------------------------------------------------------------------------------------------------

    def collect(self) -> Iterable[Metric]:
        load = self.load
        vllm = Families({"model_name": self.model_name, "engine": "0"})
        vllm.gauge("vllm:num_requests_running", "Outputs that have a row.", load.num_running)
        vllm.gauge("vllm:num_requests_waiting", "Outputs that wait for a row.", load.num_waiting)
        vllm.gauge("vllm:kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1.", load.kv_cache_usage)
        vllm.counter("vllm:prompt_tokens", "Prompt tokens of outputs that have begun.", self.num_prompt_tokens)
        vllm.counter("vllm:generation_tokens", "Output tokens.", self.num_generation_tokens)
        vllm.counter("vllm:num_preemptions", "Times that an output lost its row to another.", load.num_preemptions)
        vllm.counter("vllm:prefix_cache_queries", "Prompt tokens looked up in the cache.", load.num_prefix_queries)
        vllm.counter("vllm:prefix_cache_hits", "Prompt tokens found in the cache.", load.num_prefix_hits)
        for reason, count in self.num_finished.items():
            vllm.counter("vllm:request_success", "Outputs that have ended, by reason.", count, finished_reason=reason)
        for name, text, histogram in (
            ("vllm:time_to_first_token_seconds", "From the arrival to the first token.", self.ttft),
            ("vllm:inter_token_latency_seconds", "From one step with tokens to the next.", self.itl),
            ("vllm:request_time_per_output_token_seconds", "Mean of a request behind its first token.", self.tpot),
            ("vllm:e2e_request_latency_seconds", "From the arrival to the end.", self.e2e),
            ("vllm:request_queue_time_seconds", "Wait for a row.", self.queue),
        ):
            vllm.histogram(name, text, histogram.bounds, histogram.counts, histogram.total)
        vllm.counter("vllm:spec_decode_num_drafts", "Rows and steps with a draft.", load.num_drafts)
        vllm.counter("vllm:spec_decode_num_draft_tokens", "Draft tokens verified.", load.num_draft_tokens)
        vllm.counter("vllm:spec_decode_num_accepted_tokens", "Draft tokens accepted.", load.num_accepted_tokens)
        per_pos = load.num_accepted_tokens_per_pos
        per_pos = per_pos + [0] * (self.num_speculative_tokens - len(per_pos))
        for position, count in enumerate(per_pos):
            vllm.counter(
                "vllm:spec_decode_num_accepted_tokens_per_pos",
                "Draft tokens accepted, by position in the draft.",
                count,
                position=str(position),
            )
        yield from vllm
        ours = Families({"model_name": self.model_name})
        ours.counter("outrider_engine_steps", "Steps of the engine.", load.num_steps)
        ours.counter("outrider_stale_outcomes", "Step results of rows that had changed hands.", load.num_stale_outcomes)
        if self.replays is not None:
            _collect_replays(ours, self.replays)
        if self.exchange is not None:
            _collect_exchange(ours, self.exchange)
        yield from ours


def _collect_replays(families: Families, replays: ReplayCounts) -> None:
    for graph in replays.graphs:
        families.counter(
            "outrider_graph_replays",
            "Steps that ran as a captured graph.",
            graph.num_replays,
            requests=str(graph.num_reqs),
            draft_tokens=str(graph.num_draft_tokens),
            tokens=str(graph.num_tokens),
            step="mixed" if graph.is_mixed else "decode",
            sampling="plain" if graph.is_plain else "processed",
        )
    families.counter("outrider_eager_steps", "Steps that ran without a graph.", replays.num_eager_steps)


def _collect_exchange(families: Families, exchange: ExchangeCounts) -> None:
    families.counter("outrider_draft_waits", "Steps that waited for a drafter.", exchange.num_waits)
    families.counter("outrider_draft_branch_hits", "Rows and steps drafted by a branch.", exchange.num_branches_used)
    families.counter("outrider_draft_fallbacks", "Rows and steps without a usable branch.", exchange.num_fallbacks)
    families.counter(
        "outrider_draft_fallback_drafts", "Of these, those that the fallback drafted for.", exchange.num_fallback_drafts
    )
    families.counter("outrider_draft_rows_moved", "Rows that went to another drafter.", exchange.num_rows_moved)
    for drafter in exchange.drafters:
        _collect_drafter(families, drafter)


def _collect_drafter(families: Families, drafter: DrafterCounts) -> None:
    address = drafter.address
    for name, text, value in (
        ("outrider_drafter_up", "1: the drafter listens.", drafter.is_up),
        ("outrider_drafter_hung", "1: it misses its deadlines and is not waited for.", drafter.is_hung),
        ("outrider_drafter_distrusted", "1: its drafts are hardly ever right, and not used.", drafter.is_distrusted),
        ("outrider_drafter_rows", "Rows that it drafts for.", drafter.num_rows),
    ):
        families.gauge(name, text, float(value), drafter=address)
    families.gauge(
        "outrider_draft_transport_in_use",
        "1 for the transport to the drafter.",
        1,
        drafter=address,
        transport=drafter.kind,
    )
    for name, text, count in (
        ("outrider_drafter_sessions", "Sessions that have begun.", drafter.num_sessions),
        ("outrider_drafter_downs", "Sessions that have ended.", drafter.num_downs),
        ("outrider_drafter_hangs", "Times that it hung.", drafter.num_hangs),
        ("outrider_draft_updates", "Updates sent.", drafter.num_updates),
        ("outrider_draft_replies", "Replies received.", drafter.num_replies),
        ("outrider_draft_late_replies", "Replies behind their deadline.", drafter.num_late_replies),
        ("outrider_draft_deadline_misses", "Steps that waited in vain.", drafter.num_deadline_misses),
        ("outrider_draft_branches", "Branches received.", drafter.num_branches),
        ("outrider_draft_stale_branches", "Branches of rows that had changed hands.", drafter.num_stale_branches),
        ("outrider_draft_invalid_branches", "Branches of no row, or with no tokens.", drafter.num_invalid_branches),
        ("outrider_draft_row_errors", "Rows that the drafter refused.", drafter.num_row_errors),
        ("outrider_draft_resyncs", "Rows opened again.", drafter.num_resyncs),
        ("outrider_draft_wait_seconds", "Time that steps waited.", drafter.wait_s),
        ("outrider_drafter_drafts", "Drafts of this drafter verified.", drafter.num_drafts),
        ("outrider_drafter_draft_tokens", "Their tokens.", drafter.num_draft_tokens),
        ("outrider_drafter_accepted_tokens", "Of these, accepted.", drafter.num_accepted_tokens),
    ):
        families.counter(name, text, count, drafter=address)
    families.labelled_histogram(
        "outrider_draft_round_trip_seconds",
        "From an update to its reply.",
        drafter.round_trip_bounds,
        drafter.round_trip_counts,
        drafter.round_trip_total_s,
        {"drafter": address},
    )
