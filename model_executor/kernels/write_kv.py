"""Rotary positions of keys, and the KV write of a mixed step's tokens, in one pass over their projections.

The KV heads of all tokens are rows of one list, whatever token they belong to: a program takes a few rows, so that no
lane is idle for any number of heads and all loads of a program are under way before its first store. Queries are
rotated by the attention kernels as they load them.

Grid: tokens x KV heads, those of keys and of values / rows of a program. Bytes: one read of keys and values, one write
of both to the cache; cos and sin of a position are read once from memory and by each head from the L1.
"""

# pyright: reportCallIssue=false, reportArgumentType=false
# Triton's launch syntax and its constexpr values have no types that pyright follows.
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_ELEMENTS = 2048  # of each half, a program: 4 warps with two 16-byte accesses a lane of bf16, or four of float32


@triton.jit
def _write_kv_kernel(
    qkv_ptr,  # [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim]
    positions_ptr,  # [num_tokens] int64
    slot_mapping_ptr,  # [num_tokens] int64; -1: not this kernel's
    cos_sin_ptr,  # [max_model_len, head_dim] float32: cos of the half dimensions, then sin
    key_ptr,  # [num_blocks, BLOCK_SIZE, num_kv_heads, head_dim]
    value_ptr,
    num_rows,  # num_tokens * 2 * num_kv_heads
    block_stride,
    token_stride,
    head_stride,
    num_heads: tl.constexpr,
    num_kv_heads: tl.constexpr,
    HALF: tl.constexpr,  # head_dim / 2
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
):
    heads_each: tl.constexpr = num_heads + 2 * num_kv_heads
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_row = rows < num_rows
    token = rows // (2 * num_kv_heads)
    head = rows % (2 * num_kv_heads)
    slot = tl.load(slot_mapping_ptr + token, mask=is_row, other=-1)
    position = tl.load(positions_ptr + token, mask=is_row, other=0).to(tl.int64)
    is_mine = slot >= 0
    is_key = is_mine & (head < num_kv_heads)
    is_value = is_mine & (head >= num_kv_heads)

    half = tl.arange(0, HALF)
    place = (token.to(tl.int64) * heads_each + num_heads + head) * (2 * HALF)
    place = qkv_ptr + place[:, None] + half[None, :]
    angle = cos_sin_ptr + position[:, None] * (2 * HALF) + half[None, :]
    first = tl.load(place, mask=is_mine[:, None], other=0.0)
    second = tl.load(place + HALF, mask=is_mine[:, None], other=0.0)
    cos = tl.load(angle, mask=is_key[:, None], other=1.0)
    sin = tl.load(angle + HALF, mask=is_key[:, None], other=0.0)
    dtype = key_ptr.dtype.element_ty
    x = first.to(tl.float32)
    y = second.to(tl.float32)

    slot = tl.maximum(slot, 0).to(tl.int64)
    in_cache = (slot // BLOCK_SIZE) * block_stride + (slot % BLOCK_SIZE) * token_stride
    in_cache += (head % num_kv_heads) * head_stride
    in_cache = in_cache[:, None] + half[None, :]
    tl.store(key_ptr + in_cache, (x * cos - y * sin).to(dtype), mask=is_key[:, None])
    tl.store(key_ptr + in_cache + HALF, (y * cos + x * sin).to(dtype), mask=is_key[:, None])
    tl.store(value_ptr + in_cache, first, mask=is_value[:, None])
    tl.store(value_ptr + in_cache + HALF, second, mask=is_value[:, None])


def write_kv(
    qkv: Tensor,
    positions: Tensor,
    slot_mapping: Tensor,
    cos_sin: Tensor,
    key: Tensor,
    value: Tensor,
    num_heads: int,
) -> None:
    """Write the rotated keys and the values of tokens with a slot to the cache.

    Args:
        qkv: projections, [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim], contiguous; queries are not read.
        positions: [num_tokens] int64; read where there is a slot.
        slot_mapping: [num_tokens] int64, block * block_size + offset; -1: the token is left alone.
        cos_sin: [max_model_len, head_dim] float32; cos of head_dim / 2 angles, then sin (rotate-half layout).
        key, value: cache, [num_blocks, block_size, num_kv_heads, head_dim], of equal strides; written.
        num_heads: of the queries.
    """
    _, block_size, num_kv_heads, head_dim = key.shape
    num_rows = qkv.shape[0] * 2 * num_kv_heads
    rows_each = max(1, _ELEMENTS // (head_dim // 2))
    _write_kv_kernel[(triton.cdiv(num_rows, rows_each),)](
        qkv,
        positions,
        slot_mapping,
        cos_sin,
        key,
        value,
        num_rows,
        key.stride(0),
        key.stride(1),
        key.stride(2),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        HALF=head_dim // 2,
        BLOCK_SIZE=block_size,
        ROWS=rows_each,
        num_warps=4,
    )


def write_kv_ref(
    qkv: Tensor,
    positions: Tensor,
    slot_mapping: Tensor,
    cos_sin: Tensor,
    key: Tensor,
    value: Tensor,
    num_heads: int,
) -> tuple[Tensor, Tensor]:
    """What key and value become; keys rotated in float64 and rounded to their dtype."""
    _, _, num_kv_heads, head_dim = key.shape
    mine = (slot_mapping >= 0).nonzero()[:, 0]  # [tokens with a slot]
    heads = qkv.view(qkv.shape[0], -1, head_dim)[mine]
    key_slots, value_slots = (cache.flatten(0, 1).clone() for cache in (key, value))
    cos, sin = cos_sin[positions[mine], None].double().chunk(2, dim=-1)  # [tokens with a slot, 1, head_dim / 2]
    first, second = heads[:, num_heads : num_heads + num_kv_heads].double().chunk(2, dim=-1)
    rotated = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    key_slots[slot_mapping[mine]] = rotated.to(key.dtype)
    value_slots[slot_mapping[mine]] = heads[:, num_heads + num_kv_heads :]
    return key_slots.view_as(key), value_slots.view_as(value)
