"""Cuts without a sort against the ranking of `verifier_svc.sampling.truncation`."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from model_executor.kernels.sampling_scores import ProcessedScores
from model_executor.kernels.truncate_logits import truncate_logits
from model_executor.kernels.truncation_candidates import (
    FEW,
    MAX_LISTED,
    TruncationParams,
    make_truncation_scratch,
)
from model_executor.sampling_flags import MIN_P, PENALTIES, RANDOM, TOP_K, TOP_P
from tests.kernels.sampling_rows import VOCAB_SIZE, StepPlaces, random_logits
from verifier_svc.sampling.truncation import apply_min_p, rank, truncate

SIZES = [(FEW, MAX_LISTED), (100, 2000), (100, 150)]  # short lists; lists of bands; lists too long for any room
# Off often enough that each rule also stands alone.
MIN_PS = (0.0, 0.0, 0.0, 0.02, 0.5, 1.0)
TOP_KS = (VOCAB_SIZE, VOCAB_SIZE, VOCAB_SIZE, 1, 3, 50, 300, 700, VOCAB_SIZE - 1)
TOP_PS = (1.0, 1.0, 0.05, 0.31, 0.53, 0.9, 0.999)


def make_params(num_rows: int, generator: torch.Generator, device: torch.device) -> TruncationParams:
    def choose(values: tuple[float, ...]) -> Tensor:
        return torch.tensor(values)[torch.randint(0, len(values), (num_rows,), generator=generator)]

    min_p, top_k, top_p = choose(MIN_PS), choose(TOP_KS), choose(TOP_PS)
    flags = RANDOM + MIN_P * (min_p > 0) + TOP_K * (top_k < VOCAB_SIZE) + TOP_P * (top_p < 1)
    # Some rows read processed scores; those of the test are the logits themselves.
    flags += PENALTIES * (torch.rand(num_rows, generator=generator) < 0.5)
    return TruncationParams(
        flags.int().to(device),
        choose((0.25, 1.0, 2.0)).to(device),  # powers of two: a GPU's quick division is exact
        top_k.long().to(device),
        top_p.float().to(device),
        min_p.float().log().to(device),
    )


def find_cuts(
    logits: Tensor, params: TruncationParams, few: int = FEW, capacity: int = MAX_LISTED
) -> tuple[Tensor, Tensor]:
    num_places = logits.shape[0]
    device = logits.device
    inputs = StepPlaces(1, torch.arange(num_places, device=device), torch.ones_like(params.top_k))
    scores = ProcessedScores(
        params.flags,
        logits.float(),
        torch.full((num_places,), -math.inf, device=device),
        torch.full((num_places,), VOCAB_SIZE, dtype=torch.int32, device=device),
    )
    scratch = make_truncation_scratch(num_places, logits.shape[1], device, few, capacity)
    truncate_logits(logits, inputs, params, scores, scratch)
    return scores.cut_value, scores.cut_token


def kept_by(scaled: Tensor, value: Tensor, token: Tensor) -> Tensor:
    ids = torch.arange(scaled.shape[1], device=scaled.device)
    is_kept = (scaled > value[:, None]) | ((scaled == value[:, None]) & (ids <= token[:, None]))
    return is_kept & (scaled > -math.inf)


def kept_by_reference(scaled: Tensor, params: TruncationParams) -> Tensor:
    values, token_ids, _ = truncate(apply_min_p(scaled, params.log_min_p), params.top_k, params.top_p, scaled.shape[1])
    return torch.zeros_like(scaled, dtype=torch.bool).scatter_(1, token_ids, values > -math.inf)


def near_limit(scaled: Tensor, params: TruncationParams) -> Tensor:
    """Rows where some run of the ranking weighs top_p to within 1e-5: there rounding may decide."""
    values, _ = rank(apply_min_p(scaled, params.log_min_p), scaled.shape[1])
    in_top_k = torch.arange(scaled.shape[1], device=scaled.device) < params.top_k[:, None]
    probs = torch.softmax(values.double().masked_fill(~in_top_k, -math.inf), dim=-1)
    mass = probs.cumsum(-1)
    return (((mass - params.top_p[:, None].double()).abs() < 1e-5) & (probs > 0)).any(-1)


@pytest.mark.parametrize(("few", "capacity"), SIZES)
@pytest.mark.parametrize("seed", range(4))
def test_kept_tokens(device: torch.device, dtype: torch.dtype, seed: int, few: int, capacity: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = random_logits(40, generator).to(device, dtype)
    params = make_params(40, generator, device)
    scaled = logits.float() / params.temperature[:, None]
    found = kept_by(scaled, *find_cuts(logits, params, few, capacity))
    expected = kept_by_reference(scaled, params)
    differs = (found != expected).any(-1)
    assert not (differs & ~near_limit(scaled, params)).any()
    assert found.any(-1).all()
    assert int(differs.sum()) <= 2
    assert (~expected & (scaled > -math.inf)).any()


@pytest.mark.parametrize(("few", "capacity"), SIZES)
def test_equal_scores_are_cut_by_token_id(device: torch.device, few: int, capacity: int) -> None:
    logits = torch.zeros(4, VOCAB_SIZE, device=device)
    logits[1, 0::2] = -0.0  # one value, however it is written
    logits[2, :1000] = -1.0
    logits[3] = -math.inf
    logits[3, 700] = -3e38
    top_k = torch.tensor([300, 300, 600, 5], device=device)
    flags = torch.full((4,), RANDOM | TOP_K, dtype=torch.int32, device=device)
    ones = torch.ones(4, device=device)
    params = TruncationParams(flags, ones, top_k, ones, ones * -math.inf)
    found = kept_by(logits, *find_cuts(logits, params, few, capacity))
    assert found[0].nonzero().flatten().tolist() == list(range(300))
    assert found[1].nonzero().flatten().tolist() == list(range(300))
    assert found[2].nonzero().flatten().tolist() == list(range(100)) + list(range(1000, 1500))
    assert found[3].nonzero().flatten().tolist() == [700]


def test_half_of_two_equal_tokens_is_one(device: torch.device) -> None:
    logits = torch.full((1, VOCAB_SIZE), -math.inf, device=device)
    logits[0, [7, 1400]] = 1.0
    one = torch.ones(1, device=device)
    flags = torch.tensor([RANDOM | TOP_P], dtype=torch.int32, device=device)
    params = TruncationParams(flags, one, one.long() * VOCAB_SIZE, one * 0.5, one * -math.inf)
    found = kept_by(logits, *find_cuts(logits, params))
    assert found[0].nonzero().flatten().tolist() == [7]


def test_a_place_does_not_depend_on_its_company(device: torch.device, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(9)
    logits = random_logits(6, generator).to(device, dtype)
    params = make_params(6, generator, device)
    together = find_cuts(logits, params, 100, 2000)
    for place in range(6):
        one = slice(place, place + 1)
        alone = TruncationParams(
            params.flags[one],
            params.temperature[one],
            params.top_k[one],
            params.top_p[one],
            params.log_min_p[one],
        )
        value, token = find_cuts(logits[one], alone, 100, 2000)
        assert value.item() == together[0][place].item()
        assert token.item() == together[1][place].item()
