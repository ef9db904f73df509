"""Greedy outputs in bfloat16 differ with and without drafts at near ties alone."""

from __future__ import annotations

import pytest
import torch

from bench.divergence import measure_random_model

pytestmark = pytest.mark.gpu


def test_outputs_with_and_without_drafts_differ_at_near_ties_alone() -> None:
    report = measure_random_model("1b", 4, 16, 64, 3, torch.device("cuda"))
    assert report.num_draft_tokens > 0
    assert report.num_positions > 16 * 64
    assert report.largest_gap <= 2 * report.epsilon, report
