"""The verifier's end of shared memory with a drafter: whether a session uses it, and its frames."""

from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path

from common.draft_exchange import DrafterHello
from common.shm.channel import SharedMemoryError, ShmChannel, open_channel
from common.shm.ring import RingFrame
from common.shm.run_files import is_run_file

PROBE_TIMEOUT_S = 1.0
"""The drafter may be busy for another verifier."""
MAX_WAITING_FRAMES = 256
MAX_WAITING_BYTES = 64 << 20
"""What waits for room in the ring of a drafter that does not read; one frame more ends the session."""


@dataclass(frozen=True, slots=True)
class SharedMemoryOptions:
    """When shared memory is used, and where."""

    directory: Path
    is_required: bool = False
    """Rather no session than one over gRPC."""


class SharedMemoryFrames:
    """Frames of one session. Of its two threads one sends and receives, the other one closes.

    Args:
        channel: opened, and answered by the drafter; closed with this object.
    """

    def __init__(self, channel: ShmChannel) -> None:
        self._channel = channel
        self._lock = threading.Lock()
        self._is_closed = False
        self._waiting: deque[bytes] = deque()
        self._num_waiting_bytes = 0
        # A frame never fills more than half of the ring: one is written while the one before is read.
        self.max_frame_tokens = channel.max_frame_bytes // 2 // 4

    def send(self, frames: list[bytes]) -> bool:
        """Never waits. False: the drafter is too far behind, or gone.

        Raises:
            RingCorruptError: the memory was damaged.
        """
        with self._lock:
            if self._is_closed or any(len(frame) > self._channel.max_frame_bytes for frame in frames):
                return False
            self._waiting.extend(frames)
            self._num_waiting_bytes += sum(map(len, frames))
            self._flush()
            return len(self._waiting) <= MAX_WAITING_FRAMES and self._num_waiting_bytes <= MAX_WAITING_BYTES

    def receive(self, timeout_s: float) -> list[RingFrame]:
        """Frames that have come in; waits for one if there is none.

        Raises:
            RingCorruptError: the memory was damaged.
        """
        with self._lock:
            if self._is_closed:
                return []
            self._flush()
            return self._channel.receive(timeout_s)

    def close(self) -> None:
        """Let go of the memory, at the end of a `receive` that waits."""
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                self._channel.close()

    def _flush(self) -> None:
        """Write what there is room for."""
        while self._waiting and self._channel.send(self._waiting[0]):
            self._num_waiting_bytes -= len(self._waiting.popleft())


def attach(options: SharedMemoryOptions, hello: DrafterHello) -> SharedMemoryFrames:
    """Take up what a drafter offers: open its files, and see whether it answers through them.

    Raises:
        SharedMemoryError: it offers nothing, or it does not work; says why.
    """
    name = hello.shared_memory_name
    if not name:
        raise SharedMemoryError("the drafter offers none: it is on another host, or has it switched off")
    if not is_run_file(name):
        raise SharedMemoryError(f"shared_memory_name: expected the name of a file, found {name!r}")
    channel = open_channel(options.directory / name)
    try:
        end = time.monotonic() + PROBE_TIMEOUT_S
        channel.send(channel.secret)
        while not (frames := channel.receive(max(0.0, end - time.monotonic()))):
            if time.monotonic() >= end:
                raise SharedMemoryError(f"the drafter has not answered through {name} within {PROBE_TIMEOUT_S:g} s")
        if [frame.payload for frame in frames] != [channel.secret]:
            raise SharedMemoryError(f"the drafter has answered through {name}, but with something else")
    except BaseException:
        channel.close()
        raise
    return SharedMemoryFrames(channel)
