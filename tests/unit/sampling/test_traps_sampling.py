"""Bugs that other engines shipped, each by the number of its issue in vllm-project/vllm."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from model_executor.kernels.philox import gumbel_noise_ref
from model_executor.row_state import RowState
from tests.sampling_reference import CPU, ToyEngine, make_request
from verifier_svc.sampling.logprobs import gather_logprobs
from verifier_svc.sampling.sampler import Sampler
from verifier_svc.sampling.state import SamplingState

VOCAB_SIZE = 12
TABLE = torch.randn(VOCAB_SIZE, VOCAB_SIZE, generator=torch.Generator().manual_seed(11)) * 1.5


def oracle(outputs: list[list[int]], prompt_len: int, num_draft_tokens: int) -> Callable[[RowState, Tensor], Tensor]:
    """A drafter that knows every output."""
    truth = torch.tensor([[*output, *[-1] * (64 - len(output))] for output in outputs])

    def propose(rows: RowState, idx: Tensor) -> Tensor:
        start = (rows.committed_len[idx] - prompt_len).unsqueeze(-1)
        return truth[idx.unsqueeze(-1), start + torch.arange(num_draft_tokens)]

    return propose


def test_54282_noise_shared_with_the_drafter_does_not_bias_the_output() -> None:
    """#54282: a rejected draft and the token drawn in its place shared their noise, and a wide vocabulary hid the bias.

    Here the noise is shared on purpose. The drafter sees the same noise with logits of its own; the output must be, for
    each seed, the one without it, and on 4 tokens, where a bias would be large.
    """
    table = torch.tensor([[1.0, 0.2, -0.5, 0.4]] * 4)
    other = torch.tensor([-0.5, 0.8, 1.0, 0.3])

    def propose(rows: RowState, idx: Tensor) -> Tensor:
        base = rows.committed_len[idx]
        return torch.stack([(other + gumbel_noise_ref(idx, base + j, 4)).argmax(-1) for j in range(2)], dim=-1)

    requests = [make_request([0], seed, max_len=7) for seed in range(3000)]
    drafted = ToyEngine(table, requests, 2)
    outputs = drafted.run(propose)
    plain = ToyEngine(table, requests, 0)
    assert outputs == plain.run(None)
    assert drafted.num_steps <= plain.num_steps
    frequency = torch.tensor(outputs).flatten().bincount(minlength=4) / (3000 * 6)
    assert torch.allclose(frequency, table[0].softmax(-1), atol=4 * 0.5 / (3000 * 6) ** 0.5)


@pytest.mark.parametrize(
    "params",
    [
        {"min_p": 0.3},
        {"logit_bias": {4: -100.0, 5: 3.0}},
        {"min_p": 0.2, "logit_bias": {4: -100.0}},
        {"temperature": 0.0, "logit_bias": {4: -100.0, 5: 1.0}},
    ],
)
def test_38202_42744_min_p_and_logit_bias_act_on_verified_positions(params: dict[str, Any]) -> None:
    """#38202, #42744: skipped on verified positions, or refused. Drafts of the forbidden token must not get through."""
    requests = [make_request([1], seed, max_len=13, **params) for seed in range(200)]
    expected = ToyEngine(TABLE, requests, 0).run(None)
    forbidden = ToyEngine(TABLE, requests, 3).run(lambda rows, idx: torch.full((len(idx), 3), 4))
    assert forbidden == expected
    known = ToyEngine(TABLE, requests, 3)
    assert known.run(oracle(expected, 1, 3)) == expected
    assert known.num_steps == 3
    if "logit_bias" in params:
        assert all(4 not in output for output in expected)
    unrestricted = [make_request([1], seed, max_len=13) for seed in range(200)]
    assert ToyEngine(TABLE, unrestricted, 0).run(None) != expected


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_34497_penalties_count_the_accepted_drafts_before_the_position(temperature: float) -> None:
    """#34497. A target that repeats itself, and a penalty that stops it: seen only if drafts before count."""
    table = torch.eye(VOCAB_SIZE) * 4
    params: dict[str, Any] = {
        "temperature": temperature,
        "frequency_penalty": 1.5,
        "presence_penalty": 0.5,
        "repetition_penalty": 1.2,
    }
    requests = [make_request([3], seed, max_len=17, **params) for seed in range(100)]
    expected = ToyEngine(table, requests, 0).run(None)
    known = ToyEngine(table, requests, 3)
    assert known.run(oracle(expected, 1, 3)) == expected
    assert known.num_steps == 4
    repeating = ToyEngine(table, requests, 3).run(lambda rows, idx: torch.full((len(idx), 3), 3))
    assert repeating == expected
    assert max(output.count(3) for output in expected) < 16


def test_34497_logprobs_of_accepted_positions() -> None:
    """#34497: wrong or zero at accepted positions. Here: the values of the sequential run, from unprocessed logits."""
    request = make_request([1], 5, max_len=9, repetition_penalty=1.5, top_k=4)
    (expected,) = ToyEngine(TABLE, [request], 0).run(None)
    engine = ToyEngine(TABLE, [request], 3)
    seen: list[Tensor] = []
    sample = engine.sampler.sample

    def record(logits: Tensor, *rest: Tensor) -> Tensor:
        drawn = sample(logits, *rest)
        seen.append(logits)  # what the engine hands on must still be raw
        return drawn

    engine.sampler.sample = record  # pyright: ignore[reportAttributeAccessIssue]
    engine.run(oracle([expected], 1, 3))
    raw = torch.cat(seen)
    assert raw.shape[0] == len(expected)
    for entry, token, previous in zip(
        gather_logprobs(raw, torch.tensor(expected), 2), expected, [1, *expected], strict=False
    ):
        logprobs = TABLE[previous].double().log_softmax(-1)
        assert entry.token_ids[0] == token
        assert entry.logprobs[0] == pytest.approx(logprobs[token].item(), abs=1e-5)
        assert entry.logprobs[1] == pytest.approx(logprobs.max().item(), abs=1e-5)
        assert entry.rank == 1 + (logprobs > logprobs[token]).sum().item()


def test_36138_44993_stop_token_inside_an_accepted_run_cuts_the_rest() -> None:
    """#36138, #44993: tokens behind an accepted stop token were emitted."""
    endless = [make_request([1], seed, max_len=33) for seed in range(100)]
    unstopped = ToyEngine(TABLE, endless, 0).run(None)
    requests = [make_request([1], seed, max_len=33, stop=[2, 7]) for seed in range(100)]
    engine = ToyEngine(TABLE, requests, 3)
    outputs = engine.run(oracle(unstopped, 1, 3))  # drafts run on behind the stop token
    assert outputs == ToyEngine(TABLE, requests, 0).run(None)
    num_stopped = 0
    for output, full in zip(outputs, unstopped, strict=True):
        end = next((i for i, token in enumerate(full) if token in (2, 7)), None)
        assert output == (full if end is None else full[: end + 1])
        num_stopped += end is not None
    assert num_stopped > 50


def test_min_tokens_holds_back_a_drafted_stop_token() -> None:
    """The stop token is masked at each verified position by its own index, not by where the step began."""
    table = torch.zeros(VOCAB_SIZE, VOCAB_SIZE)
    table[:, 2] = 9.0
    table[:, 5] = 8.0
    requests = [make_request([1], 0, max_len=33, temperature=0.0, min_tokens=5, stop=[2])]
    engine = ToyEngine(table, requests, 3)
    assert engine.run(lambda rows, idx: torch.tensor([[5, 2, 2]])) == [[5, 5, 5, 5, 5, 2]]


def test_41758_greedy_output_on_a_repetitive_prompt() -> None:
    """#41758: "serving" x 48 with n-gram drafts changed the greedy output."""
    prompt = [6] * 48
    table = TABLE.clone()
    table[6] = torch.tensor([0.0] * VOCAB_SIZE).index_fill(0, torch.tensor([6]), 0.001)  # only just repeats
    table[6, 9] = 0.0009

    def last_token_again(rows: RowState, idx: Tensor) -> Tensor:
        return rows.token_ids[idx, rows.committed_len[idx] - 1].long().unsqueeze(-1).expand(-1, 3)

    cases: list[dict[str, Any]] = [{}, {"frequency_penalty": 0.0001}, {"repetition_penalty": 1.05}]
    for params in cases:
        request = make_request(prompt, max_len=96, temperature=0.0, max_tokens=None, **params)
        expected = ToyEngine(table, [request], 0, max_model_len=96).run(None)
        assert ToyEngine(table, [request], 3, max_model_len=96).run(last_token_again) == expected


def test_27922_no_step_emits_past_max_tokens() -> None:
    """#27922: a step scheduled past max_tokens. The commit cuts whatever was verified."""
    requests = [make_request([1], seed, max_len=2 + seed % 5) for seed in range(50)]
    expected = ToyEngine(TABLE, requests, 0).run(None)
    outputs = ToyEngine(TABLE, requests, 5).run(oracle([[*output, 0, 0, 0, 0] for output in expected], 1, 5))
    assert outputs == expected
    assert [len(output) for output in outputs] == [1 + seed % 5 for seed in range(50)]


def test_greedy_ignores_noise_and_truncation() -> None:
    """A temperature below the greedy limit is argmax, whatever seed and truncation say."""
    state = SamplingState(3, VOCAB_SIZE, CPU)
    state.set_row(0, make_request(temperature=0.0, seed=1, top_k=2, min_p=0.5))
    state.set_row(1, make_request(temperature=1e-6, seed=2, top_p=0.1))
    state.set_row(2, make_request(temperature=0.0, logit_bias={3: -100.0}))
    logits = torch.zeros(3, VOCAB_SIZE)
    logits[:, 3], logits[:, 8] = 1.0, 0.5
    unused = torch.zeros(3, 4, dtype=torch.int32)
    drawn = Sampler(state).sample(logits, torch.arange(3), torch.ones(3).long(), unused, torch.ones(3).long())
    assert drawn.tolist() == [3, 3, 8]
    assert logits[2, 3].item() == 1.0
