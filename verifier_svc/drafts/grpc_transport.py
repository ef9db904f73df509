"""A drafter behind gRPC: one thread keeps a bidirectional stream open, and opens the next one when it breaks.
Frames to and from a drafter on the same host go through shared memory; the stream then says that both are alive.

The stream is a synchronous one of grpc. An asyncio loop in a thread had the same median (185 us for 64 rows, there and
back) and a 99th percentile two to five times as long.
"""

from __future__ import annotations

import contextlib
import queue
import random
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import grpc

from common.draft_codec import DraftCodecError, decode_drafter_frame, encode_update, encode_verifier_hello
from common.draft_exchange import DrafterHello, DraftReply, SessionUpdate, VerifierHello
from common.logging import get_logger
from common.shm.channel import SharedMemoryError
from common.shm.host import boot_id
from common.shm.ring import RingCorruptError
from common.shm.run_files import remove_stale_files
from verifier_svc.drafts.shared_memory import SharedMemoryFrames, SharedMemoryOptions, attach
from verifier_svc.drafts.transport import Arrival, TransportSession

METHOD = "/outrider.v1.Drafter/Session"
MAX_WAITING_FRAMES = 256
MAX_WAITING_BYTES = 64 << 20
"""What waits for a drafter that does not read; one frame more ends the session."""
MAX_WAITING_REPLIES = 4096
HELLO_TIMEOUT_S = 5.0
MIN_BACKOFF_S = 0.05
MAX_BACKOFF_S = 5.0

logger = get_logger(__name__)


class _Outbox:
    """Frames of one session that wait to be written."""

    def __init__(self) -> None:
        self._frames: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        # Each is written by one thread: what waits is the difference.
        self._bytes_in = 0
        self._bytes_out = 0

    def put(self, frame: bytes) -> bool:
        """False: too much is waiting already."""
        waiting = self._bytes_in - self._bytes_out
        if self._frames.qsize() >= MAX_WAITING_FRAMES or (waiting and waiting + len(frame) > MAX_WAITING_BYTES):
            return False
        self._bytes_in += len(frame)
        self._frames.put(frame)
        return True

    def close(self) -> None:
        self._frames.put(None)

    def __iter__(self) -> Iterator[bytes]:
        """Called by grpc's own thread."""
        while (frame := self._frames.get()) is not None:
            self._bytes_out += len(frame)
            yield frame


class GrpcTransport:
    """Keeps a session with the drafter at an address.

    Args:
        address: HOST:PORT; the name is resolved anew for every session.
        hello: how the verifier introduces itself.
        shared_memory: how frames of a drafter on this host get around gRPC; None: they do not.
    """

    def __init__(self, address: str, hello: VerifierHello, shared_memory: SharedMemoryOptions | None = None) -> None:
        self._address = address
        self._hello = hello if shared_memory is None else replace(hello, shared_memory_host=boot_id())
        self._max_reply_tokens = hello.branch_len * hello.branch_budget * hello.max_rows
        self._options = shared_memory
        self._shared_memory: SharedMemoryFrames | None = None  # of the session of now, if it has one
        self._session: TransportSession | None = None
        self._num_sessions = 0
        self._next_sequence = 1  # goes on from session to session
        self._outbox: _Outbox | None = None
        self._call: Any = None
        self._arrivals: queue.SimpleQueue[Arrival] = queue.SimpleQueue()
        self._closed = threading.Event()
        self.last_error = ""
        """Why the last session ended, or could not begin."""
        self.num_malformed_frames = 0
        self._thread = threading.Thread(target=self._run, name=f"outrider-draft-{address}", daemon=True)
        self._thread.start()

    @property
    def kind(self) -> str:
        return "grpc" if self._shared_memory is None else "shared-memory"

    @property
    def address(self) -> str:
        return self._address

    @property
    def session(self) -> TransportSession | None:
        return self._session

    def send(self, update: SessionUpdate) -> int | None:
        """See `DraftTransport.send`."""
        session, outbox = self._session, self._outbox
        if session is None or outbox is None:
            return None
        shared_memory, max_frame_tokens = self._shared_memory, session.drafter.limits.max_frame_tokens
        if shared_memory is not None:
            max_frame_tokens = min(max_frame_tokens, shared_memory.max_frame_tokens)
        frames = encode_update(update, self._next_sequence, max_frame_tokens)
        self._next_sequence += len(frames)
        try:
            is_sent = all(map(outbox.put, frames)) if shared_memory is None else shared_memory.send(frames)
        except RingCorruptError as error:
            self._refuse_shared_memory(error)
            return None
        if is_sent:
            return self._next_sequence - 1
        logger.warning("drafter does not keep up, starting anew", drafter=self._address)
        self._end_session()
        return None

    def poll(self, timeout_s: float) -> list[Arrival]:
        """See `DraftTransport.poll`."""
        arrivals: list[Arrival] = []
        shared_memory, session = self._shared_memory, self._session
        if shared_memory is not None and session is not None:
            try:
                for written_ns, frame in shared_memory.receive(timeout_s):
                    if (reply := self._decode(frame)) is not None:
                        arrivals.append(Arrival(session.number, min(written_ns * 1e-9, time.monotonic()), reply))
            except RingCorruptError as error:
                self._refuse_shared_memory(error)
            timeout_s = 0  # what came over gRPC is of the session before
        try:
            if timeout_s > 0:
                arrivals.append(self._arrivals.get(timeout=timeout_s))
            while True:
                arrivals.append(self._arrivals.get_nowait())
        except queue.Empty:
            return arrivals

    def close(self) -> None:
        """See `DraftTransport.close`."""
        self._closed.set()
        self._end_session()
        self._thread.join(timeout=HELLO_TIMEOUT_S)

    def _refuse_shared_memory(self, error: RingCorruptError) -> None:
        self.num_malformed_frames += 1
        logger.warning("shared memory is damaged, starting anew", drafter=self._address, reason=str(error))
        self._end_session()

    def _end_session(self) -> None:
        self._session = None
        call, outbox = self._call, self._outbox
        if outbox is not None:
            outbox.close()
        if call is not None:
            call.cancel()

    def _run(self) -> None:
        backoff = MIN_BACKOFF_S
        while not self._closed.is_set():
            num_sessions = self._num_sessions
            try:
                self._run_session()
                reason = "the drafter ended the stream"
            except grpc.RpcError as error:
                code: Any = error.code() if isinstance(error, grpc.Call) else None
                details = error.details() if isinstance(error, grpc.Call) else repr(error)
                reason = f"{getattr(code, 'name', 'UNKNOWN')}: {details}"
            except DraftCodecError as error:
                self.num_malformed_frames += 1
                reason = str(error)
            except SharedMemoryError as error:
                reason = f"shared memory is wanted: {error}"
            except Exception:  # the thread must live: without it drafts never come back
                logger.exception("draft transport failed", drafter=self._address)
                reason = "a bug; see the log"
            if self._closed.is_set():
                break
            had_session = self._num_sessions > num_sessions
            backoff = MIN_BACKOFF_S if had_session else min(backoff * 2, MAX_BACKOFF_S)
            if had_session or reason != self.last_error:  # once, and not at every try
                logger.warning("drafter is not there", drafter=self._address, reason=reason)
            self.last_error = reason
            if self._options is not None:
                with contextlib.suppress(OSError):  # of a drafter that was killed
                    remove_stale_files(self._options.directory)
            # Many verifiers that lost the same drafter do not come back all at once.
            self._closed.wait(backoff * random.uniform(0.5, 1.5))

    def _run_session(self) -> None:
        """One stream, from its hello to its end."""
        outbox = _Outbox()
        outbox.put(encode_verifier_hello(self._hello))
        channel = grpc.insecure_channel(self._address, options=_CHANNEL_OPTIONS)
        timer: threading.Timer | None = None
        try:
            call: Any = channel.stream_stream(METHOD)(iter(outbox))
            self._outbox, self._call = outbox, call
            if self._closed.is_set():
                return
            timer = threading.Timer(HELLO_TIMEOUT_S, call.cancel)
            timer.daemon = True
            timer.start()
            frames = iter(call)
            first = next(frames, None)
            timer.cancel()
            if first is None:
                return
            hello = decode_drafter_frame(first, self._max_reply_tokens)
            if not isinstance(hello, DrafterHello):
                raise DraftCodecError("hello_ack: expected it in the first frame")
            if hello.protocol_version != self._hello.protocol_version:
                versions = f"{self._hello.protocol_version}, the drafter {hello.protocol_version}"
                raise DraftCodecError(f"protocol version: the verifier speaks {versions}")
            self._shared_memory = self._attach(hello)
            self._num_sessions += 1
            number = self._num_sessions
            logger.info(
                "drafter is there",
                drafter=self._address,
                method=hello.method,
                incarnation=hello.incarnation_id,
                transport=self.kind,
            )
            self._session = TransportSession(number, hello)
            self._receive(frames, number)
        finally:
            self._session = None
            if (shared_memory := self._shared_memory) is not None:
                self._shared_memory = None
                shared_memory.close()
            if timer is not None:
                timer.cancel()
            outbox.close()
            channel.close()

    def _receive(self, frames: Iterator[bytes], number: int) -> None:
        for data in frames:
            reply = self._decode(data)
            if reply is not None and self._arrivals.qsize() < MAX_WAITING_REPLIES:
                self._arrivals.put(Arrival(number, time.monotonic(), reply))

    def _decode(self, data: bytes) -> DraftReply | None:
        """The reply in a frame; None if it cannot be read."""
        try:
            content = decode_drafter_frame(data, self._max_reply_tokens)
            if isinstance(content, DraftReply):
                return content
            raise DraftCodecError("hello_ack: expected it in the first frame only")
        except DraftCodecError as error:
            # Claims that cannot be read are claims that nobody makes: the rest of the stream may be fine.
            self.num_malformed_frames += 1
            if self.num_malformed_frames == 1:
                logger.warning("malformed frame from a drafter", drafter=self._address, reason=str(error))
            return None

    def _attach(self, hello: DrafterHello) -> SharedMemoryFrames | None:
        """Shared memory with the drafter, if it is wanted and works; else gRPC carries the frames.

        Raises:
            SharedMemoryError: it does not work, and nothing else will do.
        """
        if self._options is None:
            return None
        try:
            return attach(self._options, hello)
        except (SharedMemoryError, RingCorruptError) as error:
            if self._options.is_required:
                raise SharedMemoryError(str(error)) from error
            logger.warning("no shared memory with a drafter, using gRPC", drafter=self._address, reason=str(error))
            return None


_CHANNEL_OPTIONS = [
    # A channel of its own: a shared one would remember the old address and the old backoff.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.max_receive_message_length", 64 << 20),
    ("grpc.max_send_message_length", 128 << 20),
    # A drafter that vanished without a word is noticed; the exchange has stopped waiting for it long before.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.enable_http_proxy", 0),
]
