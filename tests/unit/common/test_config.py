"""Configuration of the engine: limits, sizes in words, and names that do not exist."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from common.config import MAX_SPECULATIVE_TOKENS, EngineConfig
from common.errors import InvalidArgumentError, OutriderError, UnknownOptionError


def refusal(**values: Any) -> InvalidArgumentError:
    with pytest.raises(InvalidArgumentError) as caught:
        EngineConfig(**({"model": "m"} | values))
    return caught.value


@pytest.mark.parametrize(
    ("field", "allowed", "refused"),
    [
        ("drafter", ["ngram", "none"], ["", "eagle", None]),
        ("num_speculative_tokens", [0, MAX_SPECULATIVE_TOKENS], [-1, MAX_SPECULATIVE_TOKENS + 1, 1.5, None]),
        ("prompt_lookup_max", [2, 32], [0, 33]),
        ("prompt_lookup_min", [1, 5], [0, 33]),
        ("device", ["cpu"], ["tpu"]),
        ("dtype", ["auto", "float32", "bfloat16"], ["float8", None]),
        ("max_model_len", [None, 2], [1, -1, "long"]),
        ("max_num_seqs", [1, 4096], [0, 4097]),
        ("max_num_batched_tokens", [16], [15, None]),
        ("max_num_waiting", [1], [0]),
        ("kv_cache_memory", [1, "1"], [0, -1, "0", 1.5, "", "many", "1X", "-1G", "1" * 400, None]),
        ("max_token_row_memory", [1, "512M"], [0, -1, "0", 1.5, "many", None]),
        ("num_threads", [None, 1, 1024], [0, 0.5, 1025]),
        ("async_scheduling", [True, False], ["perhaps", None]),
        ("cuda_graphs", ["full", "piecewise", "none"], ["partial", "", True, None]),
        ("max_prefill_beside_decode", [None, 16, 1 << 20], [15, 0, -16, 16.5, "many"]),
        ("product_chain", [True, False], ["perhaps", None]),
        ("debug_step_path", [True, False], ["perhaps", None]),
    ],
)
def test_limits(field: str, allowed: list[Any], refused: list[Any]) -> None:
    beside = {"max_num_seqs": {"max_num_batched_tokens": 4096}, "max_num_batched_tokens": {"max_num_seqs": 16}}
    for value in allowed:
        EngineConfig(**{"model": "m", field: value} | beside.get(field, {}))
    for value in refused:
        error = refusal(**{field: value})
        assert error.field == field
        assert str(error).startswith(f"{field} = ")
        assert error.expected


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("512M", 512 << 20),
        ("512MiB", 512 << 20),
        ("512mb", 512 << 20),
        ("4G", 4 << 30),
        ("1.5G", 3 << 29),
        (" 2 K ", 2048),
        ("1T", 1 << 40),
        ("1000", 1000),
        ("100B", 100),
        (12345, 12345),
    ],
)
def test_sizes(text: object, num_bytes: int) -> None:
    assert EngineConfig(model="m", kv_cache_memory=text).kv_cache_memory == num_bytes


def test_a_size_that_is_none_says_what_one_looks_like() -> None:
    assert (
        str(refusal(kv_cache_memory="lots"))
        == "kv_cache_memory = 'lots': expected a number of bytes, such as 4G or 512MiB"
    )


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("num_speculative_token", "num_speculative_tokens"),
        ("max_seq_len", "max_model_len"),
        ("enable_prefix_cache", "enable_prefix_caching"),
        ("kv_cache_size", "kv_cache_memory"),
    ],
)
def test_an_unknown_option_names_the_nearest(name: str, nearest: str) -> None:
    with pytest.raises(UnknownOptionError) as caught:
        EngineConfig(**{"model": "m", name: 1})
    assert caught.value.name == name
    assert str(caught.value) == f"unknown option {name!r}; did you mean {nearest!r}?"


def test_an_option_like_no_other_lists_all() -> None:
    with pytest.raises(UnknownOptionError, match=r"known options: async_scheduling, .*prompt_lookup_min"):
        EngineConfig(model="m", qqq=1)


def test_a_model_is_needed() -> None:
    with pytest.raises(InvalidArgumentError, match="model = None: expected a value"):
        EngineConfig()
    assert str(refusal(model="")) == "model = '': expected at least 1 character"


def test_lookup_bounds_in_order() -> None:
    EngineConfig(model="m", prompt_lookup_min=3, prompt_lookup_max=3)
    error = refusal(prompt_lookup_min=4, prompt_lookup_max=3)
    assert (error.field, error.value, error.expected) == ("prompt_lookup_min", 4, "at most prompt_lookup_max = 3")


def test_a_step_has_a_token_for_every_row() -> None:
    EngineConfig(model="m", max_num_seqs=32, max_num_batched_tokens=32)
    error = refusal(max_num_seqs=32, max_num_batched_tokens=31)
    assert (error.field, error.value, error.expected) == ("max_num_batched_tokens", 31, "at least max_num_seqs = 32")


def test_frozen() -> None:
    config = EngineConfig(model="m")
    with pytest.raises(ValidationError):
        config.max_num_seqs = 1  # type: ignore[misc]


def test_every_refusal_is_one_of_ours() -> None:
    for values in ({"max_num_seqs": "x"}, {"nothing": 1}, {"kv_cache_memory": object()}):
        with pytest.raises(OutriderError):
            EngineConfig(**({"model": "m"} | values))
