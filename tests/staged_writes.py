"""Staged writes of steps that a made-up device runs later: for tests of what stages them."""

from __future__ import annotations

from collections import deque
from typing import Any, NamedTuple

import torch
from numpy.typing import NDArray
from torch import Tensor


class StagedWrite(NamedTuple):
    tensor: Tensor
    start: int
    values: NDArray[Any]


class FakeStagedWrites:
    """Keeps the writes of each step until the device begins it."""

    def __init__(self) -> None:
        self.staged: list[StagedWrite] = []
        """For the step that is handed over next."""
        self._steps: deque[list[StagedWrite]] = deque()

    def write(self, tensor: Tensor, index: int, values: NDArray[Any]) -> None:
        """See `StagedWrites.write`."""
        assert values.ndim == 1
        assert 0 <= index <= index + len(values) <= tensor.numel()
        self.staged.append(StagedWrite(tensor, index, values.copy()))

    def hand_over(self) -> None:
        """The step has all its writes."""
        self._steps.append(self.staged)
        self.staged = []

    def apply(self) -> None:
        """The device begins the oldest step."""
        for tensor, start, values in self._steps.popleft():
            tensor.view(-1)[start : start + len(values)] = torch.from_numpy(values)
