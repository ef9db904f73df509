"""What the host changes on the device between steps: staged in pinned memory, applied by one kernel before a step.

Nothing here waits for the device as long as the changes of a step fit one buffer: there is a buffer for every step in
flight, and one more. More (many long prompts at once) go in several buffers, and may wait until an earlier one has been
applied.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from model_executor.kernels.apply_writes import RECORD_WORDS, apply_writes

_MAX_WRITES = 512
_RECORD_BYTES = RECORD_WORDS * 8
_VALUES_START = _MAX_WRITES * _RECORD_BYTES


@dataclass(frozen=True, slots=True)
class _Slot:
    """Pinned memory of one flush, as the kernel sees it, and as records and values."""

    pinned: Tensor  # [num_bytes / 8] int64
    words: Tensor  # the same as int32
    bytes: Tensor  # the same as int8
    records: NDArray[np.int64]  # [_MAX_WRITES, RECORD_WORDS]
    values: NDArray[np.int8]  # [num_bytes - _VALUES_START]
    applied: torch.cuda.Event


class WriteStager:
    """Collects writes to device tensors; `flush` enqueues them on the current stream, in order.

    Args:
        capacity: bytes of values that one buffer holds.
        depth: steps in flight.
    """

    def __init__(self, capacity: int, depth: int) -> None:
        self._capacity = -(-capacity // 8) * 8
        size = _VALUES_START + self._capacity
        self._slots = deque(_make_slot(size) for _ in range(depth + 1))
        self._num_writes = 0
        self._num_bytes = 0
        self._longest = 0

    def write(self, tensor: Tensor, index: int, values: NDArray[Any]) -> None:
        """tensor.flatten()[index : index + len(values)] = values, with the next `flush`.

        Args:
            tensor: contiguous, on the device, and of the values' type.
            index: first element.
            values: one dimension; copied before this returns.
        """
        size = values.itemsize
        address = tensor.data_ptr() + index * size
        flat = np.ascontiguousarray(values).view(np.int8)
        start = 0
        while start < len(flat):
            if self._num_writes == _MAX_WRITES or self._num_bytes == self._capacity:
                self.flush()
            part = flat[start : start + self._capacity - self._num_bytes]
            slot = self._slots[0]
            if self._num_writes == 0 and not slot.applied.query():
                slot.applied.synchronize()
            slot.values[self._num_bytes : self._num_bytes + len(part)] = part
            first_word = (_VALUES_START + self._num_bytes) // 4
            unit = 1 if size == 1 else 4
            count = len(part) // unit
            slot.records[self._num_writes] = (address + start, first_word, count, unit)
            self._num_writes += 1
            self._num_bytes += -(-len(part) // 8) * 8
            self._longest = max(self._longest, count)
            start += len(part)

    def flush(self) -> None:
        """Enqueue what has been written since the last flush."""
        if self._num_writes == 0:
            return
        slot = self._slots[0]
        apply_writes(slot.pinned, slot.words, slot.bytes, self._num_writes, self._longest)
        slot.applied.record()
        self._slots.rotate(-1)
        self._num_writes = self._num_bytes = self._longest = 0


def _make_slot(size: int) -> _Slot:
    pinned = torch.zeros(size, dtype=torch.int8, pin_memory=True)
    array = pinned.numpy()
    event = torch.cuda.Event()
    event.record()
    records = array[:_VALUES_START].view(np.int64).reshape(_MAX_WRITES, RECORD_WORDS)
    return _Slot(pinned.view(torch.int64), pinned.view(torch.int32), pinned, records, array[_VALUES_START:], event)
