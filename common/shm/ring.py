"""A ring of frames in shared memory: one process writes, another one reads, and neither ever waits for the other.

Both counters count bytes from the start and never wrap; each is written by one side alone, and each side keeps its own
copy, so that whatever the other side does to the memory shows as an error here and as nothing worse. A frame is
published by the one store that moves the head behind it: a writer that is killed before has written nothing.

A frame is a header and its bytes, and may go over the end of the ring. The checksum begins with the frame's position,
so that bytes left over from an earlier round are no frame. On processors that reorder stores a frame can be visible
later than the head: a reader whose checksum does not match looks again for a millisecond before it says so.
"""

from __future__ import annotations

import struct
import time
import zlib
from typing import NamedTuple

from common.errors import OutriderError

_HEADER = struct.Struct("=IIq")  # bytes of the frame, checksum, when it was written
_ALIGNMENT = 8
_HEAD = 0  # words of the counters
_TAIL = 8  # on another cache line: each line has one writer
_SETTLE_S = 1e-3

COUNTER_BYTES = 128
"""Of the memory of a ring, in front of its data."""


class RingCorruptError(OutriderError):
    """What stands in the ring was not written by a writer of rings."""

    status = "DATA_LOSS"


class RingFrame(NamedTuple):
    written_ns: int
    """time.monotonic_ns() of the writer, which every process of a host shares."""
    payload: bytes


class _Ring:
    """What both sides know: the counters, and the bytes behind them."""

    def __init__(self, memory: memoryview) -> None:
        self._counters = memory[:COUNTER_BYTES].cast("Q")  # one aligned store or load each: never half a counter
        self._data = memory[COUNTER_BYTES:]
        self._capacity = len(self._data)
        if self._capacity <= 0 or self._capacity % _ALIGNMENT:
            raise ValueError(f"ring of {self._capacity} bytes: expected a multiple of {_ALIGNMENT}")

    def close(self) -> None:
        """Let go of the memory."""
        self._counters.release()
        self._data.release()

    def _read(self, position: int, count: int) -> bytes:
        start = position % self._capacity
        end = start + count
        if end <= self._capacity:
            return bytes(self._data[start:end])
        return bytes(self._data[start:]) + bytes(self._data[: end - self._capacity])

    def _write(self, position: int, data: bytes) -> None:
        start = position % self._capacity
        end = start + len(data)
        if end <= self._capacity:
            self._data[start:end] = data
        else:
            split = self._capacity - start
            self._data[start:] = data[:split]
            self._data[: end - self._capacity] = data[split:]


class RingWriter(_Ring):
    """The writing side.

    Args:
        memory: `COUNTER_BYTES` and then the data, all zero, a multiple of 8 bytes.
    """

    def __init__(self, memory: memoryview) -> None:
        super().__init__(memory)
        self._head = 0

    @property
    def max_frame_bytes(self) -> int:
        """Of a frame that fits if nothing else is in the ring."""
        return self._capacity - _HEADER.size

    def put(self, payload: bytes) -> bool:
        """Write a frame. False: there is no room; nothing was written.

        Raises:
            RingCorruptError: the reader's counter makes no sense.
        """
        size = _frame_size(len(payload))
        tail = self._counters[_TAIL]
        if not 0 <= self._head - tail <= self._capacity:
            raise RingCorruptError(f"ring: the reader has read to byte {tail}, expected at most {self._head}")
        if self._head - tail + size > self._capacity:
            return False
        header = _HEADER.pack(len(payload), _checksum(self._head, payload), time.monotonic_ns())
        self._write(self._head, header + payload)
        self._head += size
        self._counters[_HEAD] = self._head
        return True


class RingReader(_Ring):
    """The reading side.

    Args:
        memory: as the writer's.
    """

    def __init__(self, memory: memoryview) -> None:
        super().__init__(memory)
        self._tail = 0

    @property
    def has_frames(self) -> bool:
        return self._counters[_HEAD] != self._tail

    def take(self) -> list[RingFrame]:
        """All frames that are there.

        Raises:
            RingCorruptError: a counter, a length or a checksum makes no sense.
        """
        head = self._counters[_HEAD]
        if head == self._tail:
            return []
        if not 0 <= head - self._tail <= self._capacity:
            raise RingCorruptError(f"ring: the writer has written to byte {head}, expected at least {self._tail}")
        frames: list[RingFrame] = []
        while self._tail < head:
            frame = self._frame(head)
            frames.append(frame)
            self._tail += _frame_size(len(frame.payload))
        self._counters[_TAIL] = self._tail
        return frames

    def _frame(self, head: int) -> RingFrame:
        """The frame at the tail."""
        end_s = 0.0
        while True:
            length, checksum, written_ns = _HEADER.unpack(self._read(self._tail, _HEADER.size))
            if _frame_size(length) <= head - self._tail:
                payload = self._read(self._tail + _HEADER.size, length)
                if _checksum(self._tail, payload) == checksum:
                    return RingFrame(written_ns, payload)
            now = time.monotonic()
            end_s = end_s or now + _SETTLE_S
            if now >= end_s:
                raise RingCorruptError(f"ring: the frame of {length} bytes at byte {self._tail} is torn or damaged")


def _frame_size(length: int) -> int:
    return -(-(_HEADER.size + length) // _ALIGNMENT) * _ALIGNMENT


def _checksum(position: int, payload: bytes) -> int:
    return zlib.crc32(payload, position & 0xFFFFFFFF)
