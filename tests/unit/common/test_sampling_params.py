"""Sampling parameters: every limit, and a message that names the field, the value and the limit."""

from __future__ import annotations

import math
from typing import Any

import pytest
from pydantic import ValidationError

from common.errors import InvalidArgumentError, UnknownOptionError
from common.sampling_params import (
    MAX_BAD_WORD_TOKENS,
    MAX_BAD_WORDS,
    MAX_LOGIT_BIAS,
    MAX_LOGPROBS,
    MAX_N,
    MAX_SEED,
    MAX_STOP_STRING_LENGTH,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    SamplingParams,
)

# field, lowest and highest value allowed, a value below, a value above, how the message states the broken limits
RANGES: list[tuple[str, Any, Any, Any, Any, str, str]] = [
    ("n", 1, MAX_N, 0, MAX_N + 1, "1", str(MAX_N)),
    ("temperature", 0, 100, -0.01, 100.01, "0", "100"),
    ("top_p", 1e-9, 1, 0, 1.01, "greater than 0", "1"),
    ("top_k", -1, 10**9, -2, None, "-1", ""),
    ("min_p", 0, 1, -0.01, 1.01, "0", "1"),
    ("repetition_penalty", 1e-9, 100, 0, 100.1, "greater than 0", "100"),
    ("presence_penalty", -2, 2, -2.01, 2.01, "-2", "2"),
    ("frequency_penalty", -2, 2, -2.01, 2.01, "-2", "2"),
    ("min_tokens", 0, 16, -1, None, "0", ""),
    ("max_tokens", 1, 10**9, 0, None, "1", ""),
    ("seed", 0, MAX_SEED, -1, MAX_SEED + 1, "0", str(MAX_SEED)),
    ("logprobs", 0, MAX_LOGPROBS, -1, MAX_LOGPROBS + 1, "0", str(MAX_LOGPROBS)),
    ("prompt_logprobs", 0, MAX_LOGPROBS, -1, MAX_LOGPROBS + 1, "0", str(MAX_LOGPROBS)),
    ("num_speculative_tokens", 0, 10**9, -1, None, "0", ""),
]


def refusal(**values: Any) -> InvalidArgumentError:
    with pytest.raises(InvalidArgumentError) as caught:
        SamplingParams(**values)
    return caught.value


@pytest.mark.parametrize(("field", "low", "high", "below", "above", "low_text", "high_text"), RANGES)
def test_range(field: str, low: Any, high: Any, below: Any, above: Any, low_text: str, high_text: str) -> None:
    for allowed in (low, high):
        assert getattr(SamplingParams(**{field: allowed}), field) == allowed
    for value, limit in ((below, low_text), (above, high_text)):
        if value is not None:
            error = refusal(**{field: value})
            assert (error.field, error.value) == (field, value)
            assert str(error).startswith(f"{field} = {value!r}: expected ")
            assert limit in error.expected


FLOATS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")


@pytest.mark.parametrize("field", FLOATS)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_numbers_are_finite(field: str, value: float) -> None:
    assert refusal(**{field: value}).field == field


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": None}, "temperature"),
        ({"n": 1.5}, "n"),
        ({"seed": 1.5}, "seed"),
        ({"stop": [5]}, "stop.0"),
        ({"stop": 5}, "stop"),
        ({"stop_token_ids": ["x"]}, "stop_token_ids.0"),
        ({"logit_bias": [(1, 2)]}, "logit_bias"),
        ({"logit_bias": {"x": 1}}, "logit_bias.x"),
        ({"bad_words_token_ids": [1]}, "bad_words_token_ids.0"),
        ({"ignore_eos": "maybe"}, "ignore_eos"),
    ],
)
def test_wrong_types(values: dict[str, Any], field: str) -> None:
    assert refusal(**values).field.startswith(field)


@pytest.mark.parametrize(
    ("field", "entry", "limit"),
    [
        ("stop", "x", MAX_STOP_STRINGS),
        ("stop_token_ids", 1, MAX_STOP_TOKEN_IDS),
        ("bad_words", "x", MAX_BAD_WORDS),
        ("bad_words_token_ids", (1,), MAX_BAD_WORDS),
    ],
)
def test_lists_are_bounded(field: str, entry: Any, limit: int) -> None:
    assert len(getattr(SamplingParams(**{field: [entry] * limit}), field)) == limit
    error = refusal(**{field: [entry] * (limit + 1)})
    assert str(error) == f"{field} = '{limit + 1} entries': expected at most {limit} entries"


def test_logit_bias_is_bounded() -> None:
    full = dict.fromkeys(range(MAX_LOGIT_BIAS), 1.0)
    assert SamplingParams(logit_bias=full).logit_bias == full
    assert refusal(logit_bias=full | {-1: 0.0}).field == "logit_bias"
    assert SamplingParams(logit_bias={1: -100, 2: 100}).logit_bias == {1: -100.0, 2: 100.0}
    for value in (-100.1, 100.1, math.nan, math.inf):
        error = refusal(logit_bias={7: value})
        assert error.field == "logit_bias[7]"
        assert "[-100, 100]" in str(error)


def test_stop_strings_have_a_length() -> None:
    longest = "x" * MAX_STOP_STRING_LENGTH
    assert SamplingParams(stop=longest).stop == (longest,)
    for text in ("", longest + "x"):
        error = refusal(stop=["ok", text])
        assert (error.field, error.value) == ("stop", text)


@pytest.mark.parametrize("values", [{"bad_words": ["a", ""]}, {"bad_words_token_ids": [[1], []]}])
def test_bad_words_are_not_empty(values: dict[str, Any]) -> None:
    assert refusal(**values).field == next(iter(values))


def test_bad_words_have_a_length() -> None:
    longest = (1,) * MAX_BAD_WORD_TOKENS
    assert SamplingParams(bad_words_token_ids=[longest]).bad_words_token_ids == (longest,)
    error = refusal(bad_words_token_ids=[(1,), (*longest, 1)])
    assert str(error) == "bad_words_token_ids = 'a word of 65 tokens': expected words of at most 64 tokens"


def test_min_tokens_is_at_most_max_tokens() -> None:
    assert SamplingParams(min_tokens=5, max_tokens=5).min_tokens == 5
    assert SamplingParams(min_tokens=5000, max_tokens=None).min_tokens == 5000
    assert str(refusal(min_tokens=6, max_tokens=5)) == "min_tokens = 6: expected at most max_tokens = 5"


def test_unknown_name() -> None:
    with pytest.raises(UnknownOptionError, match="unknown option 'temprature'; did you mean 'temperature'"):
        SamplingParams(temprature=0)


def test_one_string_or_many() -> None:
    assert SamplingParams(stop="a").stop == ("a",)
    assert SamplingParams(stop=["a", "b"], bad_words="c").bad_words == ("c",)
    nothing = SamplingParams(stop=None, bad_words=None, stop_token_ids=None, bad_words_token_ids=None)
    assert nothing == SamplingParams()


def test_immutable() -> None:
    params = SamplingParams()
    with pytest.raises(ValidationError):
        params.n = 2  # type: ignore[misc]


@pytest.mark.parametrize(("temperature", "greedy"), [(0.0, True), (1e-6, True), (1e-4, False), (1.0, False)])
def test_is_greedy(temperature: float, greedy: bool) -> None:
    assert SamplingParams(temperature=temperature).is_greedy == greedy


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"stop_token_ids": [0, 10]}, "stop_token_ids"),
        ({"logit_bias": {10: 1.0}}, "logit_bias"),
        ({"bad_words_token_ids": [[0], [9, 10]]}, "bad_words_token_ids"),
    ],
)
def test_check_vocabulary(values: dict[str, Any], field: str) -> None:
    params = SamplingParams(**values)
    params.check_vocabulary(11)
    with pytest.raises(InvalidArgumentError, match=rf"{field} = 10: expected a token id in \[0, 10\)"):
        params.check_vocabulary(10)
