"""Streams whose frames go through shared memory. The gRPC stream stays open, and says that both ends are alive.

The drafter makes the files and offers them in its hello; a verifier that can open them proves it by sending their
secret back through the ring. Until then, and for good if that never comes, the stream's frames go over gRPC.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from common.draft_exchange import VerifierHello
from common.errors import OutriderError
from common.logging import get_logger
from common.shm.channel import SharedMemoryError, ShmChannel, create_channel
from common.shm.host import boot_id
from common.shm.ring import RingCorruptError
from common.shm.run_files import RunFiles
from drafter_svc.worker_link import Kind, Message

_MIN_RING_BYTES = 1 << 20
_MAX_RING_BYTES = 32 << 20

logger = get_logger(__name__)


@dataclass(slots=True)
class _Link:
    channel: ShmChannel
    is_attached: bool = False


class SharedMemoryLinks:
    """The channels of one drafter process.

    Args:
        directory: where the files are made, the same for drafter and verifier.

    Raises:
        SharedMemoryError: the directory cannot be used.
    """

    def __init__(self, directory: Path) -> None:
        try:
            self._files = RunFiles(directory)
        except OSError as error:
            raise SharedMemoryError(f"{directory}: {error}") from error
        if self._files.num_removed:
            logger.info("removed files of dead runs", directory=str(directory), num_files=self._files.num_removed)
        self._host = boot_id()
        self._links: dict[int, _Link] = {}
        self.num_dropped_frames = 0

    @property
    def channels(self) -> list[ShmChannel]:
        """To be polled."""
        return [link.channel for link in self._links.values()]

    def offer(self, stream: int, hello: VerifierHello) -> str:
        """The name of new files for this stream; empty if the verifier has no use for them, or there can be none."""
        if not hello.shared_memory_host or hello.shared_memory_host != self._host:
            return ""
        # Twice the longest row, or one update of all rows; replies of a few steps.
        up_bytes = max(_MIN_RING_BYTES, 2 * 4 * hello.max_model_len + 256 * hello.max_rows)
        down_bytes = max(_MIN_RING_BYTES, 4 * hello.max_rows * hello.branch_budget * (20 + 4 * hello.branch_len))
        try:
            if max(up_bytes, down_bytes) > _MAX_RING_BYTES:
                raise SharedMemoryError(f"rings of {up_bytes} and {down_bytes}: expected at most {_MAX_RING_BYTES}")
            path = self._files.new_path()
            self._links[stream] = _Link(create_channel(path, up_bytes, down_bytes))
        except SharedMemoryError as error:
            logger.warning("no shared memory for a verifier", verifier=hello.verifier_id, reason=str(error))
            return ""
        return path.name

    def receive(self) -> list[Message]:
        """Frames of all streams; a stream whose ring is damaged says so in a message of its own."""
        messages: list[Message] = []
        for stream, link in list(self._links.items()):
            try:
                frames = [frame.payload for frame in link.channel.receive()]
                if frames and not link.is_attached:
                    self._attach(link, frames.pop(0))
            except OutriderError as error:
                self.close_stream(stream)
                messages.append(Message(Kind.BROKEN, stream, 0, str(error).encode()))
            else:
                messages += [Message(Kind.FRAME, stream, 0, frame) for frame in frames]
        return messages

    def send(self, stream: int, frame: bytes) -> bool:
        """False: the stream's frames go over gRPC. One that finds no room is dropped: the verifier does not read, and
        a claim that is not heard is no claim."""
        link = self._links.get(stream)
        if link is None or not link.is_attached:
            return False
        try:
            self.num_dropped_frames += not link.channel.send(frame)
        except RingCorruptError:  # the next `receive` says so
            self.num_dropped_frames += 1
        return True

    def close_stream(self, stream: int) -> None:
        """The stream has ended. A second call changes nothing."""
        link = self._links.pop(stream, None)
        if link is not None:
            link.channel.close()

    def close(self) -> None:
        for stream in list(self._links):
            self.close_stream(stream)

    def _attach(self, link: _Link, probe: bytes) -> None:
        if probe != link.channel.secret:
            raise RingCorruptError("probe: expected the secret of the files")
        link.is_attached = True
        link.channel.send(probe)
        link.channel.unlink()  # both have them open, and nothing is left behind whoever dies
