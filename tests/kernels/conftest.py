"""Kernel tests run under Triton's interpreter on a CPU, and natively on a GPU (`pytest -m gpu`)."""

from __future__ import annotations

import os

import pytest
import torch

HAS_GPU = torch.cuda.is_available()
if not HAS_GPU:
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda" if HAS_GPU else "cpu")


@pytest.fixture
def dtype() -> torch.dtype:
    return torch.bfloat16 if HAS_GPU else torch.float32
