"""Fused matrix products of some dozens of rows against float64."""

from __future__ import annotations

import pytest
import torch

from model_executor.kernels.small_gemm import small_gemm_ref
from model_executor.kernels.wide_gemm import (
    MAX_TOKENS,
    SplitParts,
    WideTiles,
    make_split_parts,
    make_wide_norm_input,
    tiles_for,
    wide_gemm,
)

EPS = 1e-5
NUM_TOKENS = (1, 17, MAX_TOKENS)


@pytest.fixture
def parts(device: torch.device) -> SplitParts:
    made = make_split_parts(device)
    made.parts.fill_(torch.nan)  # a part that nobody writes shows
    return made


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


def tolerance(dtype: torch.dtype) -> float:
    return 1e-5 if dtype == torch.float32 else 1e-2


@pytest.mark.parametrize("num_splits", [1, 3])
@pytest.mark.parametrize("num_tokens", NUM_TOKENS)
def test_plain_bias_and_residual(
    device: torch.device, dtype: torch.dtype, parts: SplitParts, num_tokens: int, num_splits: int
) -> None:
    tiles = WideTiles(32, 32, num_splits, 4, 2)
    x = torch.randn(num_tokens, 256, device=device, dtype=dtype)
    weight = torch.randn(96, 256, device=device, dtype=dtype)
    bias = torch.randn(96, device=device, dtype=dtype)
    residual = torch.randn(num_tokens, 96, device=device, dtype=dtype)
    out = torch.full((num_tokens, 96), float("nan"), device=device, dtype=dtype)
    wide_gemm(x, weight, out, parts=parts, tiles=tiles)
    assert relative_error(out, small_gemm_ref(x, weight)) < tolerance(dtype)
    wide_gemm(x, weight, out, parts=parts, bias=bias, residual=residual, tiles=tiles)
    assert relative_error(out, small_gemm_ref(x, weight, bias=bias, residual=residual)) < tolerance(dtype)
    assert not parts.arrived.any()


@pytest.mark.parametrize("num_tokens", NUM_TOKENS)
def test_a_norm_travels_from_one_product_to_the_next(
    device: torch.device, dtype: torch.dtype, parts: SplitParts, num_tokens: int
) -> None:
    """With the tiles that steps use."""
    hidden, inner = 128, 64
    x = torch.randn(num_tokens, 64, device=device, dtype=dtype)
    down = torch.randn(hidden, 64, device=device, dtype=dtype) * 0.2
    residual = torch.randn(num_tokens, hidden, device=device, dtype=dtype)
    norm_weight = torch.rand(hidden, device=device, dtype=dtype) + 0.5
    gate_up = torch.randn(2 * inner, hidden, device=device, dtype=dtype) * 0.2
    stream = torch.full((num_tokens, hidden), float("nan"), device=device, dtype=dtype)
    norm_input = make_wide_norm_input(hidden, dtype, device)
    wide_gemm(x, down, stream, parts=parts, residual=residual, next_weight=norm_weight, next_input=norm_input)
    expected = small_gemm_ref(x, down, residual=residual)
    assert relative_error(stream, expected) < tolerance(dtype)
    out = torch.full((num_tokens, inner), float("nan"), device=device, dtype=dtype)
    scaled = norm_input.scaled[:num_tokens]
    wide_gemm(scaled, gate_up, out, parts=parts, square_sums=norm_input.square_sums, eps=EPS, silu=True)
    assert relative_error(out, small_gemm_ref(stream, gate_up, norm_weight=norm_weight, eps=EPS, silu=True)) < (
        2 * tolerance(dtype)
    )


def test_splits_of_one_product_do_not_depend_on_their_order(device: torch.device, parts: SplitParts) -> None:
    """The same bits each time, though splits finish in any order."""
    x = torch.randn(33, 512, device=device)
    weight = torch.randn(64, 512, device=device)
    outs = [torch.empty(33, 64, device=device) for _ in range(4)]
    for out in outs:
        wide_gemm(x, weight, out, parts=parts, tiles=WideTiles(32, 32, 8, 4, 2))
    assert relative_error(outs[0], small_gemm_ref(x, weight)) < tolerance(torch.float32)
    assert all(torch.equal(out, outs[0]) for out in outs)


def test_tiles_that_the_parts_have_no_room_for(device: torch.device, parts: SplitParts) -> None:
    x, weight, out = (torch.zeros(size, device=device) for size in ((1, 32), (256, 32), (1, 128)))
    with pytest.raises(ValueError, match="2 splits of 128 columns, silu = True"):
        wide_gemm(x, weight, out, parts=parts, silu=True, tiles=WideTiles(32, 32, 2, 4, 2))
    with pytest.raises(ValueError, match="65 splits of 128 columns"):
        wide_gemm(x, weight[:128], out, parts=parts, tiles=WideTiles(32, 32, 65, 4, 2))


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize(
    ("num_columns", "inner"), [(6144, 4096), (4096, 14336), (2048, 2048), (144, 48), (128256, 512)]
)
def test_tiles_divide_the_product_and_fit_the_room_for_splits(num_columns: int, inner: int, itemsize: int) -> None:
    room = make_split_parts(torch.device("cpu"))
    for silu in (False, True):
        tiles = tiles_for(num_columns, inner, silu, itemsize)
        assert num_columns % tiles.block_n == 0
        assert inner % tiles.block_k == 0
        assert tiles.num_splits == 1 or (
            num_columns * tiles.num_splits * MAX_TOKENS <= room.parts.numel()
            and num_columns // tiles.block_n <= room.arrived.numel()
        )
