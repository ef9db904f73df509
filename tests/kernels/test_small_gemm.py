"""Fused matrix products of a few rows against float64."""

from __future__ import annotations

import pytest
import torch

from model_executor.kernels import wide_gemm
from model_executor.kernels.small_gemm import GemmTiles, make_norm_input, small_gemm, small_gemm_ref, tiles_for

EPS = 1e-5
TILES = GemmTiles(16, 64, 2, 2)


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


def tolerance(dtype: torch.dtype) -> float:
    return 1e-5 if dtype == torch.float32 else 1e-2


@pytest.mark.parametrize("num_tokens", [1, 4, 16])
def test_plain_bias_and_residual(device: torch.device, dtype: torch.dtype, num_tokens: int) -> None:
    x = torch.randn(num_tokens, 128, device=device, dtype=dtype)
    weight = torch.randn(96, 128, device=device, dtype=dtype)
    bias = torch.randn(96, device=device, dtype=dtype)
    residual = torch.randn(num_tokens, 96, device=device, dtype=dtype)
    out = torch.full((num_tokens, 96), float("nan"), device=device, dtype=dtype)
    small_gemm(x, weight, out, tiles=TILES)
    assert relative_error(out, small_gemm_ref(x, weight)) < tolerance(dtype)
    small_gemm(x, weight, out, bias=bias, residual=residual, tiles=TILES)
    assert relative_error(out, small_gemm_ref(x, weight, bias=bias, residual=residual)) < tolerance(dtype)


@pytest.mark.parametrize("num_tokens", [1, 5, 16])
def test_a_norm_travels_from_one_product_to_the_next(device: torch.device, dtype: torch.dtype, num_tokens: int) -> None:
    hidden, inner = 128, 64
    x = torch.randn(num_tokens, 64, device=device, dtype=dtype)
    down = torch.randn(hidden, 64, device=device, dtype=dtype) * 0.2
    residual = torch.randn(num_tokens, hidden, device=device, dtype=dtype)
    norm_weight = torch.rand(hidden, device=device, dtype=dtype) + 0.5
    gate_up = torch.randn(2 * inner, hidden, device=device, dtype=dtype) * 0.2
    stream = torch.full((num_tokens, hidden), float("nan"), device=device, dtype=dtype)
    norm_input = make_norm_input(hidden, dtype, device)
    small_gemm(x, down, stream, residual=residual, next_weight=norm_weight, next_input=norm_input, tiles=TILES)
    expected = small_gemm_ref(x, down, residual=residual)
    assert relative_error(stream, expected) < tolerance(dtype)
    out = torch.full((num_tokens, inner), float("nan"), device=device, dtype=dtype)
    scaled = norm_input.scaled[:num_tokens]
    small_gemm(scaled, gate_up, out, square_sums=norm_input.square_sums, eps=EPS, silu=True, tiles=TILES)
    assert relative_error(out, small_gemm_ref(stream, gate_up, norm_weight=norm_weight, eps=EPS, silu=True)) < (
        2 * tolerance(dtype)
    )


PRODUCTS = [(3072, 2048), (2048, 2048), (8192, 2048), (2048, 8192), (6144, 4096), (4096, 4096), (14336, 4096)]
PRODUCTS += [(4096, 14336), (11008, 4096), (4096, 11008), (896, 896), (4864, 896), (1536, 8960), (128256, 4096)]


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize(("num_columns", "inner"), PRODUCTS)
def test_tiles_fit_the_shared_memory_of_a_multiprocessor(num_columns: int, inner: int, itemsize: int) -> None:
    most = 227 << 10
    for silu in (False, True):
        small = tiles_for(num_columns, inner, silu, itemsize)
        wide = wide_gemm.tiles_for(num_columns, inner, silu, itemsize)
        for tiles, num_rows in ((small, 16), (wide, wide_gemm.MAX_TOKENS)):
            columns = tiles.block_n * (2 if silu else 1)
            assert tiles.num_stages * (columns + num_rows) * tiles.block_k * itemsize <= most
