"""Log probabilities: from the raw logits, chosen token first, rank by strictly better tokens."""

from __future__ import annotations

import math

import pytest
import torch

from common.types import TokenLogprobs
from verifier_svc.sampling.logprobs import gather_logprobs


def test_chosen_token_first_then_the_best() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0, -1.0]])
    (entry,) = gather_logprobs(logits, torch.tensor([3]), 2)
    log_total = math.log(sum(math.exp(value) for value in (0.0, 2.0, 1.0, -1.0)))
    assert isinstance(entry, TokenLogprobs)
    assert entry.token_ids == [3, 1, 2]
    assert entry.logprobs == pytest.approx([-1.0 - log_total, 2.0 - log_total, 1.0 - log_total], abs=1e-6)
    assert entry.rank == 4
    assert all(type(token) is int for token in entry.token_ids)
    assert all(type(value) is float for value in entry.logprobs)
    assert type(entry.rank) is int


@pytest.mark.parametrize(
    ("num_logprobs", "token_ids"), [(0, [1]), (1, [1, 0]), (3, [1, 0, 2, 1]), (20, [1, 0, 2, 1, 3])]
)
def test_number_of_entries(num_logprobs: int, token_ids: list[int]) -> None:
    """0 lists the chosen token alone; more than the vocabulary lists the vocabulary. Equal values come by token id."""
    (entry,) = gather_logprobs(torch.tensor([[1.0, 0.5, 1.0, 0.0]]), torch.tensor([1]), num_logprobs)
    assert entry.token_ids == token_ids
    assert entry.rank == 3


def test_tied_best_tokens_all_have_rank_one() -> None:
    entries = gather_logprobs(torch.tensor([[1.0, 1.0, 0.0]] * 3), torch.tensor([0, 1, 2]), 0)
    assert [entry.rank for entry in entries] == [1, 1, 3]


def test_a_masked_token_has_no_effect() -> None:
    (entry,) = gather_logprobs(torch.tensor([[0.0, -math.inf, 0.0]]), torch.tensor([1]), 3)
    assert entry.logprobs == pytest.approx([-math.inf, -math.log(2), -math.log(2), -math.inf])
    assert entry.token_ids == [1, 0, 2, 1]


def test_positions_do_not_depend_on_each_other() -> None:
    logits = torch.randn(33, 501, generator=torch.Generator().manual_seed(0))
    chosen = torch.arange(33)
    together = gather_logprobs(logits, chosen, 5)
    assert together == [gather_logprobs(logits[i : i + 1], chosen[i : i + 1], 5)[0] for i in range(33)]


def test_no_positions() -> None:
    assert gather_logprobs(torch.zeros(0, 7), torch.zeros(0, dtype=torch.int64), 3) == []
