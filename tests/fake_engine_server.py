"""A VllmEngine server without an engine, for tests of clients: its tokens are a pure function of (seed, position).

`python -m tests.fake_engine_server` runs one as a process and prints its port.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import io
import threading
import time
import zipfile
from collections.abc import Iterator, Mapping
from concurrent import futures
from dataclasses import dataclass, field
from typing import Any

import grpc
from smg_grpc_proto.generated import common_pb2, vllm_engine_pb2_grpc
from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from common.engine_extensions import NUM_OUTPUT_TOKENS, SEED, STEP_COUNTS, encode_step_counts
from common.sampling_params import SamplingParams
from common.types import FinishReason, Request, TokenLogprobs
from tests.byte_tokenizer import END, VOCAB_SIZE, byte_tokenizer
from verifier_svc.front.admission import ServedModel, build_requests
from verifier_svc.front.output_stream import OutputStream

MAX_MODEL_LEN = 512
MODEL = ServedModel(VOCAB_SIZE, MAX_MODEL_LEN, (END,), 4, byte_tokenizer())


def token_at(request: Request, position: int) -> int:
    """A letter, or sometimes the end token. With a penalty on output it also depends on how much output there is."""
    params = request.params
    num_output = position - request.prompt_len
    penalised = num_output if params.presence_penalty or params.frequency_penalty else 0
    number = _mix(request.seed, position, penalised)
    may_end = not params.ignore_eos and num_output >= params.min_tokens
    return END if number % 61 == 0 and may_end else ord("a") + number % 26


def logprobs_at(request: Request, position: int, token: int, count: int) -> TokenLogprobs:
    """`count` best tokens, the first of which is the chosen one on even positions only."""
    best = [token] if position % 2 == 0 else []
    best = [*best, *(ord("A") + index for index in range(count))][:count]
    value = -float(_mix(request.seed, position, token) % 64) / 8
    return TokenLogprobs([token, *best], [value, *(value - index for index in range(count))], 0)


def steps_of(request: Request) -> Iterator[tuple[list[int], int, int, FinishReason | None]]:
    """(tokens, draft tokens, accepted ones, why it ended) of each step: one to three tokens."""
    position = len(request.prompt_token_ids)
    while True:
        num_draft = _mix(request.seed, position, 77) % 3
        tokens: list[int] = []
        reason: FinishReason | None = None
        while len(tokens) <= num_draft and reason is None:
            tokens.append(token_at(request, position))
            position += 1
            if tokens[-1] in request.stop_token_ids:
                reason = FinishReason.STOP
            elif position >= request.max_len:
                reason = FinishReason.LENGTH
        yield tokens, num_draft, min(num_draft, len(tokens) - 1), reason
        if reason is not None:
            return


def expected_outputs(prompt: list[int], params: SamplingParams) -> list[OutputStream]:
    """What a client has to get, whatever fails on the way."""
    streams: list[OutputStream] = []
    for request in build_requests("reference", prompt, params, MODEL):
        stream = OutputStream(request, MODEL.tokenizer)
        for tokens, num_draft, num_accepted, reason in steps_of(request):
            logprobs = _logprobs_of(request, len(prompt) + len(stream.token_ids), tokens)
            stream.add(tokens, num_draft, num_accepted, reason, logprobs)
            if stream.finish_reason is not None:
                break
        streams.append(stream)
    return streams


def respond(
    message: pb.GenerateRequest, metadata: Mapping[str, str], *, extensions: bool = True, repeats_all: bool = False
) -> Iterator[pb.GenerateResponse]:
    """The answer to a streaming request: chunks, then the end.

    Args:
        message: what was asked.
        metadata: of the call.
        extensions: know what Outrider adds to the protocol.
        repeats_all: count and repeat, at the end, also the output from before a failure.
    """
    (request,) = _read_request(message, metadata if extensions else {})
    stream = OutputStream(request, MODEL.tokenizer)
    wants_steps = extensions and STEP_COUNTS in metadata
    start = len(request.prompt_token_ids)
    num_drafted = num_accepted_in_all = 0
    is_first = True
    for tokens, num_draft, num_accepted, reason in steps_of(request):
        position = start + len(stream.token_ids)
        delta = stream.add(tokens, num_draft, num_accepted, reason, _logprobs_of(request, position, tokens))
        num_drafted += num_draft
        num_accepted_in_all += delta.num_accepted_tokens
        chunk = pb.GenerateStreamChunk(
            token_ids=delta.token_ids,
            prompt_tokens=start,
            completion_tokens=len(stream.token_ids),
            output_logprobs=_output_logprobs(delta.token_ids, delta.logprobs),
        )
        if is_first and request.params.prompt_logprobs is not None:
            chunk.input_logprobs.CopyFrom(_input_logprobs(request))
        if wants_steps:
            chunk.MergeFromString(encode_step_counts([(len(delta.token_ids), num_draft, delta.num_accepted_tokens)]))
        is_first = False
        yield pb.GenerateResponse(chunk=chunk)
        if stream.finish_reason is not None:
            break
    before = request.prompt_token_ids[request.prompt_len :] if repeats_all else []
    complete = pb.GenerateComplete(
        output_ids=before + stream.token_ids,
        finish_reason=str(stream.finish_reason),
        prompt_tokens=start,
        completion_tokens=len(before) + len(stream.token_ids),
        spec_draft_tokens=num_drafted,
        spec_accepted_tokens=num_accepted_in_all,
    )
    if isinstance(stream.stop_reason, int):
        complete.matched_token_id = stream.stop_reason
    elif stream.stop_reason is not None:
        complete.matched_stop_str = stream.stop_reason
    yield pb.GenerateResponse(complete=complete)


def _read_request(message: pb.GenerateRequest, metadata: Mapping[str, str]) -> list[Request]:
    asked = message.sampling_params
    seed = asked.seed % 2**32 if asked.HasField("seed") else 0
    params = SamplingParams(
        n=asked.n or 1,
        temperature=asked.temperature,
        presence_penalty=asked.presence_penalty,
        frequency_penalty=asked.frequency_penalty,
        min_tokens=asked.min_tokens,
        max_tokens=asked.max_tokens if asked.HasField("max_tokens") else None,
        stop=tuple(asked.stop),
        stop_token_ids=tuple(asked.stop_token_ids),
        include_stop_str_in_output=asked.include_stop_str_in_output,
        ignore_eos=asked.ignore_eos,
        seed=int(metadata.get(SEED, seed)),
        logprobs=asked.logprobs if asked.HasField("logprobs") else None,
        prompt_logprobs=asked.prompt_logprobs if asked.HasField("prompt_logprobs") else None,
        skip_special_tokens=asked.skip_special_tokens,
    )
    num_output_tokens = int(metadata.get(NUM_OUTPUT_TOKENS, 0))
    return build_requests(message.request_id, list(message.tokenized.input_ids), params, MODEL, num_output_tokens)


def _logprobs_of(request: Request, position: int, tokens: list[int]) -> list[TokenLogprobs] | None:
    count = request.params.logprobs
    if count is None:
        return None
    return [logprobs_at(request, position + index, token, count) for index, token in enumerate(tokens)]


def _output_logprobs(tokens: list[int], entries: list[TokenLogprobs] | None) -> pb.OutputLogProbs | None:
    if entries is None:
        return None
    return pb.OutputLogProbs(
        token_ids=tokens,
        token_logprobs=[entry.logprobs[0] for entry in entries],
        top_logprobs=[pb.TopLogProbs(values=entry.logprobs[1:], token_ids=entry.token_ids[1:]) for entry in entries],
    )


def _input_logprobs(request: Request) -> pb.InputLogProbs:
    message = pb.InputLogProbs(token_ids=request.prompt_token_ids)
    message.token_logprobs.add()
    message.top_logprobs.add()
    for position, token in enumerate(request.prompt_token_ids[1:], start=1):
        message.token_logprobs.add(value=-float(position))
        message.top_logprobs.add(token_ids=[token], values=[-float(position)])
    return message


def _mix(*values: int) -> int:
    return int.from_bytes(hashlib.blake2b(repr(values).encode(), digest_size=4).digest(), "little")


def tokenizer_archive() -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("tokenizer.json", byte_tokenizer().to_str())
    return buffer.getvalue()


@dataclass(slots=True)
class Fault:
    """What goes wrong in one Generate call.

    kind: a name of grpc.StatusCode; `end`: the stream ends without a word; `hang`: nothing more comes; `wait`: a pause
    of `seconds`, then it goes on; `bytes`, `index`, `early`, `reason`, `empty`: messages that make no sense; `error`:
    an output that failed.
    """

    kind: str
    after: int = 0
    """Messages that come before it."""
    seconds: float = 0.0


@dataclass
class FakeEngine(vllm_engine_pb2_grpc.VllmEngineServicer):
    """The servicer; `faults` are taken one a Generate call, and calls without one succeed."""

    faults: list[Fault] = field(default_factory=list[Fault])
    delay_s: float = 0.0
    """Between two messages."""
    extensions: bool = True
    archive: bytes | None = field(default_factory=tokenizer_archive)
    sha256: str | None = None
    requests: list[pb.GenerateRequest] = field(default_factory=list[pb.GenerateRequest])
    metadata: list[dict[str, str]] = field(default_factory=list[dict[str, str]])
    aborted_ids: list[str] = field(default_factory=list[str])
    num_running: int = 0
    num_cancelled: int = 0
    num_finished: int = 0
    stopped: threading.Event = field(default_factory=threading.Event)
    _lock: Any = field(default_factory=threading.Lock)

    def Generate(self, request: pb.GenerateRequest, context: Any) -> Iterator[Any]:  # noqa: N802
        metadata = {key: str(value) for key, value in context.invocation_metadata()}
        with self._lock:
            fault = self.faults.pop(0) if self.faults else None
            self.requests.append(request)
            self.metadata.append(metadata)
            self.num_running += 1
        context.add_callback(lambda: self._ended(context))
        known = (NUM_OUTPUT_TOKENS, SEED) if self.extensions else ()
        context.send_initial_metadata(tuple((key, metadata[key]) for key in known if key in metadata))
        for number, response in enumerate(respond(request, metadata, extensions=self.extensions)):
            if fault is not None and number == fault.after:
                yield from _fail(fault, context, response, self.stopped)
                if fault.kind == "end":
                    return
            if self.delay_s:
                time.sleep(self.delay_s)
            if not context.is_active():
                return
            yield response.SerializeToString()
        with self._lock:
            self.num_finished += 1

    def _ended(self, context: Any) -> None:
        with self._lock:
            self.num_running -= 1
            self.num_cancelled += context.code() is None

    def Abort(self, request: pb.AbortRequest, context: Any) -> pb.AbortResponse:  # noqa: N802
        self.aborted_ids += request.request_ids
        return pb.AbortResponse()

    def HealthCheck(self, request: Any, context: Any) -> pb.HealthCheckResponse:  # noqa: N802
        return pb.HealthCheckResponse(healthy=True, message="ready")

    def GetModelInfo(self, request: Any, context: Any) -> pb.GetModelInfoResponse:  # noqa: N802
        return pb.GetModelInfoResponse(
            served_model_name="fake", vocab_size=VOCAB_SIZE, max_context_length=MAX_MODEL_LEN, eos_token_ids=[END]
        )

    def GetServerInfo(self, request: Any, context: Any) -> pb.GetServerInfoResponse:  # noqa: N802
        return pb.GetServerInfoResponse(
            active_requests=self.num_running, uptime_seconds=12.5, server_type="fake", model_dtype="torch.float32"
        )

    def GetLoads(self, request: Any, context: Any) -> pb.GetLoadsResponse:  # noqa: N802
        rank = pb.SchedulerLoad(
            num_running_reqs=3, num_waiting_reqs=2, max_running_requests=64, token_usage=0.25, gen_throughput=123.0
        )
        return pb.GetLoadsResponse(loads=[rank], dp_rank_count=1)

    def GetTokenizer(self, request: Any, context: Any) -> Iterator[common_pb2.GetTokenizerChunk]:  # noqa: N802
        if self.archive is None:
            context.abort(grpc.StatusCode.UNIMPLEMENTED, "no tokenizer")
            return
        half = len(self.archive) // 2
        sha256 = hashlib.sha256(self.archive).hexdigest() if self.sha256 is None else self.sha256
        yield common_pb2.GetTokenizerChunk(data=self.archive[:half])
        yield common_pb2.GetTokenizerChunk(data=self.archive[half:], sha256=sha256)


def _fail(fault: Fault, context: Any, response: pb.GenerateResponse, stopped: threading.Event) -> Iterator[bytes]:
    match fault.kind:
        case "end":
            return
        case "hang":
            while context.is_active() and not stopped.wait(0.02):
                pass
        case "wait":
            stopped.wait(fault.seconds)
        case "bytes":
            yield b"\xff\xff\xff\xff"
        case "index":
            yield pb.GenerateResponse(chunk=pb.GenerateStreamChunk(token_ids=[97], index=5)).SerializeToString()
        case "early":  # the end, without the tokens before it
            end = pb.GenerateComplete(finish_reason="stop", completion_tokens=200)
            yield pb.GenerateResponse(complete=end).SerializeToString()
        case "reason":
            end = pb.GenerateComplete(finish_reason="whatever", completion_tokens=1)
            yield pb.GenerateResponse(complete=end).SerializeToString()
        case "empty":
            yield b""
        case "error":
            yield pb.GenerateResponse(complete=pb.GenerateComplete(finish_reason="error")).SerializeToString()
        case name:
            context.abort(grpc.StatusCode[name], f"scripted {name}")


@dataclass(slots=True)
class FakeServer:
    """A running server; a context manager."""

    engine: FakeEngine
    address: str
    port: int
    _server: Any

    def stop(self) -> None:
        """Drop all connections at once."""
        self.engine.stopped.set()
        self._server.stop(None).wait(5)

    def __enter__(self) -> FakeServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def start_server(
    engine: FakeEngine | None = None, *, port: int = 0, credentials: grpc.ServerCredentials | None = None
) -> FakeServer:
    """Listens on 127.0.0.1."""
    engine = engine or FakeEngine()
    options = [("grpc.so_reuseport", 0), ("grpc.http2.max_ping_strikes", 0)]
    server = grpc.server(futures.ThreadPoolExecutor(32), options=options)
    vllm_engine_pb2_grpc.add_VllmEngineServicer_to_server(engine, _RawGenerate(server))
    address = f"127.0.0.1:{port}"
    port = server.add_insecure_port(address) if credentials is None else server.add_secure_port(address, credentials)
    server.start()
    return FakeServer(engine, f"127.0.0.1:{port}", port, server)


class _RawGenerate:
    """Passes handlers on, with Generate's responses as the bytes they are: some of them are no messages."""

    def __init__(self, server: grpc.Server) -> None:
        self._server = server

    def add_generic_rpc_handlers(self, handlers: Any) -> None:
        """The same handlers come once more, by name."""

    def add_registered_method_handlers(self, service: str, handlers: dict[str, Any]) -> None:
        generate = handlers["Generate"]
        handlers["Generate"] = grpc.unary_stream_rpc_method_handler(
            generate.unary_stream, request_deserializer=generate.request_deserializer, response_serializer=bytes
        )
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--delay", type=float, default=0.0)
    parser.add_argument("--seconds", type=float, default=60.0, help="it ends by itself after this long")
    args = parser.parse_args()
    with start_server(FakeEngine(delay_s=args.delay)) as server, contextlib.suppress(KeyboardInterrupt):
        print(server.port, flush=True)
        time.sleep(args.seconds)


if __name__ == "__main__":
    main()
