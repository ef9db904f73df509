"""Residual addition with norm, and silu-mul, against float64."""

from __future__ import annotations

import pytest
import torch

from model_executor.kernels.add_rms_norm import add_rms_norm, add_rms_norm_ref
from model_executor.kernels.silu_mul import silu_mul, silu_mul_ref
from tests.kernels.test_small_gemm import relative_error, tolerance


@pytest.mark.parametrize("with_x", [True, False])
@pytest.mark.parametrize("hidden", [64, 200])
def test_add_rms_norm(device: torch.device, dtype: torch.dtype, hidden: int, with_x: bool) -> None:
    x = torch.randn(5, hidden, device=device, dtype=dtype) if with_x else None
    residual = torch.randn(5, hidden, device=device, dtype=dtype)
    weight = torch.rand(hidden, device=device, dtype=dtype) + 0.5
    out = torch.full_like(residual, float("nan"))
    stream, expected = add_rms_norm_ref(x, residual, weight, 1e-5)
    add_rms_norm(x, residual, weight, out, 1e-5)
    assert torch.equal(residual, stream)
    assert relative_error(out, expected) < tolerance(dtype)


def test_silu_mul(device: torch.device, dtype: torch.dtype) -> None:
    gate_up = torch.randn(3, 2 * 1500, device=device, dtype=dtype)
    out = torch.full((3, 1500), float("nan"), device=device, dtype=dtype)
    silu_mul(gate_up, out)
    assert relative_error(out, silu_mul_ref(gate_up)) < tolerance(dtype)
