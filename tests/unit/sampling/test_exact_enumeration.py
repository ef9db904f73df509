"""Four tokens, two draft positions: every proposal there is, and drafters that know the noise, change nothing."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import chisquare
from torch import Tensor

from common.types import Request
from model_executor.kernels.philox import gumbel_noise_ref
from model_executor.row_state import RowState
from tests.sampling_reference import ToyEngine, distribution, make_request, processed_logits

VOCAB_SIZE = 4
NUM_DRAFT_TOKENS = 2
NUM_OUTPUT = 3
PROMPT = [2]
TABLE = torch.tensor([[0.9, -0.3, 0.1, 1.2], [0.0, 0.0, 0.0, 0.0], [2.0, 1.0, -1.0, 0.5], [-0.5, 1.5, 1.4, -2.0]])
PROPOSALS = torch.tensor(list(itertools.product(range(VOCAB_SIZE), repeat=NUM_DRAFT_TOKENS)))  # [16, 2]

PARAMS: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.8},
    "top_p": {"temperature": 1.2, "top_p": 0.8},
    "top_k": {"top_k": 2},
    "penalties": {"repetition_penalty": 1.5, "presence_penalty": 0.5, "frequency_penalty": -0.4, "min_p": 0.05},
    "greedy": {"temperature": 0.0},
}


def requests(num_seeds: int, copies: int, params: dict[str, Any]) -> list[Request]:
    """Seed after seed, each `copies` times."""
    max_len = len(PROMPT) + NUM_OUTPUT
    return [make_request(PROMPT, seed, max_len, **params) for seed in range(num_seeds) for _ in range(copies)]


@pytest.mark.parametrize("case", PARAMS)
def test_every_proposal_gives_the_sequential_tokens(case: str) -> None:
    """For each of 200 seeds and all 16 proposals: the tokens of the row that never drafted."""
    num_seeds = 200
    sequential = ToyEngine(TABLE, requests(num_seeds, 1, PARAMS[case]), 0).run(None)
    proposals = PROPOSALS.repeat(num_seeds, 1)  # [200 * 16, 2]
    engine = ToyEngine(TABLE, requests(num_seeds, 16, PARAMS[case]), NUM_DRAFT_TOKENS)
    outputs = engine.run(lambda rows, idx: proposals[idx])
    for seed in range(num_seeds):
        assert outputs[16 * seed : 16 * seed + 16] == [sequential[seed]] * 16


def test_first_step_emits_the_matching_run_and_one_more() -> None:
    """A proposal that matches m tokens emits exactly m + 1: the run is neither cut short nor carried on."""
    num_seeds = 50
    sequential = ToyEngine(TABLE, requests(num_seeds, 1, PARAMS["temperature"]), 0).run(None)
    engine = ToyEngine(TABLE, requests(num_seeds, 16, PARAMS["temperature"]), NUM_DRAFT_TOKENS)
    proposals = PROPOSALS.repeat(num_seeds, 1)
    engine.step(lambda rows, idx: proposals[idx])
    for row, proposal in enumerate(proposals.tolist()):
        truth = sequential[row // 16]
        num_matching = 0 if proposal[0] != truth[0] else 1 if proposal[1] != truth[1] else 2
        assert engine.rows.committed_len[row].item() == len(PROMPT) + num_matching + 1
        assert engine.rows.num_computed_tokens[row].item() == len(PROMPT) + num_matching


def exact_sequences(params: dict[str, Any]) -> np.ndarray:
    """Probability of each of the 64 outputs under the target alone, by enumeration in float64."""
    request = make_request(PROMPT, **params)
    probs = np.zeros(VOCAB_SIZE**NUM_OUTPUT)
    for index, output in enumerate(itertools.product(range(VOCAB_SIZE), repeat=NUM_OUTPUT)):
        prob = 1.0
        for position in range(NUM_OUTPUT):
            prefix = [*PROMPT, *output[:position]]
            processed = processed_logits(TABLE[prefix[-1]].tolist(), prefix, request)
            prob *= distribution(processed, request.params)[output[position]]
        probs[index] = prob
    assert probs.sum() == pytest.approx(1.0)
    return probs


def noise_maximum(rows: RowState, idx: Tensor) -> Tensor:
    """Knows the noise and nothing else: proposes the token whose noise is largest."""
    base = rows.committed_len[idx]
    columns = [gumbel_noise_ref(idx, base + j, VOCAB_SIZE).argmax(-1) for j in range(NUM_DRAFT_TOKENS)]
    return torch.stack(columns, dim=-1)


def noise_minimum(rows: RowState, idx: Tensor) -> Tensor:
    base = rows.committed_len[idx]
    columns = [gumbel_noise_ref(idx, base + j, VOCAB_SIZE).argmin(-1) for j in range(NUM_DRAFT_TOKENS)]
    return torch.stack(columns, dim=-1)


def target_with_the_same_noise(rows: RowState, idx: Tensor) -> Tensor:
    """The drafter of the design: its own (here the target's) logits with the verifier's noise."""
    base = rows.committed_len[idx]
    last = rows.token_ids[idx, base - 1].long()
    columns: list[Tensor] = []
    for j in range(NUM_DRAFT_TOKENS):
        last = (TABLE[last] / 0.8 + gumbel_noise_ref(idx, base + j, VOCAB_SIZE)).argmax(-1)
        columns.append(last)
    return torch.stack(columns, dim=-1)


def constant(rows: RowState, idx: Tensor) -> Tensor:
    return torch.full((len(idx), NUM_DRAFT_TOKENS), 1)


@pytest.mark.parametrize("propose", [noise_maximum, noise_minimum, target_with_the_same_noise, constant])
@pytest.mark.parametrize("case", ["temperature", "penalties"])
def test_emitted_sequences_follow_the_target(case: str, propose: Callable[[RowState, Tensor], Tensor]) -> None:
    """8,000 seeds, whole outputs of three tokens against the 64 exact probabilities."""
    num_seeds = 8_000
    engine = ToyEngine(TABLE, requests(num_seeds, 1, PARAMS[case]), NUM_DRAFT_TOKENS, max_model_len=8)
    outputs = np.array(engine.run(propose))
    counts = np.bincount(outputs @ [16, 4, 1], minlength=64)
    expected = exact_sequences(PARAMS[case])
    common = expected * num_seeds >= 5
    observed = np.append(counts[common], counts[~common].sum())
    exact = np.append(expected[common], expected[~common].sum()) * num_seeds
    nonzero = exact > 0
    assert observed[~nonzero].sum() == 0
    assert chisquare(observed[nonzero], exact[nonzero]).pvalue > 1e-4


def test_the_same_noise_on_the_targets_logits_is_always_accepted() -> None:
    engine = ToyEngine(TABLE, requests(500, 1, PARAMS["temperature"]), NUM_DRAFT_TOKENS)
    engine.run(target_with_the_same_noise)
    assert engine.num_steps == 1
