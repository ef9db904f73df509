"""Where branches land for steps that choose their drafts on the device.

The host keeps a mirror, and it is the truth: whatever changes goes to the device with the next step. The mirror also
says whether a row has a branch that still holds, as far as the host knows the row's text, without asking the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from common.draft_exchange import BranchBatch
from model_executor.landing_tensors import BASE_LEN, GENERATION, HEADER, LENGTH, LandingTensors
from verifier_svc.drafts.landing import BranchSlots, Int64Array

_MAX_GAP = 8
"""Rows without a change that are sent along rather than begin another write: 4 KB, which cost less than a call."""


class StagedWrites(Protocol):
    """Writes to device tensors that are applied in order before the next step runs."""

    def write(self, tensor: Tensor, index: int, values: NDArray[Any]) -> None:
        """tensor.flatten()[index : index + len(values)] = values, which are copied before this returns."""
        ...


class DeviceLanding:
    """The latest F branches of each row, on the device and in a mirror on the host.

    Args:
        tensors: what the device reads; without a branch as yet.
        writes: brings changes there.
    """

    def __init__(self, tensors: LandingTensors, writes: StagedWrites) -> None:
        self.tensors = tensors
        self._writes = writes
        num_rows = tensors.records.shape[0]
        self._slots = BranchSlots(num_rows, tensors.num_branches, tensors.branch_len)
        self._records = np.zeros(tuple(tensors.records.shape), dtype=np.int64)  # [R, F, HEADER + L]
        self._is_changed = np.zeros(num_rows, dtype=np.bool_)  # [R]
        self._offsets = np.arange(tensors.branch_len)  # [L]

    def put(self, branches: BranchBatch) -> None:
        """See `Landing.put`. The device has them after `flush`."""
        if len(branches) == 0:
            return
        placed = self._slots.place(branches)
        record = np.empty((len(placed.row), self._records.shape[2]), dtype=np.int64)
        record[:, BASE_LEN] = placed.base_len
        record[:, LENGTH] = placed.length
        record[:, GENERATION] = placed.generation
        record[:, HEADER:] = placed.token_ids
        self._records[placed.row, placed.slot] = record
        self._is_changed[placed.row] = True

    def clear(self, rows: list[int]) -> None:
        """See `Landing.clear`."""
        self._records[rows, :, LENGTH] = 0
        self._is_changed[rows] = True

    def flush(self) -> None:
        """Stage what has changed, whole rows at a time: at most the size of the tensor, whatever has landed."""
        changed = self._is_changed.nonzero()[0]
        if len(changed) == 0:
            return
        self._is_changed[changed] = False
        row_size = self._records[0].size
        ends = (np.diff(changed) > _MAX_GAP).nonzero()[0]
        first_rows = changed[np.concatenate(([0], ends + 1))].tolist()
        last_rows = changed[np.append(ends, len(changed) - 1)].tolist()
        for first, last in zip(first_rows, last_rows, strict=True):
            self._writes.write(self.tensors.records, first * row_size, self._records[first : last + 1].reshape(-1))

    def num_claimed(self, rows: Sequence[int], generations: Sequence[int], texts: Sequence[list[int]]) -> Int64Array:
        """How far the best branch of each row goes on beyond its text; 0 without a branch that agrees with it.

        Args:
            rows, generations: N rows.
            texts: committed tokens of each, as far as the host knows them.
        """
        size = self.tensors.branch_len
        tails = np.array([[-1] * (size - len(text)) + text[-size:] for text in texts])  # [N, L], ends where texts end
        length = np.array([len(text) for text in texts])[:, None]  # [N, 1]
        records = self._records[np.array(rows)]  # [N, F, HEADER + L]
        skip = length - records[:, :, BASE_LEN]  # [N, F] tokens of the branch that are committed by now
        rest = records[:, :, LENGTH] - skip  # [N, F]
        usable = (records[:, :, GENERATION] == np.array(generations)[:, None]) & (skip >= 0) & (rest > 0)
        place = (size - skip)[:, :, None] + self._offsets  # [N, F, L] where in the tail the branch's tokens stand
        standing = np.take_along_axis(tails[:, None], place.clip(0, size - 1), axis=2)  # [N, F, L]
        agrees = (standing == records[:, :, HEADER:]) | (self._offsets >= skip[:, :, None])
        return np.where(usable & agrees.all(axis=2), rest, 0).max(axis=1)
