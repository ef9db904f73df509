"""Fused matrix products of a few rows and of some dozens, against float64."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch

from model_executor.kernels.fused_gemm import Epilogue, fused_gemm_ref
from model_executor.kernels.small_gemm import GemmTiles, make_norm_input, small_gemm
from model_executor.kernels.wide_gemm import (
    MAX_TOKENS,
    SplitParts,
    WideTiles,
    make_split_parts,
    make_wide_norm_input,
    wide_gemm,
)
from tests.kernels.accuracy import relative_error, tolerance

EPS = 1e-5
SMALL_TILES = GemmTiles(16, 64, 2, 2)
SIZES = [("small", 1), ("small", 5), ("small", 16), ("wide", 1), ("wide", 17), ("wide", MAX_TOKENS)]

Product = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Epilogue], None]


@pytest.fixture
def parts(device: torch.device) -> SplitParts:
    made = make_split_parts(device)
    made.parts.fill_(torch.nan)  # a part that nobody writes shows
    return made


def check_bias_and_residual(product: Product, device: torch.device, dtype: torch.dtype, num_tokens: int) -> None:
    x = torch.randn(num_tokens, 256, device=device, dtype=dtype)
    weight = torch.randn(96, 256, device=device, dtype=dtype)
    bias = torch.randn(96, device=device, dtype=dtype)
    residual = torch.randn(num_tokens, 96, device=device, dtype=dtype)
    out = torch.full((num_tokens, 96), float("nan"), device=device, dtype=dtype)
    product(x, weight, out, Epilogue())
    assert relative_error(out, fused_gemm_ref(x, weight)) < tolerance(dtype)
    product(x, weight, out, Epilogue(bias=bias, residual=residual))
    assert relative_error(out, fused_gemm_ref(x, weight, bias=bias, residual=residual)) < tolerance(dtype)


@pytest.mark.parametrize("num_tokens", [1, 4, 16])
def test_bias_and_residual_of_a_few_rows(device: torch.device, dtype: torch.dtype, num_tokens: int) -> None:
    check_bias_and_residual(partial(small_gemm, tiles=SMALL_TILES), device, dtype, num_tokens)


@pytest.mark.parametrize("num_splits", [1, 3])
@pytest.mark.parametrize("num_tokens", [1, 17, MAX_TOKENS])
def test_bias_and_residual_of_some_dozens(
    device: torch.device, dtype: torch.dtype, parts: SplitParts, num_tokens: int, num_splits: int
) -> None:
    product = partial(wide_gemm, parts=parts, tiles=WideTiles(32, 32, num_splits, 4, 2))
    check_bias_and_residual(product, device, dtype, num_tokens)
    assert not parts.arrived.any()


@pytest.mark.parametrize(("kind", "num_tokens"), SIZES)
def test_a_norm_travels_from_one_product_to_the_next(
    device: torch.device, dtype: torch.dtype, parts: SplitParts, kind: str, num_tokens: int
) -> None:
    product, make = partial(small_gemm, tiles=SMALL_TILES), make_norm_input
    if kind == "wide":  # with the tiles that steps use: its norms have no others
        product, make = partial(wide_gemm, parts=parts), make_wide_norm_input
    hidden, inner = 128, 64
    x = torch.randn(num_tokens, 64, device=device, dtype=dtype)
    down = torch.randn(hidden, 64, device=device, dtype=dtype) * 0.2
    residual = torch.randn(num_tokens, hidden, device=device, dtype=dtype)
    norm_weight = torch.rand(hidden, device=device, dtype=dtype) + 0.5
    gate_up = torch.randn(2 * inner, hidden, device=device, dtype=dtype) * 0.2
    stream = torch.full((num_tokens, hidden), float("nan"), device=device, dtype=dtype)
    norm_input = make(hidden, dtype, device)
    product(x, down, stream, Epilogue(residual=residual, next_weight=norm_weight, next_input=norm_input))
    assert relative_error(stream, fused_gemm_ref(x, down, residual=residual)) < tolerance(dtype)
    out = torch.full((num_tokens, inner), float("nan"), device=device, dtype=dtype)
    scaled = norm_input.scaled[:num_tokens]
    product(scaled, gate_up, out, Epilogue(square_sums=norm_input.square_sums, eps=EPS, silu=True))
    expected = fused_gemm_ref(stream, gate_up, norm_weight=norm_weight, eps=EPS, silu=True)
    assert relative_error(out, expected) < 2 * tolerance(dtype)


def test_splits_of_one_product_do_not_depend_on_their_order(device: torch.device, parts: SplitParts) -> None:
    """The same bits each time, though splits finish in any order."""
    x = torch.randn(33, 512, device=device)
    weight = torch.randn(64, 512, device=device)
    outs = [torch.empty(33, 64, device=device) for _ in range(4)]
    for out in outs:
        wide_gemm(x, weight, out, Epilogue(), parts, WideTiles(32, 32, 8, 4, 2))
    assert relative_error(outs[0], fused_gemm_ref(x, weight)) < tolerance(torch.float32)
    assert all(torch.equal(out, outs[0]) for out in outs)


def test_tiles_that_the_parts_have_no_room_for(device: torch.device, parts: SplitParts) -> None:
    x, weight, out = (torch.zeros(size, device=device) for size in ((1, 32), (256, 32), (1, 128)))
    with pytest.raises(ValueError, match="2 splits of 128 columns, silu = True"):
        wide_gemm(x, weight, out, Epilogue(silu=True), parts, WideTiles(32, 32, 2, 4, 2))
    with pytest.raises(ValueError, match="65 splits of 128 columns"):
        wide_gemm(x, weight[:128], out, Epilogue(), parts, WideTiles(32, 32, 65, 4, 2))
