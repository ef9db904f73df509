"""The cases of `python -m bench kernels`: each runs, and its bytes and FLOPs are those of its size."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from bench.attention_cases import causal_pairs
from bench.kernel_case import BEYOND_L2, MAX_COPIES, Case, Shape, Sizes, copies_for
from bench.kernel_cases import kernel_cases
from bench.random_model import SHAPES

SIZES = Sizes((2,), 3, 20, 64, ((2, 32, 0), (1, 16, 16)), 2, 64, (4, 20))


@pytest.fixture
def tiny_shape(monkeypatch: pytest.MonkeyPatch) -> Shape:
    """A model of a few kilobytes, with one copy of everything."""
    monkeypatch.setattr("bench.kernel_case.MAX_COPIES", 1)
    config = replace(
        SHAPES["8b"], hidden_size=64, num_heads=4, num_kv_heads=2, head_dim=32, intermediate_size=96, vocab_size=128
    )
    return Shape("tiny", config, torch.float32)


def cases_by_kernel(shape: Shape) -> dict[str, list[Case]]:
    cases: dict[str, list[Case]] = {}
    for case in kernel_cases([shape], SIZES):
        cases.setdefault(case.kernel, []).append(case)
    return cases


def test_every_case_runs(tiny_shape: Shape, device: torch.device) -> None:
    cases = cases_by_kernel(tiny_shape)
    for case in (case for of_kernel in cases.values() for case in of_kernel):
        work = case.make(device)
        assert len(work.launches) == 1
        work.launches[0]()
    assert len(cases["small_gemm"]) == len(cases["wide_gemm"]) == 5
    assert len(cases["torch mm"]) == 10
    assert len(cases["verify_attention"]) == 2
    assert len(cases["torch sdpa"]) == 1  # of the prompt without context


def test_bytes_and_flops(tiny_shape: Shape, device: torch.device) -> None:
    cases = cases_by_kernel(tiny_shape)
    num_bytes = {kernel: of_kernel[-1].make(device).num_bytes for kernel, of_kernel in cases.items()}
    assert num_bytes["verify_attention"] == 2 * (20 + 4) * 2 * 2 * 32 * 4
    assert num_bytes["write_kv"] == 2 * 64 * (2 + 2) * 32 * 4
    assert num_bytes["silu_mul"] == 64 * 96 * 3 * 4
    assert num_bytes["rms_norm"] == 2 * 64 * 64 * 4
    assert num_bytes["small_gemm"] == num_bytes["wide_gemm"] == num_bytes["torch mm"] == 128 * 64 * 4
    assert num_bytes["ngram_search"] == 2 * 64 * 4
    chunk = cases["prefill_attention"][-1].make(device)
    assert chunk.num_flops == 2 * 2 * 32 * 4 * sum(range(17, 33))
    assert chunk.num_bytes == 2 * 16 * 4 * 32 * 4 + 32 * 2 * 2 * 32 * 4


def test_causal_pairs() -> None:
    assert causal_pairs(3, 0) == 1 + 2 + 3
    assert causal_pairs(2, 5) == 6 + 7


def test_copies_leave_the_cache() -> None:
    assert copies_for(BEYOND_L2) == 1
    assert copies_for(BEYOND_L2 // 3 + 1) == 3
    assert copies_for(1) == MAX_COPIES
