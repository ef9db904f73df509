"""KV write of prefill tokens, and the rotation of keys, against float64."""

from __future__ import annotations

import pytest
import torch

from model_executor.kernels.write_kv import write_kv, write_kv_ref

BLOCK_SIZE, NUM_BLOCKS, MAX_LEN = 16, 7, 128


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim"), [(4, 4, 32), (3, 1, 64), (8, 2, 128), (2, 1, 256)], ids=str
)
def test_against_float64(
    device: torch.device, dtype: torch.dtype, num_heads: int, num_kv_heads: int, head_dim: int
) -> None:
    generator = torch.Generator().manual_seed(head_dim)
    num_tokens = 37
    slots = torch.randperm(NUM_BLOCKS * BLOCK_SIZE, generator=generator)[:num_tokens]
    slots[torch.rand(num_tokens, generator=generator) < 0.3] = -1
    positions = torch.randint(0, MAX_LEN, (num_tokens,), generator=generator)
    positions[slots < 0] = 10**9  # of no row of the table: must not be read
    qkv = torch.randn(num_tokens, (num_heads + 2 * num_kv_heads) * head_dim, generator=generator).to(dtype)
    storage = torch.randn(2, NUM_BLOCKS, BLOCK_SIZE, num_kv_heads, head_dim, generator=generator).to(device, dtype)
    angles = torch.rand(MAX_LEN, head_dim // 2, generator=generator) * 6
    cos_sin = torch.cat([angles.cos(), angles.sin()], dim=-1).to(device)
    qkv, slots, positions = qkv.to(device), slots.to(device), positions.to(device)
    key, value = storage[0], storage[1]
    expected = write_kv_ref(qkv, positions, slots, cos_sin, key, value, num_heads)
    before = qkv.clone()
    write_kv(qkv, positions, slots, cos_sin, key, value, num_heads)
    assert torch.equal(qkv, before)
    torch.testing.assert_close(key, expected[0])
    assert torch.equal(value, expected[1])
    assert 0 < int((slots < 0).sum()) < num_tokens
