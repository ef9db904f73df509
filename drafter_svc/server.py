"""The process that speaks gRPC: passes frames between the streams of verifiers and the worker, and never looks inside.

It imports no torch, and a busy draft method never holds its interpreter.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import signal
import socket
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer
from grpc_reflection.v1alpha import reflection

from common.errors import EngineClosedError, OutriderError
from common.logging import get_logger
from common.metrics import MetricsServer
from common.protos.outrider.v1 import drafter_pb2 as pb
from common.rpc.server import ServerLimits, build_server, listen_tcp
from drafter_svc.config import DrafterConfig
from drafter_svc.metrics import DrafterMetrics
from drafter_svc.worker_link import Kind, Message, pack, unpack_all

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["Drafter"].full_name
MAX_UNANSWERED_FRAMES = 64
"""Frames of one stream that wait for the worker; the stream is read no further, and gRPC holds the verifier back."""
_INFO_TIMEOUT_S = 10.0
_STOP_GRACE_S = 1.0
_WORKER_STOP_S = 5.0

logger = get_logger(__name__)

_Context = grpc.aio.ServicerContext[bytes, bytes]


class WorkerDiedError(OutriderError):
    """The process that drafts is gone."""

    status = "UNAVAILABLE"


@dataclass(slots=True)
class _Stream:
    """One Session call."""

    credits: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(MAX_UNANSWERED_FRAMES))
    outbox: deque[Message] = field(default_factory=deque[Message])
    has_output: asyncio.Event = field(default_factory=asyncio.Event)


class WorkerLink:
    """The RPC side's end of the socket to the worker.

    Args:
        reader, writer: the socket.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._streams: dict[int, _Stream] = {}
        self._infos: dict[int, asyncio.Future[bytes]] = {}
        self._next_stream = 1

    def open_stream(self) -> tuple[int, _Stream]:
        number = self._next_stream
        self._next_stream += 1
        stream = self._streams[number] = _Stream()
        return number, stream

    def close_stream(self, number: int) -> None:
        """The call is over: the worker lets go of its rows."""
        self._streams.pop(number, None)
        self._writer.write(pack(Kind.END, number))

    async def send_frame(self, number: int, frame: bytes) -> None:
        """Waits while the worker is behind: a verifier's frames pile up at the verifier and not here."""
        self._writer.write(pack(Kind.FRAME, number, frame))
        await self._writer.drain()

    async def info(self) -> bytes:
        """An InfoResponse of the worker."""
        return await self._ask(Kind.INFO)

    async def counts(self) -> bytes:
        """A `WorkerCounts` of the worker."""
        return await self._ask(Kind.COUNTS)

    async def _ask(self, kind: Kind) -> bytes:
        number = self._next_stream
        self._next_stream += 1
        future: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._infos[number] = future
        self._writer.write(pack(kind, number))
        try:
            return await asyncio.wait_for(future, _INFO_TIMEOUT_S)
        except TimeoutError:
            raise WorkerDiedError(f"the draft method gave no answer within {_INFO_TIMEOUT_S:g} s") from None
        finally:
            self._infos.pop(number, None)

    async def run(self) -> None:
        """Pass on what the worker sends, until it is gone."""
        buffer = bytearray()
        while data := await self._reader.read(1 << 20):
            buffer += data
            for message in unpack_all(buffer):
                if message.kind in (Kind.INFO, Kind.COUNTS):
                    future = self._infos.get(message.stream)
                    if future is not None and not future.done():
                        future.set_result(message.payload)
                elif (stream := self._streams.get(message.stream)) is not None:
                    stream.outbox.append(message)
                    stream.has_output.set()

    def close(self) -> None:
        self._writer.close()


class DrafterServicer:
    """outrider.v1.Drafter, on bytes."""

    def __init__(self, link: WorkerLink, max_verifiers: int) -> None:
        self._link = link
        self._slots = max_verifiers

    def handlers(self) -> grpc.GenericRpcHandler:
        return grpc.method_handlers_generic_handler(
            SERVICE_NAME,
            {
                "Info": grpc.unary_unary_rpc_method_handler(self.info),
                "Session": grpc.stream_stream_rpc_method_handler(self.session),
            },
        )

    async def info(self, request: bytes, context: _Context) -> bytes:
        return await self._link.info()

    async def session(self, requests: Any, context: _Context) -> None:
        """Both directions of one stream; ends when either does."""
        if self._slots == 0:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "max_verifiers are connected already")
        self._slots -= 1
        number, stream = self._link.open_stream()
        reading = asyncio.create_task(self._read(number, stream, context))
        try:
            await self._write(stream, reading, context)
        finally:
            reading.cancel()
            self._link.close_stream(number)
            self._slots += 1

    async def _read(self, number: int, stream: _Stream, context: _Context) -> None:
        try:
            while True:
                await stream.credits.acquire()
                frame = await context.read()
                if not isinstance(frame, bytes):  # the verifier has closed its side
                    break
                await self._link.send_frame(number, frame)
        finally:
            stream.has_output.set()

    async def _write(self, stream: _Stream, reading: asyncio.Task[None], context: _Context) -> None:
        while True:
            await stream.has_output.wait()
            stream.has_output.clear()
            while stream.outbox:
                message = stream.outbox.popleft()
                if message.kind == Kind.END:
                    status, _, text = message.payload.decode().partition("\n")
                    await context.abort(grpc.StatusCode[status], text)
                await context.write(message.payload)
                for _ in range(message.num_frames):
                    stream.credits.release()
            if reading.done():
                return


async def serve_drafter(
    config: DrafterConfig, log_level: str, announce: Callable[[str], None], worker: Callable[..., None]
) -> int:
    """Run a drafter until SIGTERM or SIGINT.

    Args:
        config: what to draft with and where to listen.
        log_level: of the worker's log.
        announce: called once with the address, when ready.
        worker: `drafter_svc.worker.run_worker`, run in a process of its own.

    Returns:
        Exit status: 1 if the worker died.
    """
    server = build_server(ServerLimits(max_message_bytes=4 * config.max_frame_tokens + (1 << 22)))
    port = listen_tcp(server, config.host, config.port)  # before the seconds that the worker takes to start
    ours, theirs = socket.socketpair()
    process = multiprocessing.get_context("spawn").Process(
        target=worker, args=(theirs, config, log_level), name="outrider-draft-worker", daemon=True
    )
    process.start()
    theirs.close()
    reader, writer = await asyncio.open_connection(sock=ours)
    metrics_server: MetricsServer | None = None
    try:
        await _wait_until_ready(reader)
        host = f"[{config.host}]" if ":" in config.host else config.host
        link = WorkerLink(reader, writer)
        if config.metrics_port is not None:
            metrics = DrafterMetrics(link.counts, asyncio.get_running_loop())
            metrics_server = MetricsServer(config.metrics_host, config.metrics_port, metrics)
            logger.info("metrics", url=f"http://{metrics_server.address}/metrics")
        return await serve_link(server, link, config.max_verifiers, lambda: announce(f"{host}:{port}"))
    finally:
        if metrics_server is not None:
            await asyncio.to_thread(metrics_server.close)
        writer.close()
        # The loop closes the socket, which ends the worker: a join that holds the loop up would wait in vain.
        with contextlib.suppress(OSError):
            await writer.wait_closed()
        await asyncio.to_thread(process.join, _WORKER_STOP_S)
        if process.is_alive():
            process.kill()
            process.join()


async def serve_link(
    server: grpc.aio.Server, link: WorkerLink, max_verifiers: int, announce: Callable[[], None]
) -> int:
    """Serve until SIGTERM, SIGINT or the end of the worker, which is status 1."""
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped.set)
    server.add_generic_rpc_handlers((DrafterServicer(link, max_verifiers).handlers(),))
    health = HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    reflection.enable_server_reflection((SERVICE_NAME, "grpc.health.v1.Health", reflection.SERVICE_NAME), server)
    for name in ("", SERVICE_NAME):
        await health.set(name, health_pb2.HealthCheckResponse.SERVING)
    await server.start()
    announce()
    waits = {asyncio.create_task(link.run()), asyncio.create_task(stopped.wait())}
    _, left = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    for task in left:
        task.cancel()
    if not stopped.is_set():
        logger.error("the draft worker is gone")
    await health.enter_graceful_shutdown()
    await server.stop(_STOP_GRACE_S if stopped.is_set() else 0)
    return 0 if stopped.is_set() else 1


async def _wait_until_ready(reader: asyncio.StreamReader) -> None:
    buffer = bytearray()
    messages: list[Message] = []
    while not messages:
        data = await reader.read(1 << 16)
        if not data:
            raise EngineClosedError("the draft worker ended before it was ready; its log says why")
        buffer += data
        messages = unpack_all(buffer)
    if messages[0].kind == Kind.FAILED:
        raise WorkerStartError(messages[0].payload.decode().partition("\n")[2])


class WorkerStartError(OutriderError):
    """The worker cannot start; the message is its own."""

    status = "FAILED_PRECONDITION"
