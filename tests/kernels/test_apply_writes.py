"""Staged writes: records and values in one buffer, applied to tensors of several types."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from model_executor.kernels.apply_writes import RECORD_WORDS, apply_writes

VALUES_START = 64 * RECORD_WORDS * 8


@pytest.mark.parametrize("seed", range(4))
def test_writes_change_what_they_name_and_nothing_else(device: torch.device, seed: int) -> None:
    rng = np.random.default_rng(seed)
    dtypes = (np.int64, np.int32, np.float32, np.bool_)
    expected = [(rng.random(9000) * 100).astype(dtype) for dtype in dtypes]
    tensors = [torch.from_numpy(array.copy()).to(device) for array in expected]
    memory = np.zeros(VALUES_START + (1 << 18), dtype=np.int8)
    records = memory[:VALUES_START].view(np.int64).reshape(-1, RECORD_WORDS)
    end, longest = VALUES_START, 0
    num_writes = 24
    taken = [0] * len(dtypes)
    for index in range(num_writes):
        which = index % len(dtypes)
        count = int(rng.integers(1, 1500))
        start = taken[which]
        taken[which] += count
        values = (rng.random(count) * 100).astype(dtypes[which])
        expected[which][start : start + count] = values
        data = values.view(np.int8)
        memory[end : end + len(data)] = data
        unit = 1 if values.itemsize == 1 else 4
        address = tensors[which].data_ptr() + start * values.itemsize
        records[index] = (address, end // 4, len(data) // unit, unit)
        longest = max(longest, len(data) // unit)
        end += -(-len(data) // 8) * 8
    buffer = torch.from_numpy(memory).to(device)
    apply_writes(buffer.view(torch.int64), buffer.view(torch.int32), buffer, num_writes, longest)
    for tensor, array in zip(tensors, expected, strict=True):
        assert torch.equal(tensor.cpu(), torch.from_numpy(array))
