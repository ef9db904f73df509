"""Matrix product of some dozens of rows, with the norm before it and what follows it in the same kernel.

What `small_gemm` is for up to 16 rows, for up to 64; `fused_gemm` says what goes with the product. More rows make x as
much to read as the weights: tiles are loaded by the GPU's copy engine, a program keeps 64 rows at once, and products
with few columns are split over K as well.

Grid: column blocks x splits of K. The last program of a column block to finish adds the parts up in their order, so
that the result does not depend on which one that is. Bytes: N * K weights, once, and N / BLOCK_N times x from the L2.
"""

# pyright: reportCallIssue=false, reportArgumentType=false
# Triton's launch syntax and its constexpr values have no types that pyright follows.
from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from model_executor.kernels.fused_gemm import Epilogue, NormInput

MAX_TOKENS: Final = 64

_FULL_COLUMNS: Final = 8192
"""Products of fewer columns are split over K: 64 columns a program would leave multiprocessors without one."""

_MAX_SPLITS: Final = 8


@triton.jit
def _wide_gemm_kernel(
    x_desc,  # [num_tokens, K], in blocks of [MAX_TOKENS, BLOCK_K]
    w_desc,  # [N, K], with SILU [2 * N, K]: gate, then up; in blocks of [BLOCK_N, BLOCK_K]
    y_ptr,  # [num_tokens, N]
    bias_ptr,  # [N]
    sums_in_ptr,  # [num_parts, ROWS] float32
    residual_ptr,  # [num_tokens, N]
    next_weight_ptr,  # [N]
    scaled_ptr,  # [num_tokens, N]
    sums_out_ptr,  # [N // BLOCK_N, ROWS] float32
    part_ptr,  # [N // BLOCK_N, SPLITS, ROWS, BLOCK_N] float32
    arrived_ptr,  # [N // BLOCK_N] int32, zero before and after
    num_tokens,
    N,
    num_parts,
    eps,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_PARTS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    HAS_NEXT: tl.constexpr,
    SILU: tl.constexpr,
):
    block = tl.program_id(0)
    split = tl.program_id(1)
    first = block * BLOCK_N
    columns = first + tl.arange(0, BLOCK_N)
    tokens = tl.arange(0, ROWS)
    is_token = tokens < num_tokens
    place = tokens[:, None] * N + columns[None, :]
    if HAS_NORM:  # asked for before the loop: its latency passes while the weights stream
        rows = tl.arange(0, BLOCK_PARTS)
        sums = tl.load(sums_in_ptr + rows[:, None] * ROWS + tokens[None, :], mask=rows[:, None] < num_parts, other=0.0)
    steps: tl.constexpr = K // BLOCK_K
    acc = tl.zeros((ROWS, BLOCK_N), tl.float32)
    acc_up = tl.zeros((ROWS, BLOCK_N), tl.float32)
    for step in range(split * steps // SPLITS, (split + 1) * steps // SPLITS):
        k = step * BLOCK_K
        x = x_desc.load([0, k])
        acc = tl.dot(x, w_desc.load([first, k]).T, acc, input_precision="ieee")
        if SILU:
            acc_up = tl.dot(x, w_desc.load([N + first, k]).T, acc_up, input_precision="ieee")
    if SPLITS > 1:
        inside = tokens[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
        parts = part_ptr + block * (SPLITS * ROWS * BLOCK_N) + inside
        tl.store(parts + split * (ROWS * BLOCK_N), acc, mask=is_token[:, None])
        tl.debug_barrier()  # all stores of this program stand before its arrival
        if tl.atomic_add(arrived_ptr + block, 1, sem="acq_rel") < SPLITS - 1:
            return
        tl.store(arrived_ptr + block, 0)
        acc = tl.zeros((ROWS, BLOCK_N), tl.float32)
        for other in tl.static_range(SPLITS):  # unrolled: the loads of all parts are under way together
            acc += tl.load(parts + other * (ROWS * BLOCK_N), mask=is_token[:, None], other=0.0)
    if HAS_NORM:
        rstd = tl.rsqrt(tl.sum(sums, axis=0) / K + eps)  # [ROWS]
        acc = acc * rstd[:, None]
        acc_up = acc_up * rstd[:, None]
    if HAS_BIAS:
        acc += tl.load(bias_ptr + columns)[None, :].to(tl.float32)
    if SILU:
        acc = acc * tl.sigmoid(acc) * acc_up
    if HAS_RESIDUAL:
        acc += tl.load(residual_ptr + place, mask=is_token[:, None], other=0.0).to(tl.float32)
    y = acc.to(y_ptr.dtype.element_ty)
    tl.store(y_ptr + place, y, mask=is_token[:, None])
    if HAS_NEXT:
        y = y.to(tl.float32)  # as the next kernel would have read it
        scaled = y * tl.load(next_weight_ptr + columns)[None, :].to(tl.float32)
        tl.store(scaled_ptr + place, scaled.to(scaled_ptr.dtype.element_ty), mask=is_token[:, None])
        tl.store(sums_out_ptr + block * ROWS + tokens, tl.sum(y * y, axis=1))


@dataclass(frozen=True, slots=True)
class WideTiles:
    """How one product is cut: columns and inner elements of a tile, splits of K, warps and stages of a program."""

    block_n: int
    block_k: int
    num_splits: int
    num_warps: int
    num_stages: int


def _block_n(num_columns: int, silu: bool, itemsize: int) -> int:
    if itemsize > 2:  # float32 has no tensor cores, and registers for less
        return math.gcd(num_columns, 32)
    return math.gcd(num_columns, 128 if num_columns > (8192 if silu else 65536) else 64)


def tiles_for(num_columns: int, inner: int, silu: bool, itemsize: int = 2) -> WideTiles:
    """Best of 14 to 98 ways each, measured on an H200 with the shapes of an 8B and a 1B Llama and 32 and 64 rows.

    Tiles divide the product: `small_gemm.fits` says which products can be cut so.
    """
    block_k = 32 if itemsize > 2 else 64 if silu and num_columns > 8192 else 128
    num_splits = 1 if silu else max(1, min(_MAX_SPLITS, _FULL_COLUMNS // num_columns))
    return WideTiles(_block_n(num_columns, silu, itemsize), math.gcd(inner, block_k), num_splits, 4, 4)


@dataclass(frozen=True, slots=True)
class SplitParts:
    """Where splits leave their sums. Products run one after the other and share it."""

    parts: Tensor  # [_FULL_COLUMNS * MAX_TOKENS] float32
    arrived: Tensor  # [_FULL_COLUMNS // 16] int32, zero between launches


def make_split_parts(device: torch.device) -> SplitParts:
    """Room for any product that is split: columns times splits are at most `_FULL_COLUMNS`."""
    return SplitParts(
        parts=torch.empty(_FULL_COLUMNS * MAX_TOKENS, dtype=torch.float32, device=device),
        arrived=torch.zeros(_FULL_COLUMNS // 16, dtype=torch.int32, device=device),
    )


def wide_gemm(
    x: Tensor, weight: Tensor, out: Tensor, epilogue: Epilogue, parts: SplitParts, tiles: WideTiles | None = None
) -> None:
    """out = epilogue(x @ weight.T).

    Args:
        x: [num_tokens, K], at most MAX_TOKENS rows.
        weight: [N, K], or [2 * N, K].
        out: [num_tokens, N], written.
        epilogue: norms of buffers of `make_wide_norm_input`.
        parts: of `make_split_parts`.
        tiles: None: measured ones.
    """
    num_tokens, inner = x.shape
    columns = out.shape[1]
    tiles = tiles or tiles_for(columns, inner, epilogue.silu, x.element_size())
    if tiles.num_splits > 1 and (epilogue.silu or columns * tiles.num_splits > _FULL_COLUMNS):
        raise ValueError(f"{tiles.num_splits} splits of {columns} columns, silu = {epilogue.silu}: no room for parts")
    _wide_gemm_kernel[(columns // tiles.block_n, tiles.num_splits)](
        TensorDescriptor.from_tensor(x, [MAX_TOKENS, tiles.block_k]),
        TensorDescriptor.from_tensor(weight, [tiles.block_n, tiles.block_k]),
        out,
        *epilogue.tensors(unused=x),
        parts.parts,
        parts.arrived,
        num_tokens,
        columns,
        epilogue.num_parts,
        epilogue.eps,
        K=inner,
        ROWS=MAX_TOKENS,
        BLOCK_N=tiles.block_n,
        BLOCK_K=tiles.block_k,
        SPLITS=tiles.num_splits,
        **epilogue.constants(),
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )


def make_wide_norm_input(num_columns: int, dtype: torch.dtype, device: torch.device) -> NormInput:
    """Buffers that `wide_gemm` fills for a norm over `num_columns`, with the tiles of its own choice."""
    block_n = _block_n(num_columns, silu=False, itemsize=dtype.itemsize)
    return NormInput(
        scaled=torch.zeros(MAX_TOKENS, num_columns, dtype=dtype, device=device),
        square_sums=torch.zeros(num_columns // block_n, MAX_TOKENS, dtype=torch.float32, device=device),
    )
