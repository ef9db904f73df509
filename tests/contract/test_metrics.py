"""Names, types, labels and buckets of the metrics: dashboards, autoscalers and load generators read them."""

from __future__ import annotations

import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from common.errors import InvalidArgumentError
from common.metrics import MetricsServer
from common.types import FinishReason
from verifier_svc.front.metrics import ERROR, FrontMetrics, OutputTimes
from verifier_svc.messages import (
    Admitted,
    DrafterCounts,
    EngineLoad,
    ExchangeCounts,
    GraphReplays,
    OutputUpdate,
    ReplayCounts,
    Report,
)

VLLM_GAUGES = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
VLLM_COUNTERS = (
    "prompt_tokens",
    "generation_tokens",
    "num_preemptions",
    "prefix_cache_queries",
    "prefix_cache_hits",
    "request_success",
    "spec_decode_num_drafts",
    "spec_decode_num_draft_tokens",
    "spec_decode_num_accepted_tokens",
    "spec_decode_num_accepted_tokens_per_pos",
)
TTFT = "0.001 0.005 0.01 0.02 0.04 0.06 0.08 0.1 0.25 0.5 0.75 1 2.5 5 7.5 10 20 40 80 160 640 2560"
PER_TOKEN = "0.01 0.025 0.05 0.075 0.1 0.15 0.2 0.3 0.4 0.5 0.75 1 2.5 5 7.5 10 20 40 80"
PER_REQUEST = "0.3 0.5 0.8 1 1.5 2 2.5 5 10 15 20 30 40 50 60 120 240 480 960 1920 7680"
VLLM_HISTOGRAMS = {
    "time_to_first_token_seconds": TTFT,
    "inter_token_latency_seconds": PER_TOKEN,
    "request_time_per_output_token_seconds": PER_TOKEN,
    "e2e_request_latency_seconds": PER_REQUEST,
    "request_queue_time_seconds": PER_REQUEST,
}
OURS = {
    "outrider_engine_steps": "counter",
    "outrider_stale_outcomes": "counter",
    "outrider_draft_waits": "counter",
    "outrider_draft_branch_hits": "counter",
    "outrider_draft_fallbacks": "counter",
    "outrider_draft_fallback_drafts": "counter",
    "outrider_draft_rows_moved": "counter",
    "outrider_draft_updates": "counter",
    "outrider_draft_replies": "counter",
    "outrider_draft_late_replies": "counter",
    "outrider_draft_deadline_misses": "counter",
    "outrider_draft_branches": "counter",
    "outrider_draft_stale_branches": "counter",
    "outrider_draft_invalid_branches": "counter",
    "outrider_draft_row_errors": "counter",
    "outrider_draft_resyncs": "counter",
    "outrider_draft_wait_seconds": "counter",
    "outrider_draft_round_trip_seconds": "histogram",
    "outrider_draft_transport_in_use": "gauge",
    "outrider_drafter_up": "gauge",
    "outrider_drafter_hung": "gauge",
    "outrider_drafter_distrusted": "gauge",
    "outrider_drafter_rows": "gauge",
    "outrider_drafter_sessions": "counter",
    "outrider_drafter_downs": "counter",
    "outrider_drafter_hangs": "counter",
    "outrider_drafter_drafts": "counter",
    "outrider_drafter_draft_tokens": "counter",
    "outrider_drafter_accepted_tokens": "counter",
}


class Clock:
    """Time stands still until it is told to go on."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def metrics(clock: Clock) -> FrontMetrics:
    metrics = FrontMetrics()
    metrics.clock = clock  # type: ignore[method-assign]
    metrics.model_name = "demo"
    metrics.num_speculative_tokens = 3
    return metrics


@pytest.fixture
def server(metrics: FrontMetrics) -> Iterator[MetricsServer]:
    server = MetricsServer("127.0.0.1", 0, metrics)
    yield server
    server.close()


def scrape(server: MetricsServer) -> dict[str, Metric]:
    with urllib.request.urlopen(f"http://{server.address}/metrics", timeout=10) as response:
        page = response.read().decode()
    return {family.name: family for family in text_string_to_metric_families(page)}


def value(families: dict[str, Metric], name: str, **labels: str) -> float:
    """Of the sample with these labels among others."""
    family = families[name.removesuffix("_total").removesuffix("_count").removesuffix("_sum").removesuffix("_bucket")]
    (found,) = [s.value for s in family.samples if s.name == name and labels.items() <= s.labels.items()]
    return found


def test_names_types_labels_and_buckets_of_vllm_before_any_request(server: MetricsServer) -> None:
    families = scrape(server)
    kinds = dict.fromkeys(VLLM_GAUGES, "gauge") | dict.fromkeys(VLLM_COUNTERS, "counter")
    kinds |= dict.fromkeys(VLLM_HISTOGRAMS, "histogram")
    found = {name.removeprefix("vllm:"): family for name, family in families.items() if name.startswith("vllm:")}
    assert {name: family.type for name, family in found.items()} == kinds
    for name, family in found.items():
        assert family.samples, name
        for sample in family.samples:
            assert sample.labels["model_name"] == "demo", name
        suffixes = {sample.name.removeprefix(f"vllm:{name}") for sample in family.samples}
        expected = {"gauge": {""}, "counter": {"_total"}, "histogram": {"_bucket", "_count", "_sum"}}[family.type]
        assert suffixes - {"_created"} == expected, name
    for name, bounds in VLLM_HISTOGRAMS.items():
        buckets = [s.labels["le"] for s in found[name].samples if s.name.endswith("_bucket")]
        assert [float(bound) for bound in buckets[:-1]] == [float(bound) for bound in bounds.split()]
        assert buckets[-1] == "+Inf"
    reasons = {sample.labels["finished_reason"] for sample in found["request_success"].samples}
    assert reasons == {"stop", "length", "abort", "error"}
    positions = [sample.labels["position"] for sample in found["spec_decode_num_accepted_tokens_per_pos"].samples]
    assert positions == ["0", "1", "2"]


def test_an_output_from_its_arrival_to_its_end(metrics: FrontMetrics, clock: Clock, server: MetricsServer) -> None:
    metrics.added(1, OutputTimes(prompt_len=7, arrival_s=clock.now))
    clock.now += 0.03
    metrics.report(Report(EngineLoad(num_running=1), [OutputUpdate(1, [5], [])], admitted=[Admitted(1, 0.01)]))
    clock.now += 0.02
    metrics.report(Report(EngineLoad(num_running=1), [OutputUpdate(1, [6, 7, 8], [])]))
    clock.now += 0.06
    load = EngineLoad(0, 2, 0.25, 9, 1, 64, 32, 2, 6, 3, [2, 1])
    metrics.report(Report(load, [OutputUpdate(1, [9], [], FinishReason.LENGTH)]))
    families = scrape(server)
    for name, expected in (
        ("vllm:prompt_tokens_total", 7),
        ("vllm:generation_tokens_total", 5),
        ("vllm:num_requests_running", 0),
        ("vllm:num_requests_waiting", 2),
        ("vllm:kv_cache_usage_perc", 0.25),
        ("vllm:num_preemptions_total", 1),
        ("vllm:prefix_cache_queries_total", 64),
        ("vllm:prefix_cache_hits_total", 32),
        ("vllm:spec_decode_num_drafts_total", 2),
        ("vllm:spec_decode_num_draft_tokens_total", 6),
        ("vllm:spec_decode_num_accepted_tokens_total", 3),
        ("outrider_engine_steps_total", 9),
        ("vllm:time_to_first_token_seconds_sum", 0.03),
        ("vllm:time_to_first_token_seconds_count", 1),
        ("vllm:inter_token_latency_seconds_sum", 0.08),
        ("vllm:inter_token_latency_seconds_count", 2),
        ("vllm:request_time_per_output_token_seconds_sum", 0.02),
        ("vllm:e2e_request_latency_seconds_sum", 0.11),
        ("vllm:request_queue_time_seconds_sum", 0.01),
    ):
        assert value(families, name) == pytest.approx(expected), name
    assert value(families, "vllm:request_success_total", finished_reason="length") == 1
    assert value(families, "vllm:request_success_total", finished_reason="abort") == 0
    per_pos = [value(families, "vllm:spec_decode_num_accepted_tokens_per_pos_total", position=p) for p in "012"]
    assert per_pos == [2, 1, 0]
    assert value(families, "vllm:inter_token_latency_seconds_bucket", le="0.05") == 1
    assert value(families, "vllm:inter_token_latency_seconds_bucket", le="0.075") == 2


def test_an_output_ends_once(metrics: FrontMetrics) -> None:
    metrics.added(1, OutputTimes(3, 100.0))
    metrics.finished(1, "stop")
    metrics.finished(1, "abort")
    metrics.added(2, OutputTimes(3, 100.0))
    metrics.finished(2, ERROR)
    metrics.report(Report(EngineLoad(), [OutputUpdate(1, [4], [], FinishReason.STOP)]))
    assert metrics.num_finished == {"stop": 1, "length": 0, "abort": 0, "error": 1}
    assert metrics.e2e.count == 1  # what failed has no latency worth a place in it


def test_names_and_types_of_ours(metrics: FrontMetrics, server: MetricsServer) -> None:
    families = scrape(server)
    assert {name for name in families if name.startswith("outrider_")} == {
        "outrider_engine_steps",
        "outrider_stale_outcomes",
    }
    values: list[Any] = ["10.0.0.1:50052", "grpc", True, False, False, *range(16), 0.5, (0.001, 0.01), [3, 2, 1], 0.25]
    counts = DrafterCounts(*values)
    metrics.exchange = ExchangeCounts([counts], 1, 2, 3, 4, 5)
    families = scrape(server)
    assert {n: f.type for n, f in families.items() if n.startswith("outrider_")} == OURS
    drafter = "10.0.0.1:50052"
    assert value(families, "outrider_drafter_up", drafter=drafter) == 1
    assert value(families, "outrider_draft_transport_in_use", drafter=drafter, transport="grpc") == 1
    assert value(families, "outrider_draft_branch_hits_total", model_name="demo") == 2
    assert value(families, "outrider_draft_round_trip_seconds_count", drafter=drafter) == 6
    assert value(families, "outrider_draft_round_trip_seconds_bucket", drafter=drafter, le="0.01") == 5


def test_graphs_that_never_ran_are_there_with_0(metrics: FrontMetrics, server: MetricsServer) -> None:
    graphs = [
        GraphReplays(4, 3, 16, False, True, 7),
        GraphReplays(8, 3, 32, False, True, 0),
        GraphReplays(8, 3, 32, False, False, 1),
        GraphReplays(8, 3, 256, True, True, 2),
    ]
    metrics.report(Report(EngineLoad(), [], replays=ReplayCounts(graphs, 5)))
    metrics.report(Report(EngineLoad(), []))  # without news of them
    families = scrape(server)
    assert families["outrider_graph_replays"].type == families["outrider_eager_steps"].type == "counter"
    name = "outrider_graph_replays_total"
    labels = ("requests", "draft_tokens", "tokens", "step", "sampling")
    found = {
        tuple(sample.labels[label] for label in labels): sample.value
        for sample in families["outrider_graph_replays"].samples
        if sample.name == name
    }
    assert found == {
        ("4", "3", "16", "decode", "plain"): 7,
        ("8", "3", "32", "decode", "plain"): 0,
        ("8", "3", "32", "decode", "processed"): 1,
        ("8", "3", "256", "mixed", "plain"): 2,
    }
    assert value(families, name, requests="4", model_name="demo") == 7
    assert value(families, "outrider_eager_steps_total", model_name="demo") == 5


def test_process_metrics_are_there(server: MetricsServer) -> None:
    assert "process_resident_memory_bytes" in scrape(server)


def test_port_in_use_is_named(server: MetricsServer, metrics: FrontMetrics) -> None:
    with pytest.raises(InvalidArgumentError, match=f"metrics_port.*{server.port}"):
        MetricsServer("127.0.0.1", server.port, metrics)


def test_nobody_listens_after_the_end(metrics: FrontMetrics) -> None:
    server = MetricsServer("127.0.0.1", 0, metrics)
    server.close()
    with pytest.raises(urllib.error.URLError):
        scrape(server)
