"""silu(gate) * up over the two halves of a merged projection.

Grid: tokens x column blocks. Bytes: one read of [num_tokens, 2 * inner] and one write of half of it.
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
def _silu_mul_kernel(gate_up_ptr, out_ptr, inner, BLOCK: tl.constexpr, LAST_FIRST: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    if LAST_FIRST:
        token = tl.num_programs(0) - 1 - token
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < inner
    gate = tl.load(gate_up_ptr + token * 2 * inner + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + token * 2 * inner + inner + columns, mask=inside, other=0.0).to(tl.float32)
    result = gate * tl.sigmoid(gate) * up
    tl.store(out_ptr + token * inner + columns, result.to(out_ptr.dtype.element_ty), mask=inside)


@dataclass(frozen=True, slots=True)
class SiluTiles:
    """Columns and warps of a program; whether the last tokens come first.

    Last first reads what the product before has written last, while it may be in the L2, and leaves the first tokens
    there for the product after it. That shows in a step alone, not in the kernel's own time.
    """

    columns: int
    num_warps: int
    last_first: bool = False


def candidates() -> list[SiluTiles]:
    """Tiles worth measuring: one or two 16-byte loads of bf16 a thread from each half."""
    return [SiluTiles(1024, 4), SiluTiles(2048, 4), SiluTiles(2048, 8), SiluTiles(1024, 4, True)]


def silu_mul(gate_up: Tensor, out: Tensor, tiles: SiluTiles | None = None) -> None:
    """silu(gate) * up.

    Args:
        gate_up: [num_tokens, 2 * inner].
        out: [num_tokens, inner], written.
        tiles: None: the first of the candidates.
    """
    num_tokens, inner = out.shape
    tiles = tiles or candidates()[0]
    _silu_mul_kernel[(num_tokens, triton.cdiv(inner, tiles.columns))](
        gate_up, out, inner, BLOCK=tiles.columns, LAST_FIRST=tiles.last_first, num_warps=tiles.num_warps
    )


def silu_mul_ref(gate_up: Tensor) -> Tensor:
    """The same in float64."""
    gate, up = gate_up.double().chunk(2, dim=-1)
    return F.silu(gate) * up
