"""Sends requests to a verifier at their times, whether or not earlier ones have been answered, and keeps the times.

It reads messages as bytes and parses them after the run: the client has to share the machine with what it measures.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import grpc
import grpc.aio
from google.protobuf.unknown_fields import UnknownFieldSet
from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from bench.workload import PlannedRequest
from common.engine_extensions import STEP_COUNTS, STEP_COUNTS_FIELD, StepCounts, decode_step_counts
from common.types import DraftStats

METHOD = "/vllm.grpc.engine.VllmEngine/Generate"


@dataclass(slots=True)
class Sent:
    """One request as it went; times are seconds from the start of the run."""

    planned: PlannedRequest
    sent_s: float = 0.0
    messages: list[bytes] = field(default_factory=list[bytes])
    received_s: list[float] = field(default_factory=list[float])
    error: str | None = None


@dataclass(slots=True)
class Finished:
    """What one request got. Latencies count from the time it was planned for, so a client that is late is no excuse."""

    token_ids: list[int]
    ttft_s: float
    tpot_s: float | None
    """Mean between tokens; None for a single one."""
    itl_s: list[float]
    """Between messages with tokens; a step may bring several tokens."""
    e2e_s: float
    draft_stats: DraftStats


async def send_all(
    address: str, planned: Sequence[PlannedRequest], timeout_s: float, run_id: str, with_step_counts: bool = True
) -> list[Sent]:
    """An open loop: returns when the last request has ended.

    Args:
        address: HOST:PORT of the verifier.
        planned: in the order of their times.
        timeout_s: of each request.
        run_id: begins the request ids.
        with_step_counts: ask for the draft tokens of each step.
    """
    metadata = ((STEP_COUNTS, "1"),) if with_step_counts else ()
    async with grpc.aio.insecure_channel(address) as channel:
        start = time.perf_counter()
        tasks: list[asyncio.Task[Sent]] = []
        for number, request in enumerate(planned):
            message = to_message(request, f"{run_id}-{number}").SerializeToString()  # before its time has come
            await asyncio.sleep(max(0.0, start + request.at_s - time.perf_counter()))
            tasks.append(asyncio.create_task(_send(channel, request, message, metadata, start, timeout_s)))
        return await asyncio.gather(*tasks)


def to_message(request: PlannedRequest, request_id: str) -> pb.GenerateRequest:
    """Every output has its full length, so that the work is the same whatever is written."""
    return pb.GenerateRequest(
        request_id=request_id,
        tokenized=pb.TokenizedInput(input_ids=request.prompt_token_ids),
        stream=True,
        sampling_params=pb.SamplingParams(
            temperature=request.temperature, max_tokens=request.max_tokens, ignore_eos=True, seed=request.seed
        ),
    )


async def _send(
    channel: grpc.aio.Channel,
    request: PlannedRequest,
    message: bytes,
    metadata: tuple[tuple[str, str], ...],
    start: float,
    timeout_s: float,
) -> Sent:
    sent = Sent(request, time.perf_counter() - start)
    call = channel.unary_stream(METHOD)(message, timeout=timeout_s, metadata=metadata)
    try:
        while isinstance(received := await call.read(), bytes):  # else it is the end
            sent.received_s.append(time.perf_counter() - start)
            sent.messages.append(received)
        code = await call.code()
        if code is not grpc.StatusCode.OK:
            sent.error = f"{code.name}: {await call.details()}"
    except grpc.aio.AioRpcError as error:
        sent.error = f"{error.code().name}: {error.details()}"
    return sent


def finish(sent: Sent) -> Finished | None:
    """None: it failed, or never had a token."""
    if sent.error is not None:
        return None
    token_ids: list[int] = []
    times: list[float] = []
    stats = DraftStats()
    for message, at_s in zip(sent.messages, sent.received_s, strict=True):
        chunk = pb.GenerateResponse.FromString(message).chunk
        if chunk.token_ids:
            token_ids += chunk.token_ids
            times.append(at_s)
            for step in _step_counts(chunk):
                stats.add(step.num_draft_tokens, step.num_accepted_tokens)
    if not times:
        return None
    return Finished(
        token_ids=token_ids,
        ttft_s=times[0] - sent.planned.at_s,
        tpot_s=(times[-1] - times[0]) / (len(token_ids) - 1) if len(token_ids) > 1 else None,
        itl_s=[later - earlier for earlier, later in itertools.pairwise(times)],
        e2e_s=sent.received_s[-1] - sent.planned.at_s,
        draft_stats=stats,
    )


def tokens_fingerprint(finished: Sequence[Finished | None]) -> str:
    """Of all outputs: two runs of a workload got the same tokens if this is the same."""
    text = repr([None if output is None else output.token_ids for output in finished])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _step_counts(chunk: pb.GenerateStreamChunk) -> list[StepCounts]:
    """Of a verifier that knows our extension; of others there is nothing to say."""
    for unknown in UnknownFieldSet(chunk):
        if unknown.field_number == STEP_COUNTS_FIELD and isinstance(unknown.data, bytes):
            return decode_step_counts(unknown.data, len(chunk.token_ids)) or []
    return []
