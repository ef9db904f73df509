"""RMS norm, for batches that are too large for `small_gemm`.

Grid: one program a token. Bytes: one read and one write of [num_tokens, hidden].
"""

# pyright: reportCallIssue=false, reportArgumentType=false
# Triton's launch syntax and its constexpr values have no types that pyright follows.
from __future__ import annotations

import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _rms_norm_kernel(x_ptr, weight_ptr, out_ptr, hidden, eps, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < hidden
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    value = tl.load(x_ptr + token * hidden + columns, mask=inside, other=0.0).to(tl.float32)
    rstd = tl.rsqrt(tl.sum(value * value, axis=0) / hidden + eps)
    tl.store(out_ptr + token * hidden + columns, (value * rstd * weight).to(out_ptr.dtype.element_ty), mask=inside)


def rms_norm(x: Tensor, weight: Tensor, out: Tensor, eps: float) -> None:
    """out = norm(x) * weight.

    Args:
        x: [num_tokens, hidden].
        weight: [hidden].
        out: [num_tokens, hidden], written.
        eps: of the norm.
    """
    num_tokens, hidden = x.shape
    block = triton.next_power_of_2(hidden)
    num_warps = 8 if block >= 4096 else 4
    _rms_norm_kernel[(num_tokens,)](x, weight, out, hidden, eps, BLOCK=block, num_warps=num_warps)


def rms_norm_ref(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The same in float64."""
    return F.rms_norm(x.double(), (x.shape[-1],), weight.double(), eps)
