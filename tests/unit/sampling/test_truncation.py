"""Kept tokens of thousands of random rows against the reference, for every number of candidates."""

from __future__ import annotations

import math
import random

import pytest
import torch
from torch import Tensor

from common.sampling_params import SamplingParams
from tests.sampling_reference import CPU, kept_tokens, make_request
from verifier_svc.sampling.sampler import Sampler
from verifier_svc.sampling.state import SamplingState
from verifier_svc.sampling.truncation import apply_min_p, truncate

VOCAB_SIZE = 12
NUM_ROWS = 1500


def is_near_a_cut(scaled: list[float], params: SamplingParams, expected: set[int]) -> bool:
    """Whether rounding may move a cut: the reference itself changes its mind when the limits move by 1e-5."""
    for slack in (1 - 1e-5, 1 + 1e-5):
        top_p = min(params.top_p * slack, 1 - 1e-9) if params.top_p < 1.0 else 1.0
        min_p = params.min_p * slack if params.min_p < 1.0 else 1.0
        if kept_tokens(scaled, params.model_copy(update={"top_p": top_p, "min_p": min_p})) != expected:
            return True
    return False


def random_rows() -> tuple[Tensor, list[SamplingParams]]:
    """Scaled logits in eighths, so that ties are common, some of them masked; each truncation on or off."""
    rng = random.Random(8)
    rows: list[list[float]] = []
    params: list[SamplingParams] = []
    for _ in range(NUM_ROWS):
        spread = rng.choice([2, 12, 40])
        row = [rng.randint(-spread, spread) / 8 for _ in range(VOCAB_SIZE)]
        for _ in range(rng.choice([0, 0, 2, 6])):
            row[rng.randrange(VOCAB_SIZE)] = -math.inf
        rows.append(row)
        params.append(
            SamplingParams(
                top_k=rng.choice([0, rng.randint(1, VOCAB_SIZE)]),
                top_p=rng.choice([1.0, rng.uniform(0.01, 0.999)]),
                min_p=rng.choice([0.0, rng.uniform(0.01, 1.0)]),
            )
        )
    return torch.tensor(rows), params


@pytest.mark.parametrize("count", [1, 2, 4, 7, 11, 12])
def test_kept_tokens(count: int) -> None:
    """A row is decided and right, or says that it is not decided; with all tokens as candidates it is decided."""
    logits, params = random_rows()
    state = SamplingState(NUM_ROWS, VOCAB_SIZE, CPU)
    for row, row_params in enumerate(params):
        state.set_row(row, make_request(**row_params.model_dump(include={"top_k", "top_p", "min_p"})))
    masked = apply_min_p(logits, state.log_min_p)
    values, token_ids, decided = truncate(masked, state.top_k, state.top_p, count)
    num_checked = num_decided = 0
    for row, scaled in enumerate(logits.tolist()):
        expected = kept_tokens(scaled, params[row])
        if is_near_a_cut(scaled, params[row], expected):
            continue
        num_checked += 1
        if decided[row]:
            num_decided += 1
            assert set(token_ids[row, values[row] > -math.inf].tolist()) == expected, params[row]
    assert num_checked > 0.95 * NUM_ROWS
    least = {1: 0.0, VOCAB_SIZE: 1.0}.get(count, 0.1)  # one candidate never decides: its equals are unknown
    assert num_decided >= least * num_checked


def test_top_p_of_one_keeps_what_rounding_leaves_no_mass_for() -> None:
    """Beside a row that needs top_p, a row that does not: all its tokens stay, down to a probability of 1e-30."""
    scaled = torch.tensor([[0.0, -70.0, -80.0]] * 2)
    values, _, _ = truncate(scaled, torch.tensor([2, 3]), torch.tensor([1.0, 0.5]), 3)
    assert (values > -math.inf).tolist() == [[True, True, False], [True, False, False]]


@pytest.mark.parametrize("top_k", [255, 256, 300, 599])
def test_top_k_larger_than_the_usual_candidates(top_k: int) -> None:
    logits = torch.randn(600, generator=torch.Generator().manual_seed(top_k)) * 0.05
    num_draws = 4000
    state = SamplingState(1, 600, CPU)
    state.set_row(0, make_request(top_k=top_k))
    rows = torch.zeros(num_draws, dtype=torch.int64)
    unused = torch.zeros(1, 1, dtype=torch.int32)
    drawn = Sampler(state).sample(logits.expand(num_draws, -1), rows, torch.arange(num_draws), unused, torch.ones(1))
    best = set(logits.topk(top_k).indices.tolist())
    assert set(drawn.tolist()) <= best
    assert len(set(drawn.tolist())) > 0.95 * top_k
