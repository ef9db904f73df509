"""What giving a row to a request writes, and what the host knows about rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from common.errors import InvalidArgumentError
from common.sampling_params import MAX_END_TOKEN_IDS, MAX_STOP_TOKEN_IDS
from model_executor.sampling_tables import MAX_ROW_BAD_WORDS
from tests.sampling_reference import CPU, make_request
from verifier_svc.sampling.state import SamplingState, write_now

VOCAB_SIZE, NUM_ROWS = 64, 3
ROW_TENSORS = (
    "seed",
    "temperature",
    "top_p",
    "top_k",
    "log_min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "min_len",
    "stop_token_ids",
    "row_flags",
    "num_logprobs",
)
FULL = make_request(
    [1, 2],
    seed=2**64 - 3,
    stop=[5, 6],
    bad_words=[[1, 2, 3], [9]],
    temperature=0.5,
    top_p=0.9,
    top_k=7,
    min_p=0.1,
    repetition_penalty=1.5,
    presence_penalty=0.5,
    frequency_penalty=0.25,
    logit_bias={4: 1.5, 2: -3.0},
    min_tokens=2,
    logprobs=3,
)


class Staged:
    """Writes that reach the device later."""

    def __init__(self) -> None:
        self.writes: list[tuple[Tensor, int, NDArray[Any]]] = []

    def __call__(self, tensor: Tensor, index: int, values: NDArray[Any]) -> None:
        assert values.dtype.itemsize == tensor.element_size()
        assert index >= 0
        assert index + len(values) <= tensor.numel()
        self.writes.append((tensor, index, values))

    def apply(self) -> None:
        for tensor, index, values in self.writes:
            write_now(tensor, index, values)
        self.writes.clear()


def row_values(state: SamplingState, row: int) -> dict[str, Any]:
    return {name: getattr(state, name)[row].tolist() for name in ROW_TENSORS}


def test_staged_writes_end_as_direct_ones() -> None:
    direct, staged = (SamplingState(NUM_ROWS, VOCAB_SIZE, CPU, has_tables=True) for _ in range(2))
    write = Staged()
    for request in (FULL, make_request([1]), FULL):
        direct.set_row(1, request)
        before = row_values(staged, 1)
        staged.set_row(1, request, write)
        assert row_values(staged, 1) == before  # nothing happens but by the writes
        write.apply()
        assert row_values(staged, 1) == row_values(direct, 1)
    assert row_values(staged, 0) == row_values(SamplingState(1, VOCAB_SIZE, CPU), 0)
    assert row_values(staged, 1)["seed"] == -3
    assert row_values(staged, 1)["stop_token_ids"][:3] == [5, 6, -1]


def test_a_row_that_is_given_on_is_as_a_new_one() -> None:
    state, fresh = (SamplingState(NUM_ROWS, VOCAB_SIZE, CPU) for _ in range(2))
    state.set_row(2, FULL)
    request = make_request([3], seed=9, temperature=1.0)
    state.set_row(2, request)
    fresh.set_row(2, request)
    assert row_values(state, 2) == row_values(fresh, 2)
    assert state.logit_bias[2] is None
    assert state.bad_words[2] is None


def test_a_request_like_the_one_before_writes_what_differs() -> None:
    state, write = SamplingState(NUM_ROWS, VOCAB_SIZE, CPU, has_tables=True), Staged()
    state.set_row(0, make_request([1], seed=1), write)
    write.apply()
    state.set_row(0, make_request([1], seed=2), write)
    assert [tensor is state.seed for tensor, _, _ in write.writes] == [True]


def test_counts_of_a_row_start_over_with_each_request() -> None:
    state = SamplingState(NUM_ROWS, VOCAB_SIZE, CPU, has_tables=True)
    assert state.tables is not None
    state.tables.counted_len[1] = 17
    state.set_row(1, FULL)
    assert state.tables.counted_len.tolist() == [0, 0, 0]


def test_tables_hold_biases_and_words_of_the_row() -> None:
    state = SamplingState(NUM_ROWS, VOCAB_SIZE, CPU, has_tables=True)
    state.set_row(1, FULL)
    tables = state.tables
    assert tables is not None
    assert tables.num_biases.tolist() == [0, 2, 0]
    assert tables.bias_tokens[1, :2].tolist() == [4, 2]
    assert tables.bias_values[1, :2].tolist() == [1.5, -3.0]
    assert tables.num_bad_words.tolist() == [0, 2, 0]
    assert tables.bad_word_ends[1, :2].tolist() == [3, 4]
    assert tables.bad_word_tokens[1, :4].tolist() == [1, 2, 3, 9]


def test_what_the_host_knows_of_rows() -> None:
    state = SamplingState(NUM_ROWS, VOCAB_SIZE, CPU)
    state.set_row(0, make_request([1], temperature=0.7))
    state.set_row(1, make_request([1], temperature=0.7, top_k=3))
    state.set_row(2, make_request([1], temperature=0.0, top_k=3, logprobs=0))
    assert state.is_plain([0, 2])
    assert not state.is_plain([0, 1])
    assert state.wants_logprobs([0, 2])
    assert not state.wants_logprobs([0, 1])


@pytest.mark.parametrize(
    ("field", "request_args"),
    [
        ("stop_token_ids", {"stop": range(MAX_STOP_TOKEN_IDS + MAX_END_TOKEN_IDS + 1)}),
        ("bad_words", {"bad_words": [[1]] * (MAX_ROW_BAD_WORDS + 1)}),
    ],
)
def test_more_than_a_row_holds_is_refused(field: str, request_args: dict[str, Any]) -> None:
    state = SamplingState(NUM_ROWS, VOCAB_SIZE, CPU, has_tables=True)
    with pytest.raises(InvalidArgumentError, match=field):
        state.set_row(0, make_request([1], **request_args))
    assert state.flags == [0] * NUM_ROWS


def test_values_reach_the_type_of_their_tensor() -> None:
    state = SamplingState(NUM_ROWS, VOCAB_SIZE, CPU)
    state.set_row(0, make_request([1], temperature=0.1))
    assert state.temperature.dtype == torch.float32
    assert state.temperature[0].item() == float(np.float32(0.1))
