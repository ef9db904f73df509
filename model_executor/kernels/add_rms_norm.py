"""Residual addition and RMS norm in one pass, for batches that are too large for `small_gemm`.

Grid: one program a token. Bytes: two reads and two writes of [num_tokens, hidden].
"""

# pyright: reportCallIssue=false, reportArgumentType=false
# Triton's launch syntax and its constexpr values have no types that pyright follows.
from __future__ import annotations

import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _add_rms_norm_kernel(
    x_ptr, residual_ptr, weight_ptr, out_ptr, hidden, eps, BLOCK: tl.constexpr, HAS_X: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < hidden
    place = token * hidden + columns
    stream = tl.load(residual_ptr + place, mask=inside, other=0.0)
    if HAS_X:
        total = stream.to(tl.float32) + tl.load(x_ptr + place, mask=inside, other=0.0).to(tl.float32)
        stream = total.to(stream.dtype)
        tl.store(residual_ptr + place, stream, mask=inside)
    value = stream.to(tl.float32)
    rstd = tl.rsqrt(tl.sum(value * value, axis=0) / hidden + eps)
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + place, (value * rstd * weight).to(out_ptr.dtype.element_ty), mask=inside)


def add_rms_norm(x: Tensor | None, residual: Tensor, weight: Tensor, out: Tensor, eps: float) -> None:
    """residual += x; out = norm(residual) * weight.

    Args:
        x: [num_tokens, hidden]; None: nothing is added.
        residual: [num_tokens, hidden], updated.
        weight: [hidden].
        out: [num_tokens, hidden], written.
        eps: of the norm.
    """
    num_tokens, hidden = residual.shape
    _add_rms_norm_kernel[(num_tokens,)](
        x if x is not None else residual,
        residual,
        weight,
        out,
        hidden,
        eps,
        BLOCK=triton.next_power_of_2(hidden),
        HAS_X=x is not None,
        num_warps=8,
    )


def add_rms_norm_ref(x: Tensor | None, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The new residual, of its dtype, and the norm of it in float64."""
    stream = residual if x is None else (residual.float() + x.float()).to(residual.dtype)
    return stream, F.rms_norm(stream.double(), (stream.shape[-1],), weight.double(), eps)
