"""The methods of vllm.grpc.engine.VllmEngine."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import grpc.aio
import structlog
from smg_grpc_proto.generated import common_pb2, vllm_engine_pb2_grpc
from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from common.errors import (
    InvalidArgumentError,
    InvalidRequestError,
    OutriderError,
    RequestTimeoutError,
    UnavailableError,
    UnsupportedError,
)
from common.logging import get_logger
from verifier_svc.front.admission import ServedModel, build_requests
from verifier_svc.front.conversion import (
    MAX_REQUEST_ID_LENGTH,
    Wishes,
    check_supported,
    request_id_of,
    to_sampling_params,
    truncated,
)
from verifier_svc.front.engine_client import EngineClient
from verifier_svc.front.generation import Generation
from verifier_svc.front.model_files import TokenizerArchive
from verifier_svc.messages import ServedFacts

if TYPE_CHECKING:  # what it imports is there with the extra otel only
    from verifier_svc.front.tracing import RequestTracer

_CHUNK_BYTES = 512 << 10

# Text longer than this is tokenized in a thread: at 1 MB/s or more it costs the event loop 8 ms at most.
_LONG_TEXT = 8 << 10

_FLUSH_POLL_S = 0.05

logger = get_logger(__name__)

_Context = grpc.aio.ServicerContext[Any, Any]


@dataclass(frozen=True, slots=True)
class Served:
    """What is known once the engine has loaded."""

    facts: ServedFacts
    model: ServedModel
    name: str
    path: str
    model_config: dict[str, Any]
    """config.json"""
    tokenizer_archive: TokenizerArchive | None
    max_text_bytes: int
    """A prompt of more bytes has too many tokens, whatever they are."""


class VllmEngineServicer(vllm_engine_pb2_grpc.VllmEngineServicer):
    """Checks what a caller asks, hands it to the engine, and sends what comes back.

    Args:
        engine: link to the engine process.
        request_timeout_s: of a Generate call, whatever its own deadline is.
        engine_timeout_s: silence of an engine with work after which it counts as stuck.
        version: of this server.
        tracer: hears of every call; None: nobody does.
    """

    def __init__(
        self,
        engine: EngineClient,
        request_timeout_s: float,
        engine_timeout_s: float,
        version: str,
        tracer: RequestTracer | None = None,
    ) -> None:
        self._engine = engine
        self._tracer = tracer
        self._request_timeout_s = request_timeout_s
        self._engine_timeout_s = engine_timeout_s
        self._version = version
        self._served: Served | None = None
        self._refusal: str | None = "the model is loading"
        self._generations: dict[str, Generation] = {}
        self._idle = asyncio.Event()
        self._idle.set()
        self._started_s = time.monotonic()
        self._last_receive_s = 0.0

    # -- life ----------------------------------------------------------------------------------------------------

    @property
    def is_ready(self) -> bool:
        return self._trouble() is None

    @property
    def has_loaded(self) -> bool:
        return self._served is not None

    @property
    def num_generations(self) -> int:
        return len(self._generations)

    def set_ready(self, served: Served) -> None:
        self._served = served
        self._refusal = None

    def refuse_new(self, reason: str) -> None:
        """New requests end with UNAVAILABLE; those that have started go on."""
        self._refusal = reason

    async def wait_idle(self) -> None:
        """Until no Generate call is left."""
        await self._idle.wait()

    def fail_all(self, error: OutriderError) -> None:
        """End all calls with a status."""
        for generation in self._generations.values():
            generation.fail(error)

    # -- Generate ------------------------------------------------------------------------------------------------

    async def Generate(self, request: pb.GenerateRequest, context: _Context) -> None:  # noqa: N802
        start_s = self._last_receive_s = time.time()
        request_id = request.request_id[:MAX_REQUEST_ID_LENGTH]
        structlog.contextvars.bind_contextvars(request_id=request_id)  # in this call's records, whoever makes them
        metadata = {key: value for key, value in context.invocation_metadata() or () if isinstance(value, str)}
        generation: Generation | None = None
        try:
            wishes = Wishes.of(metadata)
            generation = await self._accept(request, wishes)
            logger.debug("request accepted", num_outputs=len(generation.outputs))
            await self._run(request, generation, wishes, context)
        except BaseException as error:
            self._ended(request_id, metadata, generation, start_s, error)
            raise
        self._ended(request_id, metadata, generation, start_s, None)

    async def _accept(self, request: pb.GenerateRequest, wishes: Wishes) -> Generation:
        """Raises where the request cannot be served."""
        arrival_s = self._engine.metrics.clock()
        served = self._check_ready()
        request_id = request_id_of(request)
        check_supported(request)
        params = to_sampling_params(request.sampling_params, wishes)
        prompt = await self._prompt_of(request, served)
        prompt = truncated(prompt, request.sampling_params, served.model.max_model_len)
        requests = build_requests(request_id, prompt, params, served.model, wishes.num_output_tokens or 0)
        self._check_ready()  # again: a long prompt was tokenized meanwhile
        if request_id in self._generations:
            raise InvalidArgumentError("request_id", request_id, "an id that no running request has")
        return Generation(requests, served.model.tokenizer, wishes.has_step_counts, arrival_s)

    async def _run(
        self, request: pb.GenerateRequest, generation: Generation, wishes: Wishes, context: _Context
    ) -> None:
        request_id = request.request_id
        self._generations[request_id] = generation
        self._idle.clear()
        try:
            generation.submit(self._engine)
            if wishes.answer:
                await context.send_initial_metadata(wishes.answer)
            await self._send_all(generation, request.stream, context)
        finally:
            # Also when the client has left or its deadline has passed: the task is cancelled then.
            generation.drop()
            del self._generations[request_id]
            if not self._generations:
                self._idle.set()

    async def _send_all(self, generation: Generation, stream: bool, context: _Context) -> None:
        try:
            async with asyncio.timeout(self._request_timeout_s):
                while responses := await generation.next_responses(stream):
                    for response in responses:
                        await context.write(response)
        except TimeoutError:
            raise RequestTimeoutError(f"the request took longer than {self._request_timeout_s:g} s") from None

    def _ended(
        self,
        request_id: str,
        metadata: Mapping[str, str],
        generation: Generation | None,
        start_s: float,
        error: BaseException | None,
    ) -> None:
        if isinstance(error, Exception):
            logger.debug("request failed", error=type(error).__name__)
        elif generation is not None:
            num_tokens = sum(len(output.stream.token_ids) for output in generation.outputs)
            logger.debug("request finished" if error is None else "request left", num_tokens=num_tokens)
        if self._tracer is not None:
            self._tracer.record(request_id, metadata, generation, start_s, error)

    async def _prompt_of(self, request: pb.GenerateRequest, served: Served) -> list[int]:
        kind = request.WhichOneof("input")
        if kind == "tokenized":
            count = len(request.tokenized.input_ids)
            if count > served.model.max_model_len and not request.sampling_params.HasField("truncate_prompt_tokens"):
                limit = f"fewer than max_model_len = {served.model.max_model_len}"
                raise InvalidArgumentError("prompt", f"{count} tokens", limit)
            return list(request.tokenized.input_ids)
        if kind is None:
            raise InvalidRequestError("the request has no prompt: expected tokenized or text")
        size = len(request.text.encode())
        if size > served.max_text_bytes:
            limit = f"at most {served.max_text_bytes} bytes for max_model_len = {served.model.max_model_len}"
            raise InvalidArgumentError("prompt", f"{size} bytes", limit)
        if size > _LONG_TEXT:
            return await asyncio.to_thread(served.model.tokenize, request.text)
        return served.model.tokenize(request.text)

    async def Abort(self, request: pb.AbortRequest, context: _Context) -> pb.AbortResponse:  # noqa: N802
        for request_id in request.request_ids:
            generation = self._generations.get(request_id)
            if generation is not None:
                generation.abort()
        return pb.AbortResponse()

    # -- information ---------------------------------------------------------------------------------------------

    async def HealthCheck(  # noqa: N802
        self, request: pb.HealthCheckRequest, context: _Context
    ) -> pb.HealthCheckResponse:
        trouble = self._trouble()
        return pb.HealthCheckResponse(healthy=trouble is None, message=trouble or "ready")

    async def GetModelInfo(  # noqa: N802
        self, request: pb.GetModelInfoRequest, context: _Context
    ) -> pb.GetModelInfoResponse:
        served = self._loaded()
        config = served.model_config
        return pb.GetModelInfoResponse(
            model_path=served.path,
            is_generation=True,
            max_context_length=served.model.max_model_len,
            vocab_size=served.model.vocab_size,
            supports_vision=False,
            served_model_name=served.name,
            tokenizer_path="" if served.model.tokenizer is None else served.path,
            model_type=str(config.get("model_type", "")),
            architectures=[str(name) for name in config.get("architectures") or ()],
            eos_token_ids=served.model.eos_token_ids,
            pad_token_id=_token_id(config, "pad_token_id"),
            bos_token_id=_token_id(config, "bos_token_id"),
            max_req_input_len=served.model.max_model_len - 1,
        )

    async def GetServerInfo(  # noqa: N802
        self, request: pb.GetServerInfoRequest, context: _Context
    ) -> pb.GetServerInfoResponse:
        facts = self._loaded().facts
        return pb.GetServerInfoResponse(
            active_requests=len(self._generations),
            is_paused=not self.is_ready,
            last_receive_timestamp=self._last_receive_s,
            uptime_seconds=time.monotonic() - self._started_s,
            server_type="vllm-grpc",
            data_parallel_size=1,
            kv_cache_dtype="auto",
            block_size=facts.block_size,
            model_dtype=f"torch.{facts.dtype}",
            max_num_seqs=facts.max_num_seqs,
        )

    async def GetLoads(self, request: pb.GetLoadsRequest, context: _Context) -> pb.GetLoadsResponse:  # noqa: N802
        facts, load = self._loaded().facts, self._engine.load
        if request.HasField("dp_rank") and request.dp_rank != 0:
            raise InvalidArgumentError("dp_rank", request.dp_rank, "0: there is one rank")
        hit_rate = load.num_prefix_hits / load.num_prefix_queries if load.num_prefix_queries else 0.0
        num_uncached = sum(generation.num_waiting_prompt_tokens for generation in self._generations.values())
        rank = pb.SchedulerLoad(
            num_running_reqs=load.num_running,
            num_waiting_reqs=load.num_waiting,
            num_total_reqs=load.num_running + load.num_waiting,
            num_used_tokens=round(load.kv_cache_usage * facts.num_kv_cache_tokens),
            max_total_num_tokens=facts.num_kv_cache_tokens,
            token_usage=load.kv_cache_usage,
            gen_throughput=self._engine.metrics.generation_tokens_per_s,
            cache_hit_rate=hit_rate,
            utilization=load.num_running / facts.max_num_seqs,
            max_running_requests=facts.max_num_seqs,
            num_waiting_uncached_tokens=num_uncached,
        )
        timestamp = datetime.now(UTC).isoformat()
        return pb.GetLoadsResponse(timestamp=timestamp, version=self._version, dp_rank_count=1, loads=[rank])

    async def GetTokenizer(  # noqa: N802
        self, request: common_pb2.GetTokenizerRequest, context: _Context
    ) -> AsyncIterator[common_pb2.GetTokenizerChunk]:
        archive = self._loaded().tokenizer_archive
        if archive is None:
            raise UnsupportedError("the server has no tokenizer: it serves token ids")
        size = len(archive.data)
        for begin in range(0, size, _CHUNK_BYTES):
            end = min(begin + _CHUNK_BYTES, size)
            sha256 = archive.sha256 if end == size else ""
            yield common_pb2.GetTokenizerChunk(data=archive.data[begin:end], sha256=sha256)

    # -- management ----------------------------------------------------------------------------------------------

    async def FlushCache(  # noqa: N802
        self, request: common_pb2.FlushCacheRequest, context: _Context
    ) -> common_pb2.FlushCacheResponse:
        self._loaded()
        wanted_s = 0.0 if math.isnan(request.timeout_s) else request.timeout_s  # no deadline would ever be behind it
        deadline = time.monotonic() + min(max(wanted_s, 0.0), self._request_timeout_s)
        while not await self._engine.flush_cache():
            left = deadline - time.monotonic()
            if left <= 0:
                message = f"{self._engine.num_outputs} outputs are being made; the cache is as it was"
                return common_pb2.FlushCacheResponse(success=False, message=message)
            await asyncio.sleep(min(_FLUSH_POLL_S, left))
        return common_pb2.FlushCacheResponse(success=True, message="the prefix cache is empty")

    async def Embed(self, request: pb.EmbedRequest, context: _Context) -> pb.EmbedResponse:  # noqa: N802
        raise UnsupportedError("embeddings are not supported: this server generates text")

    async def StartProfile(  # noqa: N802
        self, request: common_pb2.StartProfileRequest, context: _Context
    ) -> common_pb2.ProfileResponse:
        raise UnsupportedError("profiling over gRPC is not supported")

    async def StopProfile(  # noqa: N802
        self, request: common_pb2.StopProfileRequest, context: _Context
    ) -> common_pb2.ProfileResponse:
        raise UnsupportedError("profiling over gRPC is not supported")

    async def SubscribeKvEvents(  # noqa: N802
        self, request: common_pb2.SubscribeKvEventsRequest, context: _Context
    ) -> None:
        raise UnsupportedError("KV cache events are not supported")

    # -- helpers -------------------------------------------------------------------------------------------------

    def _trouble(self) -> str | None:
        """Why requests should go elsewhere; None: they are welcome."""
        if self._engine.failure is not None:
            return str(self._engine.failure)
        if self._refusal is None and self._engine.silence_s > self._engine_timeout_s:
            return f"the engine has work and has said nothing for {self._engine.silence_s:.0f} s"
        return self._refusal

    def _check_ready(self) -> Served:
        if self._engine.failure is not None:
            raise UnavailableError(str(self._engine.failure))
        if self._refusal is not None:
            raise UnavailableError(self._refusal)
        return self._loaded()

    def _loaded(self) -> Served:
        if self._served is None:
            raise UnavailableError("the model is loading")
        return self._served


def _token_id(config: dict[str, Any], name: str) -> int:
    value = config.get(name)
    return value if isinstance(value, int) and -(2**31) <= value < 2**31 else 0
