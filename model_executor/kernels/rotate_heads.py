"""Rotary positions of queries and keys, in place.

Grid: one program a token. Bytes: one read and one write of the query and key heads.
"""

# pyright: reportCallIssue=false, reportArgumentType=false
# Triton's launch syntax and its constexpr values have no types that pyright follows.
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _rotate_heads_kernel(
    heads_ptr,  # [num_tokens, stride]
    positions_ptr,  # [num_tokens] int64
    cos_sin_ptr,  # [max_model_len, 2 * HALF] float32
    stride,
    num_heads,
    HALF: tl.constexpr,
    HEADS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    position = tl.load(positions_ptr + token)
    half = tl.arange(0, HALF)
    cos = tl.load(cos_sin_ptr + position * 2 * HALF + half)[None, :]
    sin = tl.load(cos_sin_ptr + position * 2 * HALF + HALF + half)[None, :]
    head = tl.arange(0, HEADS)
    inside = (head < num_heads)[:, None]
    place = heads_ptr + token * stride + head[:, None] * 2 * HALF + half[None, :]
    first = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(place + HALF, mask=inside, other=0.0).to(tl.float32)
    tl.store(place, (first * cos - second * sin).to(heads_ptr.dtype.element_ty), mask=inside)
    tl.store(place + HALF, (second * cos + first * sin).to(heads_ptr.dtype.element_ty), mask=inside)


def rotate_heads(heads: Tensor, positions: Tensor, cos_sin: Tensor, num_heads: int) -> None:
    """Rotate the first `num_heads` heads of every token (rotate-half layout).

    Args:
        heads: [num_tokens, at least num_heads * head_dim], contiguous; updated.
        positions: [num_tokens] int64.
        cos_sin: [max_model_len, head_dim] float32; cos of head_dim / 2 angles, then sin.
        num_heads: queries and keys.
    """
    _rotate_heads_kernel[(heads.shape[0],)](
        heads,
        positions,
        cos_sin,
        heads.stride(0),
        num_heads,
        HALF=cos_sin.shape[1] // 2,
        HEADS=triton.next_power_of_2(num_heads),
    )
