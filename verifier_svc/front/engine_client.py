"""The front's end of the link to the engine process."""

from __future__ import annotations

import asyncio
import itertools
import socket
from collections.abc import Callable
from typing import Protocol

import msgspec

from common.errors import OutriderError, ResourceExhaustedError, UnavailableError
from common.logging import get_logger
from common.types import FinishReason, Request
from verifier_svc.front.metrics import ERROR, FrontMetrics, OutputTimes
from verifier_svc.messages import (
    AbortRequest,
    AddRequest,
    EngineLoad,
    FlushCache,
    FrameReader,
    FromEngine,
    OutputUpdate,
    Ready,
    Report,
    ServedFacts,
    Start,
    Stop,
    ToEngine,
    error_of,
    frame,
)

# Bytes of requests that wait for the engine to take them, beyond what the socket holds.
MAX_UNSENT_BYTES = 64 << 20

logger = get_logger(__name__)


class OutputSink(Protocol):
    """Who waits for an output. Called on the event loop; must not block."""

    def update(self, update: OutputUpdate) -> None: ...

    def fail(self, error: OutriderError) -> None:
        """Nothing follows."""
        ...


class EngineClient(asyncio.Protocol):
    """Sends requests to the engine process and gives what comes back to their sinks. One event loop owns it.

    Args:
        on_lost: called once when the engine is gone, with the reason.
        capacity: outputs at the same time; more are refused.
        max_unsent_bytes: requests are refused while more than this waits for the socket.
    """

    def __init__(
        self,
        on_lost: Callable[[OutriderError], None],
        capacity: int,
        max_unsent_bytes: int = MAX_UNSENT_BYTES,
    ) -> None:
        self._on_lost = on_lost
        self._max_unsent_bytes = max_unsent_bytes
        self._loop = asyncio.get_running_loop()
        self._ready: asyncio.Future[ServedFacts] = self._loop.create_future()
        self._transport: asyncio.Transport | None = None
        self._reader = FrameReader()
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(FromEngine)
        self._outbox: list[ToEngine] = []
        self._keys = itertools.count(1)
        self._sinks: dict[int, OutputSink] = {}
        self._flushes: dict[int, asyncio.Future[bool]] = {}
        self._capacity = capacity
        self.failure: OutriderError | None = None
        self.metrics = FrontMetrics()
        self._heard_s = self._loop.time()

    # -- life ----------------------------------------------------------------------------------------------------

    async def connect(self, sock: socket.socket, start: Start) -> None:
        """Take over a connected stream socket and tell the engine what to serve."""
        await self._loop.create_connection(lambda: self, sock=sock)
        self._send(start)

    async def ready(self) -> ServedFacts:
        """What the engine serves, once it has loaded. Raises what kept it from that."""
        return await asyncio.shield(self._ready)

    def stop(self) -> None:
        """Ask the engine to leave. Outputs that still run fail when it has."""
        self._send(Stop())

    # -- requests ------------------------------------------------------------------------------------------------

    @property
    def num_outputs(self) -> int:
        """Outputs that have been asked for and have not ended."""
        return len(self._sinks)

    @property
    def silence_s(self) -> float:
        """Seconds since the engine, which has work, was last heard of; 0 if it has none."""
        return self._loop.time() - self._heard_s if self._sinks else 0.0

    def check_room(self, count: int) -> None:
        """Raise unless `count` more outputs fit the engine's rows and queue.

        Raises:
            UnavailableError: the engine is gone.
            ResourceExhaustedError: they do not fit.
        """
        if self.failure is not None:
            raise self.failure
        if len(self._sinks) + count > self._capacity:
            raise ResourceExhaustedError(
                f"{len(self._sinks)} outputs are being made or wait: expected {count} more to fit {self._capacity}"
            )
        if self._transport is not None and self._transport.get_write_buffer_size() > self._max_unsent_bytes:
            raise ResourceExhaustedError("the engine has not taken the requests before this one yet")

    @property
    def load(self) -> EngineLoad:
        """Of the last report."""
        return self.metrics.load

    def add(self, request: Request, sink: OutputSink, times: OutputTimes) -> int:
        """Ask for an output; `sink` hears of it, and `times` are filled in. Returns the key that `abort` wants."""
        key = next(self._keys)
        if not self._sinks:
            self._heard_s = self._loop.time()  # it had nothing to say until now
        self._sinks[key] = sink
        self.metrics.added(key, times)
        self._send(AddRequest.of(key, request))
        return key

    def abort(self, key: int, reason: FinishReason = FinishReason.ABORT) -> None:
        """The sink hears nothing more. An output that has ended is none to abort."""
        if self._sinks.pop(key, None) is not None:
            self.metrics.finished(key, str(reason))
            self._send(AbortRequest(key))

    async def flush_cache(self) -> bool:
        """False: something runs, and the prefix cache is as it was."""
        if self.failure is not None:
            raise self.failure
        call = next(self._keys)
        future: asyncio.Future[bool] = self._loop.create_future()
        self._flushes[call] = future
        self._send(FlushCache(call))
        try:
            return await future
        finally:
            self._flushes.pop(call, None)

    def _send(self, message: ToEngine) -> None:
        """With all that follows in this turn of the loop as one frame."""
        if self.failure is not None:
            return
        if not self._outbox:
            self._loop.call_soon(self._flush)
        self._outbox.append(message)

    def _flush(self) -> None:
        assert self._transport is not None  # `connect` comes before everything
        if not self._transport.is_closing():
            self._transport.write(frame(self._encoder.encode(self._outbox)))
        self._outbox = []

    # -- asyncio.Protocol ----------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        # Nobody waits for the buffer to drain: `check_room` looks at its size.
        transport.set_write_buffer_limits(high=2 * self._max_unsent_bytes)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        try:
            for payload in self._reader.feed(data):
                self._take(self._decoder.decode(payload))
        except (msgspec.MsgspecError, OutriderError) as error:
            self._lose(UnavailableError(f"the engine sent what the front cannot read: {error}"))

    def connection_lost(self, exc: Exception | None) -> None:
        self._lose(UnavailableError("the engine process has ended"))

    def _take(self, message: FromEngine) -> None:
        if isinstance(message, Report):
            self._take_report(message)
        elif isinstance(message, Ready):
            if not self._ready.done():
                self._ready.set_result(message.served)
        else:
            self._lose(error_of(message.status, message.message))

    def _take_report(self, report: Report) -> None:
        self.metrics.report(report)
        self._heard_s = self._loop.time()
        sinks = self._sinks
        for update in report.updates:
            # An output that was aborted a moment ago may have one more on its way.
            sink = sinks.get(update.key) if update.finish_reason is None else sinks.pop(update.key, None)
            if sink is not None:
                sink.update(update)
        for rejected in report.rejected:
            sink = sinks.pop(rejected.key, None)
            if sink is not None:
                self.metrics.finished(rejected.key, ERROR)
                sink.fail(error_of(rejected.status, rejected.message))
        for result in report.flushed:
            future = self._flushes.get(result.call)
            if future is not None and not future.done():
                future.set_result(result.done)

    def _lose(self, error: OutriderError) -> None:
        if self.failure is not None:
            return
        self.failure = error
        if self._transport is not None:
            self._transport.close()
        if not self._ready.done():
            self._ready.set_exception(error)
            self._ready.exception()  # seen, also where nobody waits for it any more
        sinks, self._sinks = self._sinks, {}
        for key, sink in sinks.items():
            self.metrics.finished(key, ERROR)
            sink.fail(UnavailableError(str(error)))
        for future in self._flushes.values():
            if not future.done():
                future.set_exception(UnavailableError(str(error)))
        self._on_lost(error)
