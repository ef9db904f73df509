"""The ring: what comes out is what went in, and whatever stands in its memory, nothing but its own error comes up."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.shm.ring import COUNTER_BYTES, RingCorruptError, RingReader, RingWriter

HEADER_BYTES = 16


def make(capacity: int) -> tuple[bytearray, RingWriter, RingReader]:
    memory = bytearray(COUNTER_BYTES + capacity)
    return memory, RingWriter(memoryview(memory)), RingReader(memoryview(memory))


frames = st.binary(max_size=60)


@given(st.integers(4, 32), st.lists(st.one_of(st.none(), frames), max_size=200))
def test_frames_come_out_as_they_went_in(capacity_words: int, steps: list[bytes | None]) -> None:
    """None: the reader takes what is there."""
    capacity = 8 * capacity_words
    _, writer, reader = make(capacity)
    waiting: deque[bytes] = deque()
    for step in steps:
        if step is None:
            assert [frame.payload for frame in reader.take()] == list(waiting)
            waiting.clear()
            assert not reader.has_frames
            continue
        used = sum(_size(frame) for frame in waiting)
        assert writer.put(step) == (used + _size(step) <= capacity)
        if used + _size(step) <= capacity:
            waiting.append(step)
        assert reader.has_frames == bool(waiting)
    assert [frame.payload for frame in reader.take()] == list(waiting)


def _size(frame: bytes) -> int:
    return -(-(HEADER_BYTES + len(frame)) // 8) * 8


@given(st.binary(min_size=COUNTER_BYTES + 256, max_size=COUNTER_BYTES + 256), st.booleans())
def test_garbage_is_refused(garbage: bytes, is_head_plausible: bool) -> None:
    memory = bytearray(garbage)
    if is_head_plausible:
        memory[:8] = (64).to_bytes(8, "little")
    if memory[:8] == bytes(8):
        return
    with pytest.raises(RingCorruptError):
        RingReader(memoryview(memory)).take()


@given(st.lists(st.binary(min_size=1, max_size=40), min_size=1, max_size=4), st.data())
def test_a_damaged_frame_is_refused(payloads: list[bytes], data: st.DataObject) -> None:
    memory, writer, reader = make(512)
    for payload in payloads:
        assert writer.put(payload)
    used = sum(_size(payload) for payload in payloads)
    at = data.draw(st.integers(0, used - 1))
    memory[COUNTER_BYTES + at] ^= 1 << data.draw(st.integers(0, 7))
    try:
        taken = reader.take()
    except RingCorruptError:
        return
    # Only the time a frame was written and the bytes between frames are not covered by the checksum.
    assert [frame.payload for frame in taken] == payloads


def test_a_torn_frame_is_refused() -> None:
    memory, writer, reader = make(256)
    assert writer.put(b"whole")
    assert [frame.payload for frame in reader.take()] == [b"whole"]
    memory[:8] = (24 + 64).to_bytes(8, "little")  # a head that was moved before the frame behind it was there
    with pytest.raises(RingCorruptError, match="torn or damaged"):
        reader.take()


def test_a_frame_of_an_earlier_round_is_none() -> None:
    memory, writer, reader = make(64)
    for _ in range(4):
        assert writer.put(b"x" * 16)
        assert len(reader.take()) == 1
    memory[:8] = (4 * 32 + 64).to_bytes(8, "little")
    with pytest.raises(RingCorruptError):
        reader.take()


@pytest.mark.parametrize("tail", [1 << 63, 8])
def test_a_reader_that_lies_is_refused(tail: int) -> None:
    memory, writer, _ = make(64)
    memory[64:72] = tail.to_bytes(8, "little")
    with pytest.raises(RingCorruptError, match="the reader has read"):
        writer.put(b"frame")
