"""Attention of decode and verify rows against a float64 softmax, token by token."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from model_executor.kernels.verify_attention import (
    AttentionTiles,
    make_split_workspace,
    tile_rows,
    tiles_for,
    verify_attention,
)

BLOCK_SIZE = 16
MAX_LEN = 256


def rotate(x: Tensor, cos_sin: Tensor) -> Tensor:
    """x [tokens, heads, head_dim] float64."""
    half = x.shape[-1] // 2
    cos, sin = cos_sin[:, None, :half].double(), cos_sin[:, None, half:].double()
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


@pytest.mark.parametrize("num_splits", [1, 3, 8])
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(4, 1, 64), (8, 2, 128)])
def test_against_float64(
    device: torch.device, dtype: torch.dtype, num_heads: int, num_kv_heads: int, head_dim: int, num_splits: int
) -> None:
    generator = torch.Generator().manual_seed(num_splits)
    query_lens, contexts = [1, 4, 0, 3, 1, 4], [0, 5, 0, 130, 63, 200]
    seq_lens = [q + c for q, c in zip(query_lens, contexts, strict=True)]
    max_blocks = MAX_LEN // BLOCK_SIZE
    order = torch.randperm(len(seq_lens) * max_blocks, generator=generator) + 1
    table = order.view(len(seq_lens), max_blocks).to(device)  # of each request
    rows = torch.randperm(len(seq_lens), generator=generator).to(device)
    block_table = torch.empty_like(table)
    block_table[rows] = table
    num_blocks = table.numel() + 1
    shape = (num_blocks, BLOCK_SIZE, num_kv_heads, head_dim)
    key = torch.randn(shape, generator=generator).to(device, dtype)
    value = torch.randn(shape, generator=generator).to(device, dtype)
    angles = torch.rand(MAX_LEN, head_dim // 2, generator=generator) * 6
    cos_sin = torch.cat([angles.cos(), angles.sin()], dim=-1).to(device)
    num_tokens = sum(query_lens)
    width = (num_heads + 2 * num_kv_heads) * head_dim
    qkv = torch.randn(num_tokens, width, generator=generator).to(device, dtype)
    starts = torch.tensor([0, *torch.tensor(query_lens).cumsum(0).tolist()], device=device)
    out = torch.full((num_tokens, num_heads * head_dim), float("nan"), device=device, dtype=dtype)
    workspace = make_split_workspace(
        len(seq_lens),
        num_kv_heads,
        num_heads // num_kv_heads,
        head_dim,
        4,
        device,
        AttentionTiles(64, 4, 2, num_splits),
    )
    before = key.clone()
    lens = torch.tensor(query_lens, device=device)
    verify_attention(
        qkv,
        cos_sin,
        key,
        value,
        block_table,
        rows,
        starts[:-1],
        lens,
        torch.tensor(seq_lens, device=device),
        out,
        num_heads,
        4,
        workspace,
    )
    assert not workspace.arrived.any()
    expected = torch.full(out.shape, float("nan"), dtype=torch.float64)
    written = torch.zeros(num_blocks * BLOCK_SIZE, dtype=torch.bool)
    heads = qkv.cpu().double().view(num_tokens, -1, head_dim)
    for request, (query_len, context) in enumerate(zip(query_lens, contexts, strict=True)):
        tokens = slice(int(starts[request]), int(starts[request + 1]))
        positions = torch.arange(context, context + query_len)
        query = rotate(heads[tokens, :num_heads], cos_sin.cpu()[positions])
        slots = table[request].cpu().repeat_interleave(BLOCK_SIZE) * BLOCK_SIZE + torch.arange(MAX_LEN) % BLOCK_SIZE
        written[slots[positions]] = True
        new_key = rotate(heads[tokens, num_heads : num_heads + num_kv_heads], cos_sin.cpu()[positions])
        flat_key, flat_value = (c.cpu().double().view(-1, num_kv_heads, head_dim) for c in (key, value))
        torch.testing.assert_close(flat_key[slots[positions]], new_key, atol=0.05, rtol=0.02)
        torch.testing.assert_close(flat_value[slots[positions]], heads[tokens, num_heads + num_kv_heads :])
        for index in range(query_len):
            seen = slots[: context + index + 1]
            k = flat_key[seen].repeat_interleave(num_heads // num_kv_heads, dim=1)
            v = flat_value[seen].repeat_interleave(num_heads // num_kv_heads, dim=1)
            weights = torch.softmax(torch.einsum("hd,thd->ht", query[index], k) * head_dim**-0.5, dim=-1)
            expected[tokens.start + index] = torch.einsum("ht,thd->hd", weights, v).flatten()
    tolerance = 1e-4 if dtype == torch.float32 else 2e-2
    assert float((out.cpu().double() - expected).norm() / expected.norm()) < tolerance
    untouched = ~written
    flat = before.view(-1, num_kv_heads, head_dim).cpu()
    assert torch.equal(key.view(-1, num_kv_heads, head_dim).cpu()[untouched], flat[untouched])


@pytest.mark.parametrize("max_reqs", [1, 3, 64])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("num_kv_heads", [1, 2, 8])
def test_the_workspace_has_room_for_the_splits_of_every_batch(num_kv_heads: int, head_dim: int, max_reqs: int) -> None:
    workspace = make_split_workspace(max_reqs, num_kv_heads, 4, head_dim, 4, torch.device("cpu"))
    rows = tile_rows(4, 4)
    for num_reqs in range(1, max_reqs + 1):
        num_splits = tiles_for(num_reqs, num_kv_heads, head_dim).num_splits
        assert num_splits >= 1
        num_rows = num_reqs * num_kv_heads * num_splits * rows
        assert num_rows <= workspace.maxima.numel()
        assert num_rows <= workspace.sums.numel()
        assert num_rows * head_dim <= workspace.parts.numel()
    assert workspace.arrived.tolist() == [0] * max_reqs * num_kv_heads
