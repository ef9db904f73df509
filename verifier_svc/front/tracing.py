"""One OpenTelemetry span for each Generate call. Imported only where spans are asked for."""

from __future__ import annotations

import time
from collections.abc import Mapping

import grpc
from opentelemetry.context import Context
from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, Tracer
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from common.errors import InvalidArgumentError, OutriderError
from common.types import DraftStats
from verifier_svc.front.generation import Generation, Output

_EXPORT_TIMEOUT_S = 2.0

_PROPAGATOR = TraceContextTextMapPropagator()


class RequestTracer:
    """Makes the span of a call when it is over: while it runs, tracing costs nothing.

    Args:
        provider: where spans go; shut down by `close`.
        model_name: that the server answers to.
    """

    def __init__(self, provider: TracerProvider, model_name: str) -> None:
        self._provider = provider
        self._tracer: Tracer = provider.get_tracer("outrider")
        self._model_name = model_name

    def record(
        self,
        request_id: str,
        metadata: Mapping[str, str],
        generation: Generation | None,
        start_s: float,
        error: BaseException | None,
    ) -> None:
        """A call has ended.

        Args:
            request_id: of the call; empty if it had none.
            metadata: of the call; `traceparent` and `tracestate` name the span that this one belongs to.
            generation: None if the call was refused.
            start_s: time.time() when it came.
            error: what ended it, if something did.
        """
        parent: Context = _PROPAGATOR.extract({key: metadata[key] for key in _PROPAGATOR.fields if key in metadata})
        span = self._tracer.start_span(
            f"text_completion {self._model_name}",
            context=parent,
            kind=SpanKind.SERVER,
            start_time=int(start_s * 1e9),
            attributes={
                "rpc.system": "grpc",
                "rpc.service": "vllm.grpc.engine.VllmEngine",
                "rpc.method": "Generate",
                "gen_ai.operation.name": "text_completion",
                "gen_ai.provider.name": "outrider",
                "gen_ai.request.model": self._model_name,
                "gen_ai.response.model": self._model_name,
                "gen_ai.response.id": request_id,
                "gen_ai.request.id": request_id,
            },
        )
        if generation is not None:
            _describe(span, generation)
        if error is not None:
            span.set_attribute("error.type", type(error).__name__)
            span.set_attribute("rpc.grpc.status_code", _status_code(error))
            span.set_status(Status(StatusCode.ERROR, str(error) if isinstance(error, OutriderError) else None))
        else:
            span.set_attribute("rpc.grpc.status_code", 0)
        span.end(int(time.time() * 1e9))

    def close(self) -> None:
        """Send what is left; takes a few seconds at most."""
        self._provider.shutdown()


def build_tracer(endpoint: str, model_name: str, version: str) -> RequestTracer:
    """A tracer that exports over OTLP and gRPC, in batches and from a thread.

    Args:
        endpoint: of a collector, http://HOST:PORT or https://HOST:PORT.
        model_name: that the server answers to.
        version: of this server.
    """
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

    scheme = endpoint.partition("://")[0]
    if scheme not in ("http", "https"):
        raise InvalidArgumentError("otlp_endpoint", endpoint, "http://HOST:PORT or https://HOST:PORT")
    resource = Resource.create({SERVICE_NAME: "outrider-verifier", SERVICE_VERSION: version})
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    exporter = OTLPSpanExporter(endpoint=endpoint, insecure=scheme == "http", timeout=_EXPORT_TIMEOUT_S)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return RequestTracer(provider, model_name)


def _describe(span: Span, generation: Generation) -> None:
    """Prompts and outputs stay out of it: they are the caller's."""
    outputs = generation.outputs
    first = outputs[0]
    params = first.stream.request.params
    span.set_attribute("gen_ai.request.temperature", params.temperature)
    span.set_attribute("gen_ai.request.top_p", params.top_p)
    span.set_attribute("gen_ai.request.top_k", params.top_k)
    span.set_attribute("gen_ai.request.frequency_penalty", params.frequency_penalty)
    span.set_attribute("gen_ai.request.presence_penalty", params.presence_penalty)
    span.set_attribute("gen_ai.request.choice.count", len(outputs))
    if params.max_tokens is not None:
        span.set_attribute("gen_ai.request.max_tokens", params.max_tokens)
    if params.seed is not None and params.seed < 2**63:  # the largest number that a span can hold
        span.set_attribute("gen_ai.request.seed", params.seed)
    span.set_attribute("gen_ai.usage.input_tokens", first.stream.request.prompt_len)
    span.set_attribute("gen_ai.usage.output_tokens", sum(len(output.stream.token_ids) for output in outputs))
    span.set_attribute("gen_ai.usage.cache_read.input_tokens", first.num_cached_tokens)
    reasons = [str(output.stream.finish_reason) for output in outputs if output.stream.finish_reason is not None]
    span.set_attribute("gen_ai.response.finish_reasons", reasons)
    _describe_times(span, outputs)
    drafts = DraftStats()
    for output in outputs:
        drafts.merge(output.stream.draft_stats)
    span.set_attribute("outrider.draft.num_drafts", drafts.num_drafts)
    span.set_attribute("outrider.draft.num_draft_tokens", drafts.num_draft_tokens)
    span.set_attribute("outrider.draft.num_accepted_tokens", drafts.num_accepted_tokens)
    span.set_attribute("outrider.draft.acceptance_length", drafts.acceptance_length)
    span.set_attribute("outrider.draft.acceptance_rate", drafts.acceptance_rate)


def _describe_times(span: Span, outputs: list[Output]) -> None:
    """The names that vLLM uses, as the conventions have none for a server's span. Of several outputs, the slowest."""
    for name, values in (
        ("gen_ai.latency.time_in_queue", [output.times.queue_s for output in outputs]),
        ("gen_ai.latency.time_to_first_token", [output.times.ttft_s for output in outputs]),
    ):
        known = [value for value in values if value is not None]
        if known:
            span.set_attribute(name, max(known))


def _status_code(error: BaseException) -> int:
    name = error.status if isinstance(error, OutriderError) else "INTERNAL"
    if not isinstance(error, Exception):  # the task was cancelled: the client left, or its deadline passed
        name = "CANCELLED"
    return int(grpc.StatusCode[name].value[0])
