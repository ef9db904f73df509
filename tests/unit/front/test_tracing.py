"""Spans of Generate calls: where they belong, and what they say; and that nothing of it is loaded unless asked for."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from common.engine_extensions import StepCounts
from common.errors import InvalidArgumentError, UnavailableError
from common.sampling_params import SamplingParams
from common.types import FinishReason, Request
from verifier_svc.front.generation import Generation
from verifier_svc.front.tracing import RequestTracer, build_tracer
from verifier_svc.messages import OutputUpdate

ROOT = Path(__file__).resolve().parents[3]
TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = {"traceparent": f"00-{TRACE_ID}-00f067aa0ba902b7-01", "tracestate": "vendor=value"}


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def tracer(exporter: InMemorySpanExporter) -> Iterator[RequestTracer]:
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracer = RequestTracer(provider, "demo")
    yield tracer
    tracer.close()


def finished_generation() -> Generation:
    params = SamplingParams(temperature=0.5, max_tokens=4, seed=9, top_p=0.9)
    request = Request("r", [1, 2, 3], params, 9, 7, num_speculative_tokens=3)
    generation = Generation([request], None)
    (output,) = generation.outputs
    output.times.queue_s = 0.25
    output.times.arrival_s = 64.0
    output.times.first_s = 64.5
    output.times.num_tokens = 4
    steps = [StepCounts(1, 0, 0), StepCounts(3, 3, 2)]
    output.update(OutputUpdate(0, [5, 6, 7, 8], steps, FinishReason.LENGTH, num_cached_tokens=2))
    return generation


def only(exporter: InMemorySpanExporter) -> ReadableSpan:
    (span,) = exporter.get_finished_spans()
    return span


def test_one_span_a_request_with_its_parent(tracer: RequestTracer, exporter: InMemorySpanExporter) -> None:
    start_s = time.time() - 2.0
    tracer.record("request-1", PARENT, finished_generation(), start_s, None)
    span = only(exporter)
    assert span.parent is not None
    assert f"{span.parent.trace_id:032x}" == TRACE_ID
    assert f"{span.parent.span_id:016x}" == "00f067aa0ba902b7"
    assert span.context is not None
    assert span.context.trace_state.get("vendor") == "value"
    assert span.kind is SpanKind.SERVER
    assert span.name == "text_completion demo"
    assert span.start_time is not None
    assert span.end_time is not None
    assert 1.9e9 < span.end_time - span.start_time < 10e9
    expected = {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.request.model": "demo",
        "gen_ai.response.id": "request-1",
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.9,
        "gen_ai.request.max_tokens": 4,
        "gen_ai.request.seed": 9,
        "gen_ai.request.choice.count": 1,
        "gen_ai.usage.input_tokens": 3,
        "gen_ai.usage.output_tokens": 4,
        "gen_ai.usage.cache_read.input_tokens": 2,
        "gen_ai.response.finish_reasons": ("length",),
        "gen_ai.latency.time_in_queue": 0.25,
        "gen_ai.latency.time_to_first_token": 0.5,
        "outrider.draft.num_drafts": 1,
        "outrider.draft.num_draft_tokens": 3,
        "outrider.draft.num_accepted_tokens": 2,
        "outrider.draft.acceptance_length": 3.0,
        "rpc.grpc.status_code": 0,
    }
    attributes = dict(span.attributes or {})
    assert {name: attributes.get(name) for name in expected} == expected
    assert span.status.status_code is StatusCode.UNSET


def test_a_refused_request_is_a_root_span_with_an_error(tracer: RequestTracer, exporter: InMemorySpanExporter) -> None:
    tracer.record("request-2", {}, None, time.time(), UnavailableError("the model is loading"))
    span = only(exporter)
    assert span.parent is None
    assert span.status.status_code is StatusCode.ERROR
    attributes = dict(span.attributes or {})
    assert attributes["error.type"] == "UnavailableError"
    assert attributes["rpc.grpc.status_code"] == 14


@pytest.mark.parametrize("header", ["", "garbage", "00-0-0-0", "é" * 300])
def test_a_parent_that_cannot_be_read_is_none(
    tracer: RequestTracer, exporter: InMemorySpanExporter, header: str
) -> None:
    tracer.record("request-3", {"traceparent": header}, None, time.time(), None)
    assert only(exporter).parent is None


def test_endpoint_needs_a_scheme() -> None:
    with pytest.raises(InvalidArgumentError, match="otlp_endpoint"):
        build_tracer("collector:4317", "demo", "0")


def test_nothing_of_it_is_loaded_unless_asked_for() -> None:
    code = "import sys, verifier_svc.front.server; print([n for n in sys.modules if n.startswith('opentelemetry')])"
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    assert result.stdout.strip() == "[]"


def test_without_the_extra_the_option_says_what_is_missing() -> None:
    code = """
import sys
sys.modules["opentelemetry"] = None
from verifier_svc.front.config import VerifierConfig
from verifier_svc.front.server import _build_tracer
try:
    _build_tracer(VerifierConfig(model="m", otlp_endpoint="http://x:1"), "0")
except Exception as error:
    print(type(error).__name__, error)
"""
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    assert "InvalidArgumentError" in result.stdout
    assert "outrider[otel]" in result.stdout
