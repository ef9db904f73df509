"""Chi-square: what the sampler draws follows the exact distribution of processed, truncated logits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import chisquare

from tests.sampling_reference import CPU, distribution, make_request, processed_logits
from verifier_svc.sampling.sampler import Sampler
from verifier_svc.sampling.state import SamplingState

VOCAB_SIZE = 16
NUM_DRAWS = 200_000
NUM_ROWS = 2_000
PROMPT = [3, 5, 5, 7]
OUTPUT = [5, 9, 9, 9, 11]

CASES: dict[str, dict[str, Any]] = {
    "temperature 1": {},
    "temperature 0.7": {"temperature": 0.7},
    "temperature 1.6": {"temperature": 1.6},
    "top_k": {"top_k": 5},
    "top_p": {"top_p": 0.8},
    "min_p": {"min_p": 0.1},
    "top_k and top_p": {"top_k": 8, "top_p": 0.7},
    "min_p and top_p": {"min_p": 0.05, "top_p": 0.9},
    "all truncations": {"temperature": 1.3, "top_k": 9, "top_p": 0.85, "min_p": 0.04},
    "penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.3},
    "logit_bias": {"logit_bias": {2: 1.5, 9: -2.0, 15: 3.0}},
    "everything": {
        "temperature": 1.2,
        "top_k": 10,
        "top_p": 0.9,
        "min_p": 0.02,
        "repetition_penalty": 1.2,
        "presence_penalty": -0.3,
        "frequency_penalty": 0.2,
        "logit_bias": {0: 1.0, 9: 2.0},
        "bad_words": [[9, 11, 4], [1]],
        "min_tokens": 8,
        "stop": [6],
    },
}


@pytest.mark.parametrize("case", CASES)
def test_draws_follow_the_exact_distribution(case: str) -> None:
    request = make_request(PROMPT, **CASES[case])
    logits = torch.randn(VOCAB_SIZE, generator=torch.Generator().manual_seed(5)) * 1.5
    prefix = PROMPT + OUTPUT
    expected = distribution(processed_logits(logits.tolist(), prefix, request), request.params)

    state = SamplingState(NUM_ROWS, VOCAB_SIZE, CPU)
    for row in range(NUM_ROWS):
        state.set_row(row, request)
    token_ids = torch.tensor(prefix, dtype=torch.int32).expand(NUM_ROWS, -1)
    prompt_len = torch.full((NUM_ROWS,), len(PROMPT))
    positions = torch.full((NUM_ROWS,), len(prefix))
    batch = logits.expand(NUM_ROWS, -1)
    sampler = Sampler(state)
    counts = np.zeros(VOCAB_SIZE, dtype=np.int64)
    for start in range(0, NUM_DRAWS, NUM_ROWS):
        state.seed.copy_(torch.arange(start, start + NUM_ROWS))  # one seed a draw: all draws stand at one position
        drawn = sampler.sample(batch, torch.arange(NUM_ROWS), positions, token_ids, prompt_len)
        counts += np.bincount(drawn.numpy(), minlength=VOCAB_SIZE)

    assert counts.sum() == NUM_DRAWS
    kept = expected > 0
    assert counts[~kept].sum() == 0, "a token was drawn that the parameters exclude"
    assert chisquare(counts[kept], expected[kept] * NUM_DRAWS).pvalue > 1e-4


def test_positions_of_one_seed_are_independent_draws() -> None:
    """One request, 2e5 positions: the distribution, and no correlation between neighbours."""
    logits = torch.randn(VOCAB_SIZE, generator=torch.Generator().manual_seed(6))
    state = SamplingState(1, VOCAB_SIZE, CPU)
    state.set_row(0, make_request(seed=2**63 + 12345))
    rows = torch.zeros(NUM_DRAWS, dtype=torch.int64)
    positions = torch.arange(NUM_DRAWS)
    unused = torch.zeros(1, 1, dtype=torch.int32)
    drawn = Sampler(state).sample(logits.expand(NUM_DRAWS, -1), rows, positions, unused, torch.ones(1)).numpy()
    expected = distribution(logits.tolist(), make_request().params)
    assert chisquare(np.bincount(drawn, minlength=VOCAB_SIZE), expected * NUM_DRAWS).pvalue > 1e-4
    pairs = np.bincount(drawn[:-1:2] * VOCAB_SIZE + drawn[1::2], minlength=VOCAB_SIZE**2)
    assert chisquare(pairs, np.outer(expected, expected).ravel() * pairs.sum()).pvalue > 1e-4
