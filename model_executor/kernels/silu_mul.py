"""silu(gate) * up over the two halves of a merged projection.

Grid: tokens x column blocks. Bytes: one read of [num_tokens, 2 * inner] and one write of half of it.
"""

# pyright: reportCallIssue=false, reportArgumentType=false
# Triton's launch syntax and its constexpr values have no types that pyright follows.
from __future__ import annotations

import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024


@triton.jit
def _silu_mul_kernel(gate_up_ptr, out_ptr, inner, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < inner
    gate = tl.load(gate_up_ptr + token * 2 * inner + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + token * 2 * inner + inner + columns, mask=inside, other=0.0).to(tl.float32)
    result = gate * tl.sigmoid(gate) * up
    tl.store(out_ptr + token * inner + columns, result.to(out_ptr.dtype.element_ty), mask=inside)


def silu_mul(gate_up: Tensor, out: Tensor) -> None:
    """out [num_tokens, inner] = silu(gate) * up of gate_up [num_tokens, 2 * inner]."""
    num_tokens, inner = out.shape
    _silu_mul_kernel[(num_tokens, triton.cdiv(inner, _BLOCK))](gate_up, out, inner, BLOCK=_BLOCK)


def silu_mul_ref(gate_up: Tensor) -> Tensor:
    """The same in float64."""
    gate, up = gate_up.double().chunk(2, dim=-1)
    return F.silu(gate) * up
