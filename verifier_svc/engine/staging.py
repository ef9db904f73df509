"""What the host changes on the device between steps: staged in pinned memory, applied by one kernel before a step.

Nothing here waits for the device as long as the changes of a step fit one buffer: there is a buffer for every step in
flight, and one more. More (many long prompts at once) go in several buffers, and may wait until an earlier one has been
copied.
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
    """Pinned memory of one copy, seen as records and as bytes."""

    pinned: Tensor  # [num_bytes] int8
    records: NDArray[np.int64]  # [_MAX_WRITES, RECORD_WORDS]
    values: NDArray[np.int8]  # [num_bytes - _VALUES_START]
    copied: torch.cuda.Event


class WriteStager:
    """Collects writes to device tensors; `flush` enqueues them on the current stream, in order.

    Args:
        capacity: bytes of values that one buffer holds.
        depth: steps in flight.
        device: where the tensors live.
    """

    def __init__(self, capacity: int, depth: int, device: torch.device) -> None:
        self._capacity = -(-capacity // 8) * 8
        size = _VALUES_START + self._capacity
        self._slots = deque(_make_slot(size) for _ in range(depth + 1))
        self._mirror = torch.zeros(size // 8, dtype=torch.int64, device=device)
        self._mirror_words = self._mirror.view(torch.int32)
        self._mirror_bytes = self._mirror.view(torch.int8)
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
            if self._num_writes == 0 and not slot.copied.query():
                slot.copied.synchronize()
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
        end = _VALUES_START + self._num_bytes
        self._mirror_bytes[:end].copy_(slot.pinned[:end], non_blocking=True)
        slot.copied.record()
        apply_writes(self._mirror, self._mirror_words, self._mirror_bytes, self._num_writes, self._longest)
        self._slots.rotate(-1)
        self._num_writes = self._num_bytes = self._longest = 0


def _make_slot(size: int) -> _Slot:
    pinned = torch.zeros(size, dtype=torch.int8, pin_memory=True)
    array = pinned.numpy()
    event = torch.cuda.Event()
    event.record()
    records = array[:_VALUES_START].view(np.int64).reshape(_MAX_WRITES, RECORD_WORDS)
    return _Slot(pinned, records, array[_VALUES_START:], event)
