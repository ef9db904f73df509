"""How fused products are cut, for the shapes of models that people serve."""

from __future__ import annotations

import pytest
import torch

from model_executor.kernels import small_gemm, wide_gemm

PRODUCTS = [(3072, 2048), (2048, 2048), (8192, 2048), (2048, 8192), (6144, 4096), (4096, 4096), (14336, 4096)]
PRODUCTS += [(4096, 14336), (11008, 4096), (4096, 11008), (896, 896), (4864, 896), (1536, 8960), (128256, 4096)]
PRODUCTS += [(144, 48), (128256, 512)]


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize(("num_columns", "inner"), PRODUCTS)
def test_tiles_fit_the_shared_memory_of_a_multiprocessor(num_columns: int, inner: int, itemsize: int) -> None:
    most = 227 << 10
    for silu in (False, True):
        small = small_gemm.tiles_for(num_columns, inner, silu, itemsize)
        wide = wide_gemm.tiles_for(num_columns, inner, silu, itemsize)
        for tiles, num_rows in ((small, small_gemm.MAX_TOKENS), (wide, wide_gemm.MAX_TOKENS)):
            columns = tiles.block_n * (2 if silu else 1)
            assert tiles.num_stages * (columns + num_rows) * tiles.block_k * itemsize <= most


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize(("num_columns", "inner"), PRODUCTS)
def test_tiles_divide_the_product_and_fit_the_room_for_splits(num_columns: int, inner: int, itemsize: int) -> None:
    room = wide_gemm.make_split_parts(torch.device("cpu"))
    for silu in (False, True):
        small = small_gemm.tiles_for(num_columns, inner, silu, itemsize)
        wide = wide_gemm.tiles_for(num_columns, inner, silu, itemsize)
        for tiles in (small, wide):
            assert num_columns % tiles.block_n == 0
            assert inner % tiles.block_k == 0
        assert wide.num_splits == 1 or (
            num_columns * wide.num_splits * wide_gemm.MAX_TOKENS <= room.parts.numel()
            and num_columns // wide.block_n <= room.arrived.numel()
        )
