"""Processors and truncation against a slow reference in plain Python, on random requests."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.sampling_reference import CPU, kept_tokens, make_request, processed_logits
from verifier_svc.sampling.processors import Positions, process_logits
from verifier_svc.sampling.state import SamplingState
from verifier_svc.sampling.truncation import apply_min_p, rank_exactly, truncate

VOCAB_SIZE = 12
tokens = st.integers(0, VOCAB_SIZE - 1)
# Eighths: exact in float32, and often equal.
logit = st.integers(-40, 42).map(lambda i: i / 8 if i <= 40 else -math.inf)
logit_rows = st.lists(logit, min_size=VOCAB_SIZE, max_size=VOCAB_SIZE)


@st.composite
def processor_cases(draw: st.DrawFn) -> tuple[list[float], list[int], int, dict[str, Any]]:
    prefix = draw(st.lists(tokens, min_size=1, max_size=10))
    prompt_len = draw(st.integers(1, len(prefix)))
    params: dict[str, Any] = {
        "repetition_penalty": draw(st.sampled_from([1.0, 0.5, 1.25, 2.0])),
        "presence_penalty": draw(st.sampled_from([0.0, -1.5, 0.75])),
        "frequency_penalty": draw(st.sampled_from([0.0, -0.5, 1.25])),
        "logit_bias": draw(st.dictionaries(tokens, st.sampled_from([-100.0, -1.0, 2.5]), max_size=3)),
        "bad_words": draw(st.lists(st.lists(tokens, min_size=1, max_size=4), max_size=5)),
        "min_tokens": draw(st.integers(0, 6)),
        "stop": draw(st.lists(tokens, max_size=3, unique=True)),
    }
    return draw(logit_rows), prefix, prompt_len, params


@settings(max_examples=150)
@given(st.lists(processor_cases(), min_size=1, max_size=4))
def test_processed_logits_agree_with_the_reference(
    cases: list[tuple[list[float], list[int], int, dict[str, Any]]],
) -> None:
    """Also in a batch: each row as if it were alone. Behind each prefix stand tokens that must not count."""
    num_rows = len(cases)
    state = SamplingState(num_rows, VOCAB_SIZE, CPU)
    token_ids = torch.full((num_rows, 16), VOCAB_SIZE - 1, dtype=torch.int32)
    requests = [make_request(prefix[:prompt_len], **params) for _, prefix, prompt_len, params in cases]
    for row, (_, prefix, _, _) in enumerate(cases):
        state.set_row(row, requests[row])
        token_ids[row, : len(prefix)] = torch.tensor(prefix, dtype=torch.int32)
        token_ids[row, len(prefix) :] = row  # claims of the future
    logits = torch.tensor([values for values, _, _, _ in cases])
    positions = torch.tensor([len(prefix) for _, prefix, _, _ in cases])
    prompt_len = torch.tensor([prompt_len for _, _, prompt_len, _ in cases])
    at = Positions(torch.arange(num_rows), range(num_rows), positions, token_ids, prompt_len)
    processed = process_logits(logits, state, at).tolist()
    for row, (values, prefix, _, _) in enumerate(cases):
        assert processed[row] == pytest.approx(processed_logits(values, prefix, requests[row]), abs=1e-5)


@settings(max_examples=400)
@given(
    values=logit_rows,
    temperature=st.sampled_from([0.5, 1.0, 2.0]),  # exact in float32 too
    top_k=st.one_of(st.just(0), st.integers(1, VOCAB_SIZE - 1)),
    top_p=st.one_of(st.just(1.0), st.floats(0.01, 1.0, exclude_max=True)),
    min_p=st.one_of(st.just(0.0), st.just(1.0), st.floats(0.001, 0.99)),
    count=st.integers(1, VOCAB_SIZE),
)
def test_kept_tokens_agree_with_the_reference(
    values: list[float], temperature: float, top_k: int, top_p: float, min_p: float, count: int
) -> None:
    """With any number of candidates: a row is either decided and right, or says that it is not decided."""
    assume(max(values) > -math.inf)
    scaled = [value / temperature for value in values]
    request = make_request(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    expected = kept_tokens(scaled, request.params)
    for slack in (1 - 1e-5, 1 + 1e-5):  # a cut within rounding of the limit may fall to either side
        near = {"top_p": min(1.0, top_p * slack) if top_p < 1.0 else 1.0}
        near["min_p"] = min(1.0, min_p * slack) if 0.0 < min_p < 1.0 else min_p
        assume(kept_tokens(scaled, request.params.model_copy(update=near)) == expected)

    state = SamplingState(1, VOCAB_SIZE, CPU)
    state.set_row(0, request)
    row = apply_min_p(torch.tensor([scaled]), state.log_min_p)
    full_values, full_ids, decided = truncate(row, state.top_k, state.top_p, VOCAB_SIZE)
    assert decided.item()
    assert set(full_ids[full_values > -math.inf].tolist()) == expected
    few_values, few_ids, decided = truncate(row, state.top_k, state.top_p, count)
    if decided.item():
        num_kept = len(expected)
        assert few_ids[0, :num_kept].tolist() == full_ids[0, :num_kept].tolist()
        assert torch.equal(few_values[0, :num_kept], full_values[0, :num_kept])
        assert (few_values[0, num_kept:] == -math.inf).all()
    if top_p == 1.0:
        few_values, few_ids, decided_without = truncate(row, state.top_k, None, count)
        assert torch.equal(decided_without, decided)
        assert not decided.item() or set(few_ids[few_values > -math.inf].tolist()) == expected


@given(values=logit_rows, count=st.integers(1, VOCAB_SIZE))
def test_ranking_is_by_value_then_token_id(values: list[float], count: int) -> None:
    best, token_ids = rank_exactly(torch.tensor([values]), count)
    expected = sorted(range(VOCAB_SIZE), key=lambda token: (-values[token], token))[:count]
    assert token_ids[0].tolist() == expected
    assert best[0].tolist() == [values[token] for token in expected]
