"""One example of each rule; tests/property/test_sampling.py has the rest."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from common.errors import InvalidArgumentError
from common.types import Request
from model_executor.kernels.philox import random_words
from tests.sampling_reference import CPU, make_request
from verifier_svc.sampling.processors import Positions, process_logits
from verifier_svc.sampling.sampler import Sampler
from verifier_svc.sampling.state import SamplingState

VOCAB_SIZE = 8


def process(request: Request, prefix: Sequence[int], logits: Sequence[float] = (0.0,) * VOCAB_SIZE) -> list[float]:
    state = SamplingState(1, VOCAB_SIZE, CPU)
    state.set_row(0, request)
    token_ids = torch.zeros(1, 16, dtype=torch.int32)
    token_ids[0, : len(prefix)] = torch.tensor(prefix, dtype=torch.int32)
    at = Positions(
        torch.tensor([0]), [0], torch.tensor([len(prefix)]), token_ids, torch.tensor([len(request.prompt_token_ids)])
    )
    return process_logits(torch.tensor([list(logits)]), state, at)[0].tolist()


def test_repetition_penalty_counts_prompt_and_output_and_the_sign() -> None:
    request = make_request([1, 2], repetition_penalty=2.0)
    assert process(request, [1, 2, 3], [3.0, 3.0, -3.0, 3.0, -3.0, 0, 0, 0]) == [3.0, 1.5, -6.0, 1.5, -3.0, 0, 0, 0]


def test_presence_and_frequency_penalties_count_the_output_alone() -> None:
    request = make_request([1, 1, 1], presence_penalty=0.5, frequency_penalty=0.25)
    assert process(request, [1, 1, 1, 2, 2, 3]) == [0, 0, -1.0, -0.75, 0, 0, 0, 0]


def test_repetition_comes_before_the_other_penalties_and_the_bias() -> None:
    request = make_request([0], repetition_penalty=2.0, presence_penalty=1.0, logit_bias={3: 4.0})
    assert process(request, [0, 3], [0, 0, 0, 6.0, 0, 0, 0, 0])[3] == 6.0 / 2 - 1 + 4


@pytest.mark.parametrize(
    ("prefix", "masked"),
    [([5], {7}), ([5, 1], {2, 7}), ([5, 1, 2], {3, 7}), ([1, 2], {3, 7}), ([2], {7}), ([5, 2], {7})],
)
def test_bad_words_mask_the_token_that_would_complete_them(prefix: list[int], masked: set[int]) -> None:
    """Words of three, two and one token; the last case has a prefix too short for any word but the shortest."""
    request = make_request([5], bad_words=[[1, 2, 3], [1, 2], [7]])
    values = process(request, prefix)
    assert {token for token, value in enumerate(values) if value == -math.inf} == masked


def test_a_bad_word_does_not_match_before_the_start_of_the_prompt() -> None:
    request = make_request([1], bad_words=[[1, 1, 7], [0, 1, 6]])
    assert process(request, [1]) == [0.0] * VOCAB_SIZE


def test_a_longer_word_of_another_row_does_not_change_a_row() -> None:
    state = SamplingState(2, VOCAB_SIZE, CPU)
    state.set_row(0, make_request(bad_words=[[1, 2]]))
    state.set_row(1, make_request(bad_words=[[1, 2, 3, 4], [5]]))
    token_ids = torch.tensor([[0, 1, 0, 0], [1, 2, 3, 0]], dtype=torch.int32)
    at = Positions(torch.tensor([0, 1]), [0, 1], torch.tensor([2, 3]), token_ids, torch.tensor([1, 1]))
    masked = process_logits(torch.zeros(2, VOCAB_SIZE), state, at) == -math.inf
    assert masked.nonzero().tolist() == [[0, 2], [1, 4], [1, 5]]


@pytest.mark.parametrize(("num_output", "is_masked"), [(0, True), (1, True), (2, False), (3, False)])
def test_min_tokens_masks_stop_tokens_until_there_are_enough(num_output: int, is_masked: bool) -> None:
    request = make_request([1, 1], min_tokens=2, stop=[4, 6])
    values = process(request, [1, 1] + [2] * num_output)
    assert {token for token, value in enumerate(values) if value == -math.inf} == ({4, 6} if is_masked else set())


def draw(logits: Sequence[float], seed: int = 0, **params: Any) -> int:
    state = SamplingState(1, len(logits), CPU)
    state.set_row(0, make_request(seed=seed, **params))
    zero = torch.zeros(1, dtype=torch.int64)
    return int(Sampler(state).sample(torch.tensor([list(logits)]), zero, zero + 1, torch.zeros(1, 4).int(), zero + 1))


@pytest.mark.parametrize("seed", [5, 5 + 2**32, 2**63 - 1, 2**63, 2**64 - 1])
def test_all_64_bits_of_the_seed_count(seed: int) -> None:
    """Equal logits: the drawn token is the one with the smallest word, since noise falls as the word grows."""
    state = SamplingState(1, 64, CPU)
    state.set_row(0, make_request(seed=seed))
    positions = torch.arange(1, 50)
    rows = torch.zeros_like(positions)
    drawn = Sampler(state).sample(torch.zeros(49, 64), rows, positions, torch.zeros(1, 64).int(), torch.ones(1))
    signed = torch.tensor(seed if seed < 2**63 else seed - 2**64)
    assert torch.equal(drawn, random_words(signed.expand(49), positions, 64).argmin(-1))


@pytest.mark.parametrize("params", [{"temperature": 0.0}, {"temperature": 9e-6}, {"top_k": 1}, {"top_p": 1e-9}])
def test_lowest_token_id_wins_a_tie(params: dict[str, Any]) -> None:
    """Greedy, and truncated to a single token: of equal logits the first."""
    for seed in range(20):
        assert draw([0.0, 2.0, 1.0, 2.0, 2.0], seed, **params) == 1


def test_min_p_of_one_keeps_all_equally_likely_best_tokens() -> None:
    assert {draw([2.0, 0.0, 2.0, 1.9], seed, min_p=1.0) for seed in range(50)} == {0, 2}


def test_top_k_above_the_vocabulary_and_top_p_one_are_off() -> None:
    state = SamplingState(2, VOCAB_SIZE, CPU)
    state.set_row(0, make_request())
    state.set_row(1, make_request(top_k=VOCAB_SIZE, top_p=1.0, min_p=0.0))
    assert state.flags[0] == state.flags[1]


@pytest.mark.parametrize("params", [{}, {"temperature": 0.0}, {"top_p": 0.9}, {"top_k": 3}, {"min_p": 0.1}])
def test_broken_logits_still_draw_a_token_of_the_vocabulary(params: dict[str, Any]) -> None:
    """NaN or nothing left: the request is lost, but the engine must not meet a token id that does not exist."""
    for value in (math.nan, -math.inf):
        assert 0 <= draw([value] * VOCAB_SIZE, **params) < VOCAB_SIZE
        assert 0 <= draw([value] * 600, **params) < 600


@pytest.mark.parametrize("top_p", [0.5, 0.9, 0.999])
def test_flat_and_tied_logits_are_ranked_in_full(top_p: float) -> None:
    """600 equal logits: the best few decide nothing, and the kept tokens are the lowest ids."""
    drawn = {draw([0.0] * 600, seed, top_p=top_p) for seed in range(300)}
    assert max(drawn) < math.ceil(600 * top_p) + 1
    assert len(drawn) > 150
    assert {draw([0.0] * 600, seed, top_k=3) for seed in range(50)} == {0, 1, 2}


def test_too_many_stop_tokens_are_refused() -> None:
    state = SamplingState(1, 1000, CPU)
    with pytest.raises(InvalidArgumentError, match="stop_token_ids = '145 entries': expected at most 144"):
        state.set_row(0, make_request(stop=range(145)))
