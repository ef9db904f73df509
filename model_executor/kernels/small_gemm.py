"""Matrix product of a few rows, with the norm before it and what follows it in the same kernel.

For at most `MAX_TOKENS` rows, where the time is that of reading the weights once. `fused_gemm` says what goes with the
product.

Grid: one program for every BLOCK_N columns of y, all of K each; the weights stream through once (evict_first), x comes
from the L2. Bytes: N * K weights, and N / BLOCK_N times x from the L2, which is why the rows are few.
"""

# pyright: reportCallIssue=false, reportArgumentType=false
# Triton's launch syntax and its constexpr values have no types that pyright follows.
from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from model_executor.kernels.fused_gemm import Epilogue, NormInput

MAX_TOKENS = 16


@triton.jit
def _small_gemm_kernel(
    x_ptr,  # [num_tokens, K]
    w_ptr,  # [N, K], with SILU [2 * N, K]: gate, then up
    y_ptr,  # [num_tokens, N]
    bias_ptr,  # [N]
    sums_in_ptr,  # [num_parts, BLOCK_M] float32
    residual_ptr,  # [num_tokens, N]
    next_weight_ptr,  # [N]
    scaled_ptr,  # [num_tokens, N]
    sums_out_ptr,  # [N // BLOCK_N, BLOCK_M] float32
    num_tokens: tl.constexpr,  # as a variable, 2 to 15 tokens take a sixth longer with the 2048 x 8192 product
    N,
    num_parts,
    eps,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_PARTS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    HAS_NEXT: tl.constexpr,
    SILU: tl.constexpr,
):
    block = tl.program_id(0).to(tl.int64)
    columns = block * BLOCK_N + tl.arange(0, BLOCK_N)
    tokens = tl.arange(0, BLOCK_M)
    inner = tl.arange(0, BLOCK_K)
    is_token = tokens < num_tokens
    w_tile = w_ptr + columns[:, None] * K + inner[None, :]
    x_tile = x_ptr + tokens[None, :] * K + inner[:, None]
    place = tokens[None, :] * N + columns[:, None]
    # What the end needs is asked for before the loop: its latency passes while the weights stream.
    if HAS_NORM:
        parts = tl.arange(0, BLOCK_PARTS)
        sums = tl.load(
            sums_in_ptr + parts[:, None] * BLOCK_M + tokens[None, :], mask=parts[:, None] < num_parts, other=0.0
        )
    if HAS_BIAS:
        bias = tl.load(bias_ptr + columns)
    if HAS_RESIDUAL:
        residual = tl.load(residual_ptr + place, mask=is_token[None, :], other=0.0)
    if HAS_NEXT:
        next_weight = tl.load(next_weight_ptr + columns)
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    acc_up = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for k in range(0, K, BLOCK_K):
        w = tl.load(w_tile + k, eviction_policy="evict_first")
        x = tl.load(x_tile + k, mask=is_token[None, :], other=0.0)
        acc = tl.dot(w, x, acc, input_precision="ieee")
        if SILU:
            w_up = tl.load(w_tile + N.to(tl.int64) * K + k, eviction_policy="evict_first")
            acc_up = tl.dot(w_up, x, acc_up, input_precision="ieee")
    if HAS_NORM:
        rstd = tl.rsqrt(tl.sum(sums, axis=0) / K + eps)  # [BLOCK_M]
        acc = acc * rstd[None, :]
        acc_up = acc_up * rstd[None, :]
    if HAS_BIAS:
        acc += bias[:, None].to(tl.float32)
    if SILU:
        acc = acc * tl.sigmoid(acc) * acc_up
    if HAS_RESIDUAL:
        acc += residual.to(tl.float32)
    y = acc.to(y_ptr.dtype.element_ty)
    tl.store(y_ptr + place, y, mask=is_token[None, :])
    if HAS_NEXT:
        y = y.to(tl.float32)  # as the next kernel would have read it
        scaled = y * next_weight.to(tl.float32)[:, None]
        tl.store(scaled_ptr + place, scaled.to(scaled_ptr.dtype.element_ty), mask=is_token[None, :])
        tl.store(sums_out_ptr + block * BLOCK_M + tokens, tl.sum(y * y, axis=0))


@dataclass(frozen=True, slots=True)
class GemmTiles:
    """How one product is cut: columns and inner elements of a tile, warps and pipeline stages of a program."""

    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


def tiles_for(num_columns: int, inner: int, silu: bool, itemsize: int = 2) -> GemmTiles:
    """Best of 26 to 86 ways each, measured on an H200 with the shapes of an 8B and a 1B Llama and 1 to 16 rows.

    Tiles divide the product: `fits` says which products can be cut so.
    """
    if silu:
        tiles = GemmTiles(32, 128, 2, 4) if inner <= 2048 else GemmTiles(64, 128, 4, 3)
    elif num_columns > 65536:
        tiles = GemmTiles(128, 128, 8, 3)
    elif num_columns <= 2048:
        tiles = GemmTiles(16, 512, 2, 4)
    elif num_columns <= 3072:
        tiles = GemmTiles(32, 512, 2, 4)
    elif num_columns <= 4096:
        tiles = GemmTiles(16, 256, 2, 4) if inner <= 8192 else GemmTiles(32, 256, 2, 6)
    else:
        tiles = GemmTiles(64, 128, 4, 6)
    block_k = tiles.block_k * 2 // itemsize  # float32 has the same shared memory
    return GemmTiles(math.gcd(num_columns, tiles.block_n), math.gcd(inner, block_k), tiles.num_warps, tiles.num_stages)


def fits(num_columns: int, inner: int) -> bool:
    """Whether `small_gemm` can do a product of this shape: tiles of at least 16 must divide it."""
    return num_columns % 16 == 0 and inner % 16 == 0


def small_gemm(x: Tensor, weight: Tensor, out: Tensor, epilogue: Epilogue, tiles: GemmTiles | None = None) -> None:
    """out = epilogue(x @ weight.T).

    Args:
        x: [num_tokens, K], at most MAX_TOKENS rows.
        weight: [N, K], or [2 * N, K].
        out: [num_tokens, N], written.
        epilogue: norms of buffers of `make_norm_input`.
        tiles: None: measured ones.
    """
    num_tokens, inner = x.shape
    columns = out.shape[1]
    tiles = tiles or tiles_for(columns, inner, epilogue.silu, x.element_size())
    _small_gemm_kernel[(triton.cdiv(columns, tiles.block_n),)](
        x,
        weight,
        out,
        *epilogue.tensors(unused=x),
        num_tokens,
        columns,
        epilogue.num_parts,
        epilogue.eps,
        K=inner,
        BLOCK_M=MAX_TOKENS,
        BLOCK_N=tiles.block_n,
        BLOCK_K=tiles.block_k,
        **epilogue.constants(),
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )


def make_norm_input(num_columns: int, dtype: torch.dtype, device: torch.device) -> NormInput:
    """Buffers that `small_gemm` fills for a norm over `num_columns`, however it cuts the product."""
    parts = triton.cdiv(num_columns, 16)
    return NormInput(
        scaled=torch.zeros(MAX_TOKENS, num_columns, dtype=dtype, device=device),
        square_sums=torch.zeros(parts, MAX_TOKENS, dtype=torch.float32, device=device),
    )
