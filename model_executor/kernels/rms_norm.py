"""RMS norm, for batches that are too large for `small_gemm`.

Grid: one program a token. Bytes: one read and one write of [num_tokens, hidden].
"""

# pyright: reportCallIssue=false, reportArgumentType=false
# Triton's launch syntax and its constexpr values have no types that pyright follows.
from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _rms_norm_kernel(x_ptr, weight_ptr, out_ptr, hidden, eps, BLOCK: tl.constexpr, LAST_FIRST: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    if LAST_FIRST:
        token = tl.num_programs(0) - 1 - token
    columns = tl.arange(0, BLOCK)
    inside = columns < hidden
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    value = tl.load(x_ptr + token * hidden + columns, mask=inside, other=0.0).to(tl.float32)
    rstd = tl.rsqrt(tl.sum(value * value, axis=0) / hidden + eps)
    tl.store(out_ptr + token * hidden + columns, (value * rstd * weight).to(out_ptr.dtype.element_ty), mask=inside)


@dataclass(frozen=True, slots=True)
class NormTiles:
    """Warps of a program; whether the last tokens come first, as in `silu_mul`."""

    num_warps: int
    last_first: bool = False


def candidates(hidden: int) -> list[NormTiles]:
    """Tiles worth measuring: two, four or one 16-byte loads of bf16 a thread at 4096 columns."""
    if hidden <= 2048:
        return [NormTiles(4), NormTiles(8), NormTiles(2), NormTiles(4, True)]
    return [NormTiles(8), NormTiles(4), NormTiles(16), NormTiles(8, True)]


def rms_norm(x: Tensor, weight: Tensor, out: Tensor, eps: float, tiles: NormTiles | None = None) -> None:
    """out = norm(x) * weight.

    Args:
        x: [num_tokens, hidden].
        weight: [hidden].
        out: [num_tokens, hidden], written.
        eps: of the norm.
        tiles: None: the first of the candidates.
    """
    num_tokens, hidden = x.shape
    tiles = tiles or candidates(hidden)[0]
    _rms_norm_kernel[(num_tokens,)](
        x,
        weight,
        out,
        hidden,
        eps,
        BLOCK=triton.next_power_of_2(hidden),
        LAST_FIRST=tiles.last_first,
        num_warps=tiles.num_warps,
    )


def rms_norm_ref(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The same in float64."""
    return F.rms_norm(x.double(), (x.shape[-1],), weight.double(), eps)
