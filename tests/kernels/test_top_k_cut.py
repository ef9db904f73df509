"""Cuts without a sort against the ranking of `verifier_svc.sampling.truncation`."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from model_executor.kernels.top_k_cut import SHORT, top_k_cut
from model_executor.kernels.truncation import TruncationParams, TruncationScratch, make_truncation_scratch
from model_executor.sampling_flags import TOP_K, TOP_P
from tests.kernels.sampling_rows import VOCAB_SIZE, random_logits
from tests.kernels.truncation_rows import (
    LARGE_VOCAB_SIZE,
    flat_logits,
    kept_by_reference,
    make_params,
    near_limit,
    peaked_logits,
    places_of,
    random_params,
    rows_of,
    scaled_by,
)

# Ranked at once or searched by the size of the list; all searched; and a list that has no room for most of them.
SIZES = [(SHORT, 4096), (1, 4096), (16, 100)]


def find_cuts(
    logits: Tensor, params: TruncationParams, short: int = SHORT, capacity: int = 4096
) -> tuple[Tensor, TruncationScratch]:
    """Kept tokens, [P, vocab_size] bool, and the scratch."""
    inputs, scores = places_of(logits, params)
    scratch = make_truncation_scratch(logits.shape[0], logits.shape[1], logits.device, capacity)
    scratch.group_max.fill_(math.inf)  # nothing is read that was not written
    top_k_cut(logits, inputs, params, scores, scratch, short)
    scaled = scaled_by(logits, params)
    ids = torch.arange(logits.shape[1], device=logits.device)
    value, token = scores.cut_value[:, None], scores.cut_token[:, None]
    return ((scaled > value) | ((scaled == value) & (ids <= token))) & (scaled > -math.inf), scratch


@pytest.mark.parametrize(("short", "capacity"), SIZES)
@pytest.mark.parametrize("seed", range(4))
def test_kept_tokens(device: torch.device, dtype: torch.dtype, seed: int, short: int, capacity: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = random_logits(40, generator).to(device, dtype)
    params = random_params(40, generator, device)
    scaled = scaled_by(logits, params)
    found, scratch = find_cuts(logits, params, short, capacity)
    expected = kept_by_reference(scaled, params, has_top_p=False)
    assert (~expected & (scaled > -math.inf)).any()

    # Where few tokens are left, top_p has made its cut too; elsewhere what top_k has left is weighed for it.
    has_both = (params.flags & TOP_K != 0) & (params.flags & TOP_P != 0)
    is_done = has_both & (scratch.total == 0)
    is_weighed = has_both & (scratch.total != 0)
    assert is_done.any() or short < SHORT
    assert is_weighed.any()
    mass = (scaled.double() - scratch.largest[:, None]).exp().mul(expected).sum(-1)
    torch.testing.assert_close((scratch.total.double() * 2.0**-40)[is_weighed], mass[is_weighed], rtol=1e-5, atol=0)
    nucleus = kept_by_reference(scaled, params)
    # Rows with top_p alone lose what is too light for any nucleus, and no more.
    is_floored = (params.flags & (TOP_K | TOP_P)) == TOP_P
    assert not (found & ~expected)[is_floored].any()
    assert not (nucleus & ~found)[is_floored].any()
    assert (expected & ~found)[is_floored].any()
    expected = torch.where(is_done[:, None], nucleus, expected)
    differs = (found != expected).any(-1) & ~is_floored
    assert not (differs & ~(is_done & near_limit(scaled, params))).any()
    assert int(differs.sum()) <= 2
    assert found.any(-1).all()


def test_a_vocabulary_that_takes_several_turns(device: torch.device, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(3)
    flat, peaked = flat_logits(2, generator), peaked_logits(4, generator)
    peaked[2, 5] = peaked[3, 39_000] = 20.0  # the largest is seen in the first turn, and in the last
    logits = torch.cat([flat, peaked]).to(device, dtype)
    params = make_params(
        6,
        device,
        top_k=torch.tensor([300, 9000, 40, LARGE_VOCAB_SIZE, 50, LARGE_VOCAB_SIZE]),
        top_p=torch.tensor([1.0, 0.5, 0.9, 0.9, 1.0, 1.0]),
        min_p=torch.tensor([0.0, 0.0, 0.0, 0.0, 0.0, 1e-8]),
        vocab_size=LARGE_VOCAB_SIZE,
    )
    scaled = scaled_by(logits, params)
    found, scratch = find_cuts(logits, params)
    num_listed = scratch.num_listed[:, 0].tolist()
    assert SHORT < num_listed[0] <= 4096  # a list is searched, all tokens are, and a short list is ranked
    assert num_listed[1] > 4096
    assert num_listed[2] <= SHORT
    assert scratch.largest.tolist() == scaled.amax(-1).tolist()
    expected = kept_by_reference(scaled, params, has_top_p=False)
    nucleus = kept_by_reference(scaled, params)
    expected[2] = nucleus[2]
    for row in (0, 1, 2, 4, 5):
        assert torch.equal(found[row], expected[row]), f"row {row}"
    assert not (nucleus & ~found)[3].any()
    assert 0 < int(found[5].sum()) < LARGE_VOCAB_SIZE
    mass = (scaled[1].double() - scaled[1].max()).exp()[expected[1]].sum()
    torch.testing.assert_close(scratch.total[1].double() * 2.0**-40, mass, rtol=1e-5, atol=0)


@pytest.mark.parametrize(("short", "capacity"), SIZES)
def test_equal_scores_are_cut_by_token_id(device: torch.device, short: int, capacity: int) -> None:
    logits = torch.zeros(5, VOCAB_SIZE, device=device)
    logits[1, 0::2] = -0.0  # one value, however it is written
    logits[2, :1000] = -1.0
    logits[3] = -math.inf
    logits[3, 700] = -3e38
    logits[4] = torch.nan
    logits[4, [3, 800, 1200]] = 0.0
    params = make_params(5, device, top_k=torch.tensor([300, 300, 600, 5, 2]))
    found, _ = find_cuts(logits, params, short, capacity)
    assert found[0].nonzero().flatten().tolist() == list(range(300))
    assert found[1].nonzero().flatten().tolist() == list(range(300))
    assert found[2].nonzero().flatten().tolist() == list(range(100)) + list(range(1000, 1500))
    assert found[3].nonzero().flatten().tolist() == [700]
    assert found[4].nonzero().flatten().tolist() == [3, 800]


@pytest.mark.parametrize(("short", "capacity"), SIZES)
def test_min_p_may_leave_fewer_than_k(device: torch.device, short: int, capacity: int) -> None:
    logits = torch.full((1, VOCAB_SIZE), -9.0, device=device)
    logits[0, 200:520] = 1.0
    found, _ = find_cuts(logits, make_params(1, device, top_k=400, min_p=0.5), short, capacity)
    assert found[0].nonzero().flatten().tolist() == list(range(200, 520))


def test_top_k_counts_before_top_p_weighs(device: torch.device) -> None:
    logits = torch.zeros(1, VOCAB_SIZE, device=device)
    found, _ = find_cuts(logits, make_params(1, device, top_k=10, top_p=0.5), short=2048)
    assert found[0].nonzero().flatten().tolist() == list(range(5))


@pytest.mark.parametrize(("short", "capacity"), SIZES)
def test_a_place_does_not_depend_on_its_company(
    device: torch.device, dtype: torch.dtype, short: int, capacity: int
) -> None:
    generator = torch.Generator().manual_seed(9)
    logits = random_logits(6, generator).to(device, dtype)
    params = random_params(6, generator, device)
    together, _ = find_cuts(logits, params, short, capacity)
    for place in range(6):
        one = slice(place, place + 1)
        alone, _ = find_cuts(logits[one], rows_of(params, one), short, capacity)
        assert torch.equal(alone[0], together[place])
