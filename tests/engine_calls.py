"""Calls of VllmEngine as a raw client makes them, for tests."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from smg_grpc_proto.generated import vllm_engine_pb2 as pb
from smg_grpc_proto.generated import vllm_engine_pb2_grpc as pb_grpc

CALL_LIMIT_S = 60.0

_ids = itertools.count()


@dataclass
class Received:
    """What a client has got of one output."""

    token_ids: list[int] = field(default_factory=list)
    """Of the chunks."""
    chunks: list[pb.GenerateStreamChunk] = field(default_factory=list)
    completes: list[pb.GenerateComplete] = field(default_factory=list)

    @property
    def complete(self) -> pb.GenerateComplete:
        (complete,) = self.completes
        return complete


@contextmanager
def connected(address: str, credentials: grpc.ChannelCredentials | None = None) -> Iterator[pb_grpc.VllmEngineStub]:
    # A pool of one's own: a channel may otherwise share its connection with one of another test.
    options = [("grpc.use_local_subchannel_pool", 1)]
    if credentials is None:
        channel = grpc.insecure_channel(address, options)
    else:
        channel = grpc.secure_channel(address, credentials, options)
    with channel:
        yield pb_grpc.VllmEngineStub(channel)


def make_request(
    prompt: str | Sequence[int], *, stream: bool = True, request_id: str | None = None, **params: Any
) -> pb.GenerateRequest:
    request = pb.GenerateRequest(
        request_id=f"test-{next(_ids)}" if request_id is None else request_id,
        stream=stream,
        sampling_params=pb.SamplingParams(**params),
    )
    if isinstance(prompt, str):
        request.text = prompt
    else:
        request.tokenized.input_ids.extend(prompt)
    return request


def generate(
    stub: pb_grpc.VllmEngineStub,
    request: pb.GenerateRequest,
    *,
    timeout: float = CALL_LIMIT_S,
    metadata: Sequence[tuple[str, str]] = (),
) -> list[Received]:
    """All outputs of a call, by index; raises grpc.RpcError."""
    responses = list(stub.Generate(request, timeout=timeout, metadata=metadata))
    return collect(responses, max(1, request.sampling_params.n))


def collect(responses: Iterable[pb.GenerateResponse], count: int = 1) -> list[Received]:
    received = [Received() for _ in range(count)]
    for response in responses:
        if response.HasField("chunk"):
            output = received[response.chunk.index]
            assert not output.completes, "a chunk after the last message of its output"
            output.chunks.append(response.chunk)
            output.token_ids += response.chunk.token_ids
        else:
            received[response.complete.index].completes.append(response.complete)
    return received


def health_of(channel: grpc.Channel, service: str = "", *, timeout: float = 10, wait_for_ready: bool = False) -> bool:
    """grpc.health.v1: does it serve?"""
    stub: Any = health_pb2_grpc.HealthStub(channel)
    request = health_pb2.HealthCheckRequest(service=service)
    answer = stub.Check(request, timeout=timeout, wait_for_ready=wait_for_ready)
    return answer.status == health_pb2.HealthCheckResponse.SERVING


def load_of(stub: pb_grpc.VllmEngineStub) -> pb.SchedulerLoad:
    (load,) = stub.GetLoads(pb.GetLoadsRequest(), timeout=10).loads
    return load


def wait_idle(stub: pb_grpc.VllmEngineStub, limit_s: float = 5.0) -> None:
    """Until every row and block is back; fails after the limit."""
    wait_load(stub, lambda load: load.num_total_reqs == 0 and load.token_usage == 0, limit_s)
    assert stub.GetServerInfo(pb.GetServerInfoRequest(), timeout=10).active_requests == 0


def wait_load(stub: pb_grpc.VllmEngineStub, is_met: Any, limit_s: float = 5.0) -> None:
    deadline = time.monotonic() + limit_s
    while not is_met(load := load_of(stub)):
        assert time.monotonic() < deadline, f"after {limit_s} s the load is still {load}"
        time.sleep(0.02)
