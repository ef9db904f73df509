"""The engine's end of the link to the front: never blocks a step, never holds more than the requests themselves."""

from __future__ import annotations

import select
import socket

import msgspec

from verifier_svc.messages import (
    Admitted,
    EngineLoad,
    ExchangeCounts,
    Failed,
    FlushResult,
    FrameReader,
    OutputUpdate,
    Ready,
    Rejected,
    ReplayCounts,
    Report,
    ToEngine,
    frame,
)

_RECEIVE_BYTES = 1 << 18

# Outputs with an update that waits. A front that sends work and reads no results is not listened to beyond this.
MAX_WAITING_UPDATES = 8192


class FrontGoneError(Exception):
    """The front has closed its end, or died."""


class EngineLink:
    """Messages from and to the front over a stream socket. One thread owns it.

    A report is packed when the one before it has left. Until then the updates of each output join into one, so what
    waits is bounded by the outputs themselves.

    Args:
        sock: connected; made non-blocking here.
        max_waiting_updates: outputs whose updates may wait; at the bound the inbox is not read.
    """

    def __init__(self, sock: socket.socket, max_waiting_updates: int = MAX_WAITING_UPDATES) -> None:
        sock.setblocking(False)
        self._socket = sock
        self._reader = FrameReader()
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(list[ToEngine])
        self._max_waiting_updates = max_waiting_updates
        self._unsent = bytearray()
        self._updates: dict[int, OutputUpdate] = {}
        self._rejected: list[Rejected] = []
        self._flushed: list[FlushResult] = []
        self._admitted: list[Admitted] = []
        self._exchange: ExchangeCounts | None = None
        self._replays: ReplayCounts | None = None
        self._load = EngineLoad()
        self._has_report = False
        self.num_merged = 0
        """Updates that joined another one because the front was slow."""

    @property
    def num_waiting_updates(self) -> int:
        return len(self._updates)

    @property
    def num_unsent_bytes(self) -> int:
        return len(self._unsent)

    def receive(self, timeout_s: float | None) -> list[ToEngine]:
        """Messages that have arrived.

        Args:
            timeout_s: how long to wait for the first one; 0: not at all, None: for ever. What waits to be sent goes
                out meanwhile.

        Raises:
            FrontGoneError: the front is gone.
        """
        if len(self._updates) + len(self._rejected) >= self._max_waiting_updates:
            self._wait_writable(timeout_s)
            return []
        if timeout_s != 0:
            self._wait(timeout_s)
        messages: list[ToEngine] = []
        while True:
            try:
                data = self._socket.recv(_RECEIVE_BYTES)
            except BlockingIOError:
                return messages
            except OSError as error:
                raise FrontGoneError from error
            if not data:
                raise FrontGoneError
            for payload in self._reader.feed(data):
                messages += self._decoder.decode(payload)
            if len(data) < _RECEIVE_BYTES:
                return messages

    def report(
        self,
        load: EngineLoad,
        updates: list[OutputUpdate],
        rejected: list[Rejected] | None = None,
        flushed: list[FlushResult] | None = None,
        admitted: list[Admitted] | None = None,
        exchange: ExchangeCounts | None = None,
        replays: ReplayCounts | None = None,
    ) -> None:
        """Tell the front, now if the socket takes it and later if not; never waits."""
        for update in updates:
            waiting = self._updates.get(update.key)
            if waiting is None:
                self._updates[update.key] = update
            else:
                waiting.merge(update)
                self.num_merged += 1
        self._rejected += rejected or ()
        self._flushed += flushed or ()
        self._admitted += admitted or ()
        self._exchange = exchange or self._exchange
        self._replays = replays or self._replays
        self._load = load
        self._has_report = True
        self.flush()

    def flush(self) -> bool:
        """Send what the socket takes. True: nothing waits any more."""
        if not self._send():
            return False
        while self._has_report:
            self._pack()
            if not self._send():
                return False
        return True

    def forget(self, key: int) -> None:
        """Drop what waits of an output that was aborted."""
        self._updates.pop(key, None)

    def send_blocking(self, message: Ready | Failed) -> None:
        """One message, and all before it, out of the door: for the start and the end of the process."""
        self._unsent += frame(self._encoder.encode(message))
        while not self._send():
            select.select([], [self._socket], [], 1.0)

    def close(self) -> None:
        self._socket.close()

    def _pack(self) -> None:
        updates = list(self._updates.values())
        report = Report(
            self._load, updates, self._rejected, self._flushed, self._admitted, self._exchange, self._replays
        )
        self._unsent += frame(self._encoder.encode(report))
        self._updates = {}
        self._rejected = []
        self._flushed = []
        self._admitted = []
        self._exchange = None
        self._replays = None
        self._has_report = False

    def _send(self) -> bool:
        """True: all that was packed has left."""
        unsent = self._unsent
        while unsent:
            try:
                sent = self._socket.send(unsent)
            except BlockingIOError:
                return False
            except OSError as error:
                raise FrontGoneError from error
            del unsent[:sent]
        return True

    def _wait(self, timeout_s: float | None) -> None:
        """Until something arrives; sends meanwhile."""
        while True:
            wants_write = [self._socket] if self._unsent or self._has_report else []
            readable, writable, _ = select.select([self._socket], wants_write, [], timeout_s)
            if readable or not writable:
                return
            self.flush()

    def _wait_writable(self, timeout_s: float | None) -> None:
        if timeout_s != 0:
            select.select([], [self._socket], [], timeout_s)
        self.flush()
