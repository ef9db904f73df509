"""Writes that the host has staged, applied to any number of tensors by one kernel.

The buffer holds one record for each write (address, where its values begin, how many, bytes of one) and behind them the
values. It may be pinned memory of the host, which the kernel reads by itself: a copy before it would cost more than the
bytes. Grid: writes x parts of a write. Bytes: the values, twice.
"""

# pyright: reportCallIssue=false, reportArgumentType=false
# Triton's launch syntax and its constexpr values have no types that pyright follows.
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

RECORD_WORDS = 4
"""Words of a record, 64 bits each: address, first word of the values in units of 32 bits, count, bytes of a value."""

_PART = 2048


@triton.jit
def _apply_writes_kernel(buffer_ptr, words_ptr, bytes_ptr, record_words: tl.constexpr, PART: tl.constexpr):
    record = buffer_ptr + tl.program_id(0) * record_words
    address = tl.load(record)
    first = tl.load(record + 1)
    count = tl.load(record + 2)
    size = tl.load(record + 3)
    num_parts = tl.num_programs(1)
    offset = tl.arange(0, PART)
    if size == 1:
        target = address.to(tl.pointer_type(tl.int8))
        for start in range(tl.program_id(1) * PART, count, num_parts * PART):
            place = start + offset
            tl.store(target + place, tl.load(bytes_ptr + first * 4 + place, mask=place < count), mask=place < count)
    else:
        words = address.to(tl.pointer_type(tl.int32))
        for start in range(tl.program_id(1) * PART, count, num_parts * PART):
            place = start + offset
            tl.store(words + place, tl.load(words_ptr + first + place, mask=place < count), mask=place < count)


def apply_writes(buffer: Tensor, words: Tensor, values: Tensor, num_writes: int, longest: int) -> None:
    """Carry out the first `num_writes` records.

    Args:
        buffer: the whole as int64; records begin at its start.
        words: the same memory as int32.
        values: the same memory as int8.
        num_writes: records.
        longest: count of the longest one; decides how many programs share a write.
    """
    grid = (num_writes, min(64, triton.cdiv(longest, _PART)))
    _apply_writes_kernel[grid](buffer, words, values, record_words=RECORD_WORDS, PART=_PART)
