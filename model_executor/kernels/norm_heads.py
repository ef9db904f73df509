"""RMS norm of query and key heads, in place.

Grid: one program a token. Bytes: one read and one write of the query and key heads.
"""

# pyright: reportCallIssue=false, reportArgumentType=false
# Triton's launch syntax and its constexpr values have no types that pyright follows.
from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _norm_heads_kernel(
    qkv_ptr,  # [num_tokens, stride]
    weight_ptr,  # [num_heads, HEAD_DIM]
    stride,
    num_heads,
    eps,
    HEAD_DIM: tl.constexpr,
    HEADS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, HEADS)[:, None] * HEAD_DIM + tl.arange(0, HEAD_DIM)[None, :]
    inside = tl.arange(0, HEADS)[:, None] < num_heads
    heads = tl.load(qkv_ptr + token * stride + place, mask=inside, other=0.0).to(tl.float32)
    rstd = tl.rsqrt(tl.sum(heads * heads, axis=1) / HEAD_DIM + eps)
    weight = tl.load(weight_ptr + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(
        qkv_ptr + token * stride + place, (heads * rstd[:, None] * weight).to(qkv_ptr.dtype.element_ty), mask=inside
    )


def norm_heads(qkv: Tensor, weight: Tensor, eps: float) -> None:
    """Norm the first heads of every token.

    Args:
        qkv: [num_tokens, at least num_heads * head_dim], contiguous; updated.
        weight: [num_heads, head_dim], of queries and keys.
        eps: of the norm.
    """
    num_heads, head_dim = weight.shape
    _norm_heads_kernel[(qkv.shape[0],)](
        qkv, weight, qkv.stride(0), num_heads, eps, HEAD_DIM=head_dim, HEADS=triton.next_power_of_2(num_heads)
    )


def norm_heads_ref(qkv: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The heads after the norm, in float64, [num_tokens, num_heads, head_dim]."""
    num_heads, head_dim = weight.shape
    heads = qkv.view(qkv.shape[0], -1, head_dim)[:, :num_heads].double()
    return F.rms_norm(heads, (head_dim,), None, eps) * weight.to(torch.float64)
