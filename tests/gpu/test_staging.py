"""Staged writes: whatever the host has written is on the device, in order, however much it is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

if TYPE_CHECKING:
    from verifier_svc.engine.staging import WriteStager

pytestmark = pytest.mark.gpu

DTYPES = (np.int64, np.int32, np.float32, np.bool_)
CUDA = torch.device("cuda")


def make_stager(capacity: int, depth: int = 2) -> WriteStager:
    from verifier_svc.engine.staging import WriteStager  # late: it imports a kernel, see tests/kernels/conftest.py

    return WriteStager(capacity, depth)


def random_values(rng: np.random.Generator, count: int, dtype: Any) -> np.ndarray[Any, Any]:
    return (rng.random(count) * 2**31).astype(np.int64).astype(dtype) if dtype != np.bool_ else rng.random(count) < 0.5


@pytest.mark.parametrize("dtype", DTYPES)
def test_values_larger_than_the_buffer(dtype: Any) -> None:
    """The longest prompt may be staged beside others that fill the buffer."""
    stager = make_stager(capacity=4096)
    rng = np.random.default_rng(0)
    expected = random_values(rng, 60_001, dtype)
    tensor = torch.from_numpy(expected.copy()).to(CUDA)
    for start, count in ((3, 1), (17, 50_003), (55_000, 777)):
        expected[start : start + count] = values = random_values(rng, count, dtype)
        stager.write(tensor, start, values)
    stager.flush()
    assert np.array_equal(tensor.cpu().numpy(), expected)


@pytest.mark.parametrize("depth", [1, 2])
def test_more_writes_than_a_buffer_has_records(depth: int) -> None:
    stager = make_stager(1 << 20, depth)
    rng = np.random.default_rng(1)
    count = 20_000
    tensors = [torch.zeros(count, dtype=dtype, device=CUDA) for dtype in (torch.int64, torch.int32)]
    expected = rng.integers(-(2**31), 2**31, count)
    for index in rng.permutation(count).tolist():
        stager.write(tensors[0], index, expected[index : index + 1])
        stager.write(tensors[1], index, expected[index : index + 1].astype(np.int32))
    stager.flush()
    for tensor in tensors:
        assert np.array_equal(tensor.cpu().numpy(), expected)


@pytest.mark.parametrize("capacity", [64, 1000, 1 << 16])
def test_writes_of_all_types_change_what_they_name_and_nothing_else(capacity: int) -> None:
    stager = make_stager(capacity)
    rng = np.random.default_rng(capacity)
    expected = [random_values(rng, 5000, dtype).reshape(50, 100) for dtype in DTYPES]
    tensors = [torch.from_numpy(array.copy()).to(CUDA) for array in expected]
    for _ in range(20):
        ends = [0] * len(DTYPES)
        for which in rng.integers(0, len(DTYPES), 40).tolist():
            start = ends[which] + int(rng.integers(0, 100))  # writes of one flush do not overlap
            values = random_values(rng, min(int(rng.integers(0, 200)), 5000 - start), DTYPES[which])
            ends[which] = start + len(values)
            if start + len(values) <= 5000:
                expected[which].reshape(-1)[start : start + len(values)] = values
                stager.write(tensors[which], start, values)
        stager.flush()
    for tensor, array in zip(tensors, expected, strict=True):
        assert np.array_equal(tensor.cpu().numpy(), array)


@pytest.mark.parametrize("depth", [1, 2])
def test_flushes_come_in_order_and_no_buffer_is_used_before_it_is_free(depth: int) -> None:
    """The host is many flushes ahead of the device, which sees the values of each one in its turn."""
    stager = make_stager(1 << 14, depth)
    tensor = torch.zeros(2000, dtype=torch.int64, device=CUDA)
    seen = torch.zeros(40, 2000, dtype=torch.int64, device=CUDA)
    torch.cuda.synchronize()
    for turn in range(len(seen)):
        torch.cuda._sleep(1_000_000)  # half a millisecond: far longer than it takes to come back here
        stager.write(tensor, 0, np.full(2000, turn, dtype=np.int64))
        stager.flush()
        seen[turn].copy_(tensor)
    assert torch.equal(seen.cpu(), torch.arange(len(seen))[:, None].expand(-1, 2000))


def test_values_are_copied_when_they_are_written() -> None:
    stager = make_stager(4096)
    tensor = torch.zeros(10, dtype=torch.int32, device=CUDA)
    values = np.arange(10, dtype=np.int32)
    stager.write(tensor, 0, values)
    values[:] = -1
    stager.flush()
    assert tensor.tolist() == list(range(10))


def test_nothing_changes_before_a_flush_and_nothing_twice() -> None:
    stager = make_stager(4096)
    tensor = torch.zeros(4, dtype=torch.int64, device=CUDA)
    stager.flush()
    stager.write(tensor, 1, np.array([7], dtype=np.int64))
    stager.write(tensor, 2, np.empty(0, dtype=np.int64))
    assert tensor.tolist() == [0, 0, 0, 0]
    stager.flush()
    assert tensor.tolist() == [0, 7, 0, 0]
    tensor.zero_()
    stager.flush()
    assert tensor.tolist() == [0, 0, 0, 0]
