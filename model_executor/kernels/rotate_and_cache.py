"""Rotary positions of queries and keys, and the KV write of prefill tokens, in one pass over their projections.

The heads of all tokens are rows of one list, whatever token they belong to: a program takes a few rows, so that no lane
is idle for any number of heads and all loads of a program are under way before its first store. Queries are rotated in
place; keys too, and their rotated form goes to the cache with the values. `verify_attention` does the same itself for
the tokens that have slot -1 here.

Grid: tokens x heads / rows of a program. Bytes: one read and one write of queries and keys, one read of the values, one
write of keys and values to the cache; cos and sin of a position are read once from memory and by each head from the L1.
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
def _rotate_and_cache_kernel(
    qkv_ptr,  # [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim]
    positions_ptr,  # [num_tokens] int64
    slot_mapping_ptr,  # [num_tokens] int64; -1: not this kernel's
    cos_sin_ptr,  # [max_model_len, head_dim] float32: cos of the half dimensions, then sin
    key_ptr,  # [num_blocks, BLOCK_SIZE, num_kv_heads, head_dim]
    value_ptr,
    num_rows,  # num_tokens * (num_heads + 2 * num_kv_heads)
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
    token = rows // heads_each
    head = rows % heads_each
    slot = tl.load(slot_mapping_ptr + token, mask=is_row, other=-1)
    position = tl.load(positions_ptr + token, mask=is_row, other=0).to(tl.int64)
    is_mine = slot >= 0
    is_rotated = is_mine & (head < num_heads + num_kv_heads)
    is_key = is_rotated & (head >= num_heads)
    is_value = is_mine & (head >= num_heads + num_kv_heads)

    half = tl.arange(0, HALF)
    place = qkv_ptr + rows.to(tl.int64)[:, None] * (2 * HALF) + half[None, :]
    angle = cos_sin_ptr + position[:, None] * (2 * HALF) + half[None, :]
    first = tl.load(place, mask=is_mine[:, None], other=0.0)
    second = tl.load(place + HALF, mask=is_mine[:, None], other=0.0)
    cos = tl.load(angle, mask=is_rotated[:, None], other=1.0)
    sin = tl.load(angle + HALF, mask=is_rotated[:, None], other=0.0)
    dtype = qkv_ptr.dtype.element_ty
    x = first.to(tl.float32)
    y = second.to(tl.float32)
    rotated_first = (x * cos - y * sin).to(dtype)
    rotated_second = (y * cos + x * sin).to(dtype)
    tl.store(place, rotated_first, mask=is_rotated[:, None])
    tl.store(place + HALF, rotated_second, mask=is_rotated[:, None])

    slot = tl.maximum(slot, 0).to(tl.int64)
    kv_head = tl.where(head >= num_heads + num_kv_heads, head - num_heads - num_kv_heads, head - num_heads)
    in_cache = (slot // BLOCK_SIZE) * block_stride + (slot % BLOCK_SIZE) * token_stride + kv_head * head_stride
    in_cache = in_cache[:, None] + half[None, :]
    tl.store(key_ptr + in_cache, rotated_first, mask=is_key[:, None])
    tl.store(key_ptr + in_cache + HALF, rotated_second, mask=is_key[:, None])
    tl.store(value_ptr + in_cache, first, mask=is_value[:, None])
    tl.store(value_ptr + in_cache + HALF, second, mask=is_value[:, None])


def rotate_and_cache(
    qkv: Tensor,
    positions: Tensor,
    slot_mapping: Tensor,
    cos_sin: Tensor,
    key: Tensor,
    value: Tensor,
    num_heads: int,
) -> None:
    """Rotate queries and keys in place, and write keys and values to the cache, of tokens with a slot.

    Args:
        qkv: projections, [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim], contiguous; updated.
        positions: [num_tokens] int64; read where there is a slot.
        slot_mapping: [num_tokens] int64, block * block_size + offset; -1: the token is left alone.
        cos_sin: [max_model_len, head_dim] float32; cos of head_dim / 2 angles, then sin (rotate-half layout).
        key, value: cache, [num_blocks, block_size, num_kv_heads, head_dim], of equal strides; written.
        num_heads: of the queries.
    """
    _, block_size, num_kv_heads, head_dim = key.shape
    num_rows = qkv.shape[0] * (num_heads + 2 * num_kv_heads)
    rows_each = max(1, _ELEMENTS // (head_dim // 2))
    _rotate_and_cache_kernel[(triton.cdiv(num_rows, rows_each),)](
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


def rotate_and_cache_ref(
    qkv: Tensor,
    positions: Tensor,
    slot_mapping: Tensor,
    cos_sin: Tensor,
    key: Tensor,
    value: Tensor,
    num_heads: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """What qkv, key and value become, rotated in float64 and rounded to their dtype."""
    _, _, num_kv_heads, head_dim = key.shape
    mine = (slot_mapping >= 0).nonzero()[:, 0]  # [tokens with a slot]
    heads = qkv.view(qkv.shape[0], -1, head_dim).clone()
    key_slots, value_slots = (cache.flatten(0, 1).clone() for cache in (key, value))
    cos, sin = cos_sin[positions[mine], None].double().chunk(2, dim=-1)  # [tokens with a slot, 1, head_dim / 2]
    first, second = heads[mine, : num_heads + num_kv_heads].double().chunk(2, dim=-1)
    rotated = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(qkv.dtype)
    heads[mine, : num_heads + num_kv_heads] = rotated
    key_slots[slot_mapping[mine]] = rotated[:, num_heads:]
    value_slots[slot_mapping[mine]] = heads[mine, num_heads + num_kv_heads :]
    return heads.view_as(qkv), key_slots.view_as(key), value_slots.view_as(value)
