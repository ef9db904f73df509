"""Norms and silu-mul, against float64."""

from __future__ import annotations

import pytest
import torch

from model_executor.kernels.norm_heads import norm_heads, norm_heads_ref
from model_executor.kernels.rms_norm import NormTiles, rms_norm, rms_norm_ref
from model_executor.kernels.silu_mul import SiluTiles, silu_mul, silu_mul_ref
from tests.kernels.accuracy import relative_error, tolerance


@pytest.mark.parametrize("hidden", [64, 200])
@pytest.mark.parametrize("tiles", [None, NormTiles(2), NormTiles(4, True)], ids=str)
def test_rms_norm(device: torch.device, dtype: torch.dtype, hidden: int, tiles: NormTiles | None) -> None:
    x = torch.randn(5, hidden, device=device, dtype=dtype)
    weight = torch.rand(hidden, device=device, dtype=dtype) + 0.5
    out = torch.full_like(x, float("nan"))
    rms_norm(x, weight, out, 1e-5, tiles)
    assert relative_error(out, rms_norm_ref(x, weight, 1e-5)) < tolerance(dtype)


@pytest.mark.parametrize("num_heads", [3, 8])
def test_norm_heads(device: torch.device, dtype: torch.dtype, num_heads: int) -> None:
    qkv = torch.randn(5, 10 * 32, device=device, dtype=dtype)
    weight = torch.rand(num_heads, 32, device=device, dtype=dtype) + 0.5
    before = qkv.clone()
    expected = norm_heads_ref(qkv, weight, 1e-5)
    norm_heads(qkv, weight, 1e-5)
    heads = qkv.view(5, 10, 32)
    assert relative_error(heads[:, :num_heads], expected) < tolerance(dtype)
    assert torch.equal(heads[:, num_heads:], before.view(5, 10, 32)[:, num_heads:])


@pytest.mark.parametrize("tiles", [None, SiluTiles(2048, 4), SiluTiles(512, 2, True)], ids=str)
def test_silu_mul(device: torch.device, dtype: torch.dtype, tiles: SiluTiles | None) -> None:
    gate_up = torch.randn(3, 2 * 1500, device=device, dtype=dtype)
    out = torch.full((3, 1500), float("nan"), device=device, dtype=dtype)
    silu_mul(gate_up, out, tiles)
    assert relative_error(out, silu_mul_ref(gate_up)) < tolerance(dtype)
