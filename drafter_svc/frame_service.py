"""Frames in, frames out: what stands between the streams of the verifiers and the core."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from common.draft_codec import DraftCodecError, decode_verifier_frame, encode_drafter_hello, encode_info, encode_reply
from common.draft_exchange import NO_BRANCHES, DraftReply, RowError, VerifierHello
from common.errors import OutriderError
from common.logging import get_logger
from drafter_svc.core import DrafterCore
from drafter_svc.sessions import VerifierSessions
from drafter_svc.worker_link import Kind, Message, pack

logger = get_logger(__name__)


_WINDOW = 256


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
    """

    def __init__(self, core: DrafterCore) -> None:
        self._core = core
        self._streams: dict[int, _Stream] = {}
        self._refused: set[int] = set()  # streams that were told to end, and have not ended yet
        self._max_frame_tokens = core.hello.limits.max_frame_tokens
        self._host_id = host_id()
        self.num_malformed_frames = 0
        self.num_repeated_frames = 0

    def handle(self, messages: Sequence[Message]) -> list[bytes]:
        """Take in messages, draft once for all of them, and return what to send.

        Several frames of one stream get one answer: a verifier that is ahead wants the newest branches only.
        """
        out: list[bytes] = []
        pending: dict[int, _Pending] = {}
        for message in messages:
            if message.kind == Kind.FRAME:
                self._take_frame(message, pending, out)
            elif message.kind == Kind.END:
                self._end(message.stream)
                pending.pop(message.stream, None)
            elif message.kind == Kind.INFO:
                info = encode_info(self._core.hello, self._core.load(len(pending)), self._host_id)
                out.append(pack(Kind.INFO, message.stream, info))
        if pending:
            self._answer(pending, out)
        return out

    def _take_frame(self, message: Message, pending: dict[int, _Pending], out: list[bytes]) -> None:
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
                out.append(pack(Kind.FRAME, message.stream, encode_drafter_hello(self._core.hello), 1))
                return
            if stream is None:
                raise DraftCodecError("hello: expected it in the first frame, found row changes")
        except OutriderError as error:
            self.num_malformed_frames += isinstance(error, DraftCodecError)
            logger.warning("stream refused", stream=message.stream, status=error.status, reason=str(error))
            self._end(message.stream)
            self._refused.add(message.stream)
            pending.pop(message.stream, None)
            out.append(pack(Kind.END, message.stream, f"{error.status}\n{error}".encode()))
            return
        owed = pending.setdefault(message.stream, _Pending())
        owed.num_frames += 1
        if stream.is_new(sequence):
            owed.errors += stream.sessions.apply(content)
        else:
            self.num_repeated_frames += 1

    def _answer(self, pending: dict[int, _Pending], out: list[bytes]) -> None:
        try:
            batches = self._core.draft([self._streams[stream].sessions for stream in pending])
        except Exception:  # a bug of a method costs drafts, not the verifiers that wait for an answer
            logger.exception("the draft method failed")
            batches = [NO_BRANCHES] * len(pending)
        load = self._core.load()
        for (stream, owed), branches in zip(pending.items(), batches, strict=True):
            for error in owed.errors:
                logger.info("row error", stream=stream, row=error.row, reason=error.reason)
            reply = DraftReply(self._streams[stream].newest, branches, owed.errors)
            out.append(pack(Kind.FRAME, stream, encode_reply(reply, load), owed.num_frames))

    def _end(self, stream: int) -> None:
        self._refused.discard(stream)
        ended = self._streams.pop(stream, None)
        if ended is not None:
            sessions = ended.sessions
            logger.info("verifier gone", verifier=sessions.hello.verifier_id, stream=stream, num_rows=len(sessions))
            self._core.disconnect(sessions)


def host_id() -> str:
    """Name and boot id of this machine: the same value is the same machine."""
    try:
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        boot_id = ""
    return f"{socket.gethostname()}/{boot_id}"
