"""What a request must look like before it may enter the queue."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from common.errors import InvalidArgumentError
from common.sampling_params import MAX_SEED, SamplingParams
from common.types import Request
from tests.byte_tokenizer import END, byte_tokenizer
from verifier_svc.front.admission import ServedModel, build_requests

MODEL = ServedModel(
    vocab_size=260, max_model_len=32, eos_token_ids=(END, 5), num_speculative_tokens=4, tokenizer=byte_tokenizer()
)
NO_TOKENIZER = dataclasses.replace(MODEL, tokenizer=None)


def build(prompt: Any = (1, 2, 3), model: ServedModel = MODEL, **params: Any) -> list[Request]:
    return build_requests("r", prompt, SamplingParams(**params), model)


def refusal(prompt: Any = (1, 2, 3), model: ServedModel = MODEL, **params: Any) -> InvalidArgumentError:
    with pytest.raises(InvalidArgumentError) as caught:
        build(prompt, model, **params)
    return caught.value


@pytest.mark.parametrize(
    ("prompt", "field", "value", "limit"),
    [
        ([], "prompt", "[]", "at least one token"),
        ([1] * 32, "prompt", "32 tokens", "fewer than max_model_len = 32"),
        ([1, 260], "prompt[1]", "260", "[0, 260)"),
        ([-1], "prompt[0]", "-1", "[0, 260)"),
        ([1, 2.0], "prompt[1]", "2.0", "[0, 260)"),
        ([True], "prompt[0]", "True", "[0, 260)"),
        ([1, "2"], "prompt[1]", "'2'", "[0, 260)"),
        ([None], "prompt[0]", "None", "[0, 260)"),
        ([[1]], "prompt[0]", "[1]", "[0, 260)"),
        ([np.int64(260)], "prompt[0]", "260", "[0, 260)"),
    ],
)
def test_prompts_that_are_refused(prompt: list[Any], field: str, value: str, limit: str) -> None:
    error = refusal(prompt)
    assert error.field == field
    assert value in str(error)
    assert limit in str(error)


@pytest.mark.parametrize(
    ("params", "field", "value"),
    [
        ({"stop_token_ids": [3, 260]}, "stop_token_ids", 260),
        ({"logit_bias": {-1: 1.0}}, "logit_bias", -1),
        ({"bad_words_token_ids": [[1], [2, 999]]}, "bad_words_token_ids", 999),
    ],
)
def test_token_ids_of_parameters_are_in_the_vocabulary(params: dict[str, Any], field: str, value: int) -> None:
    error = refusal(**params)
    assert (error.field, error.value) == (field, value)
    assert "[0, 260)" in str(error)


def test_longest_prompt_that_fits() -> None:
    (request,) = build([1] * 31)
    assert request.max_len == 32


def test_min_tokens_must_fit_behind_the_prompt() -> None:
    assert build([1] * 28, min_tokens=4)[0].max_len == 32
    error = refusal([1] * 28, min_tokens=5)
    assert (error.field, error.value) == ("min_tokens", 5)
    assert "= 4" in str(error)


@pytest.mark.parametrize(("max_tokens", "max_len"), [(1, 4), (29, 32), (30, 32), (10**9, 32), (None, 32)])
def test_max_tokens_is_capped_by_the_model(max_tokens: int | None, max_len: int) -> None:
    assert build(max_tokens=max_tokens)[0].max_len == max_len


def test_integers_of_numpy_are_token_ids() -> None:
    (request,) = build([np.int64(1), np.uint16(2), 3])
    assert request.prompt_token_ids == [1, 2, 3]
    assert {type(token) for token in request.prompt_token_ids} == {int}


def test_the_prompt_is_copied() -> None:
    prompt = [1, 2]
    (request,) = build(prompt)
    prompt.append(3)
    assert request.prompt_token_ids == [1, 2]


def test_one_request_for_each_output() -> None:
    requests = build(n=3, seed=10)
    assert [request.seed for request in requests] == [10, 11, 12]
    assert [request.request_id for request in requests] == ["r-0", "r-1", "r-2"]
    assert build(seed=10)[0].request_id == "r"


def test_seeds_wrap_around() -> None:
    assert [request.seed for request in build(n=3, seed=MAX_SEED - 1)] == [MAX_SEED - 1, MAX_SEED, 0]


def test_without_a_seed_one_is_drawn() -> None:
    drawn = {build()[0].seed for _ in range(20)}
    assert len(drawn) == 20
    assert all(0 <= seed <= MAX_SEED for seed in drawn)


def test_end_tokens_of_the_model_stop_unless_ignored() -> None:
    assert build()[0].stop_token_ids == (END, 5)
    assert build(stop_token_ids=[9, 5])[0].stop_token_ids == (9, 5, END)
    assert build(stop_token_ids=[9], ignore_eos=True)[0].stop_token_ids == (9,)
    assert build(ignore_eos=True)[0].stop_token_ids == ()


def test_end_tokens_that_the_model_cannot_draw_are_left_out() -> None:
    """As a place among the logits they would belong to the next row."""
    model = dataclasses.replace(MODEL, eos_token_ids=(259, 260, 10**6))
    assert build(model=model)[0].stop_token_ids == (259,)


def test_stop_and_end_tokens_have_room_for_so_many() -> None:
    model = dataclasses.replace(MODEL, eos_token_ids=tuple(range(200, 217)))
    assert len(build(model=model, stop_token_ids=range(127))[0].stop_token_ids) == 144
    error = refusal(model=model, stop_token_ids=range(128))
    assert str(error) == "stop_token_ids = '145 entries': expected at most 144 with the end tokens of the model"
    assert len(build(model=model, stop_token_ids=range(128), ignore_eos=True)[0].stop_token_ids) == 128


@pytest.mark.parametrize(("wish", "given"), [(None, 4), (0, 0), (2, 2), (4, 4), (100, 4)])
def test_draft_tokens_are_at_most_those_of_the_engine(wish: int | None, given: int) -> None:
    assert build(num_speculative_tokens=wish)[0].num_speculative_tokens == given


def test_bad_words_as_they_begin_a_text_and_within_it() -> None:
    assert build(bad_words=["no"])[0].bad_words == (tuple(b"no"), tuple(b" no"))
    assert build(bad_words=[" no"])[0].bad_words == (tuple(b" no"),)
    both = build(bad_words=["é"], bad_words_token_ids=[[7, 8]])[0].bad_words
    assert both == ((7, 8), tuple("é".encode()), tuple(" é".encode()))


def test_bad_words_must_be_words_of_the_model() -> None:
    error = refusal(model=dataclasses.replace(MODEL, vocab_size=100), bad_words=["ok", "zz"])
    assert error.field == "bad_words"
    assert "100 tokens" in str(error)


def test_a_bad_word_has_a_length() -> None:
    assert build(bad_words=["x" * 63])[0].bad_words == (tuple(b"x" * 63), tuple(b" " + b"x" * 63))
    error = refusal(bad_words=["ok", "x" * 64])
    assert error.field == "bad_words"
    assert error.expected == "words of at most 64 tokens, where this one has 65"


def test_text_that_is_no_text_is_refused() -> None:
    assert refusal(bad_words=["a\ud800"]).field == "bad_words"
    with pytest.raises(InvalidArgumentError, match=r"prompt = .*surrogates"):
        MODEL.tokenize("a\ud800")


@pytest.mark.parametrize("params", [{"stop": ["x"]}, {"bad_words": ["x"]}])
def test_without_a_tokenizer_there_is_no_text(params: dict[str, Any]) -> None:
    error = refusal(model=NO_TOKENIZER, **params)
    assert error.field in params
    assert "no tokenizer" in str(error)
    assert build(model=NO_TOKENIZER, stop_token_ids=[1], bad_words_token_ids=[[2]])[0].bad_words == ((2,),)
    with pytest.raises(InvalidArgumentError, match="prompt = 'text': expected token ids"):
        NO_TOKENIZER.tokenize("text")


def test_tokenize() -> None:
    assert MODEL.tokenize("aé<end>") == [*"aé".encode(), END]
