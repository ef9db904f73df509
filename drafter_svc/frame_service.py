"""Frames in, frames out: what stands between the streams of the verifiers and the core."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import msgspec

from common.draft_codec import DraftCodecError, decode_verifier_frame, encode_drafter_hello, encode_info, encode_reply
from common.draft_exchange import NO_BRANCHES, DraftReply, RowError, VerifierHello
from common.errors import OutriderError
from common.histogram import Histogram
from common.logging import get_logger
from common.shm.host import host_id
from common.shm.ring import RingCorruptError
from drafter_svc.core import DrafterCore
from drafter_svc.metrics import METHOD_BOUNDS, WorkerCounts
from drafter_svc.sessions import VerifierSessions
from drafter_svc.shared_memory import SharedMemoryLinks
from drafter_svc.worker_link import Kind, Message, pack

logger = get_logger(__name__)

_WINDOW = 256

_MAX_LOGGED_ERRORS = 8
"""Of one stream and answer: one frame of a hostile peer can hold 65,536, of which each record takes 50 us and 200 B."""


@dataclass(slots=True)
class _Stream:
    """One verifier, and which of its last frames have been seen: bit i is frame `newest` - i."""

    sessions: VerifierSessions
    newest: int = 0
    seen: int = 1

    def is_new(self, sequence: int) -> bool:
        """False: the frame has come before, or is too old to tell."""
        ahead = sequence - self.newest
        if ahead > 0:
            self.seen = ((self.seen << ahead) & ((1 << _WINDOW) - 1) | 1) if ahead < _WINDOW else 1
            self.newest = sequence
            return True
        if -ahead >= _WINDOW or self.seen >> -ahead & 1:
            return False
        self.seen |= 1 << -ahead
        return True


@dataclass(slots=True)
class _Pending:
    """What one stream is owed for the messages at hand."""

    num_frames: int = 0
    errors: list[RowError] = field(default_factory=list[RowError])


class FrameService:
    """Serves the streams of all verifiers.

    Args:
        core: the drafter.
        shared_memory: for streams that need not go over gRPC; None: all do.
    """

    def __init__(self, core: DrafterCore, shared_memory: SharedMemoryLinks | None = None) -> None:
        self._core = core
        self._shared_memory = shared_memory
        self._streams: dict[int, _Stream] = {}
        self._refused: set[int] = set()  # streams that were told to end, and have not ended yet
        self._max_frame_tokens = core.hello.limits.max_frame_tokens
        self._host_id = host_id()
        self.num_frames = 0
        self.num_malformed_frames = 0
        self.num_repeated_frames = 0
        self.num_branches = 0
        self.num_draft_tokens = 0
        self.method_times = Histogram(METHOD_BOUNDS)

    def counts(self) -> WorkerCounts:
        """For whoever scrapes metrics."""
        load, sessions = self._core.load(), self._core.stats
        return WorkerCounts(
            method=self._core.hello.method,
            num_rows=load.num_rows,
            max_rows=load.max_rows,
            num_verifiers=load.num_streams,
            num_opened=sessions.num_opened,
            num_closed=sessions.num_closed,
            num_stale=sessions.num_stale,
            num_duplicates=sessions.num_duplicates,
            num_row_errors=sessions.num_row_errors,
            num_frames=self.num_frames,
            num_malformed_frames=self.num_malformed_frames,
            num_repeated_frames=self.num_repeated_frames,
            num_branches=self.num_branches,
            num_draft_tokens=self.num_draft_tokens,
            method_counts=self.method_times.counts,
            method_total_s=self.method_times.total,
        )

    def handle(self, messages: Sequence[Message]) -> list[bytes]:
        """Take in messages, draft once for all of them, and return what to send.

        Several frames of one stream get one answer: a verifier that is ahead wants the newest branches only.
        """
        out: list[bytes] = []
        pending: dict[int, _Pending] = {}
        for message in messages:
            if message.kind == Kind.FRAME:
                self._take_frame(message, pending, out)
            elif message.kind == Kind.BROKEN:
                self._refuse(message.stream, RingCorruptError(message.payload.decode()), pending, out)
            elif message.kind == Kind.END:
                self._end(message.stream)
                pending.pop(message.stream, None)
            elif message.kind == Kind.COUNTS:
                out.append(pack(Kind.COUNTS, message.stream, msgspec.msgpack.encode(self.counts())))
            elif message.kind == Kind.INFO:
                info = encode_info(self._core.hello, self._core.load(len(pending)), self._host_id)
                out.append(pack(Kind.INFO, message.stream, info))
        if pending:
            self._answer(pending, out)
        return out

    def _take_frame(self, message: Message, pending: dict[int, _Pending], out: list[bytes]) -> None:
        self.num_frames += 1
        if message.stream in self._refused:
            return
        try:
            sequence, content = decode_verifier_frame(message.payload, self._max_frame_tokens)
            stream = self._streams.get(message.stream)
            if isinstance(content, VerifierHello):
                if stream is not None:
                    raise DraftCodecError("hello: expected it in the first frame only")
                self._streams[message.stream] = _Stream(self._core.connect(content))
                logger.info("verifier connected", verifier=content.verifier_id, stream=message.stream)
                hello = self._core.hello
                if self._shared_memory is not None:
                    hello = replace(hello, shared_memory_name=self._shared_memory.offer(message.stream, content))
                out.append(pack(Kind.FRAME, message.stream, encode_drafter_hello(hello), 1))
                return
            if stream is None:
                raise DraftCodecError("hello: expected it in the first frame, found row changes")
        except OutriderError as error:
            self._refuse(message.stream, error, pending, out)
            return
        owed = pending.setdefault(message.stream, _Pending())
        owed.num_frames += 1
        if stream.is_new(sequence):
            owed.errors += stream.sessions.apply(content)
            for opened in content.opened:
                logger.debug("row opened", request_id=opened.request_id, stream=message.stream, row=opened.row)
        else:
            self.num_repeated_frames += 1

    def _refuse(self, stream: int, error: OutriderError, pending: dict[int, _Pending], out: list[bytes]) -> None:
        """End a stream that cannot be understood."""
        self.num_malformed_frames += isinstance(error, DraftCodecError | RingCorruptError)
        logger.warning("stream refused", stream=stream, status=error.status, reason=str(error))
        self._end(stream)
        self._refused.add(stream)
        pending.pop(stream, None)
        out.append(pack(Kind.END, stream, f"{error.status}\n{error}".encode()))

    def _answer(self, pending: dict[int, _Pending], out: list[bytes]) -> None:
        start_s = time.perf_counter()
        try:
            batches = self._core.draft([self._streams[stream].sessions for stream in pending])
        except Exception:  # a bug of a method costs drafts, not the verifiers that wait for an answer
            logger.exception("the draft method failed")
            batches = [NO_BRANCHES] * len(pending)
        self.method_times.observe(time.perf_counter() - start_s)
        self.num_branches += sum(map(len, batches))
        self.num_draft_tokens += sum(len(branches.token_ids) for branches in batches)
        load = self._core.load()
        for (stream, owed), branches in zip(pending.items(), batches, strict=True):
            for error in owed.errors[:_MAX_LOGGED_ERRORS]:
                logger.info("row error", stream=stream, row=error.row, reason=error.reason)
            if len(owed.errors) > _MAX_LOGGED_ERRORS:
                logger.info("row errors", stream=stream, count=len(owed.errors))
            reply = DraftReply(self._streams[stream].newest, branches, owed.errors)
            frame = encode_reply(reply, load)
            if self._shared_memory is None or not self._shared_memory.send(stream, frame):
                out.append(pack(Kind.FRAME, stream, frame, owed.num_frames))

    def _end(self, stream: int) -> None:
        self._refused.discard(stream)
        if self._shared_memory is not None:
            self._shared_memory.close_stream(stream)
        ended = self._streams.pop(stream, None)
        if ended is not None:
            sessions = ended.sessions
            logger.info("verifier gone", verifier=sessions.hello.verifier_id, stream=stream, num_rows=len(sessions))
            self._core.disconnect(sessions)
