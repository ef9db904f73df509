"""Bad requests: an error that names the field, the value and the limit, and an engine that goes on with the others."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from common.errors import InvalidArgumentError, ResourceExhaustedError, UnknownOptionError
from outrider import LLM, SamplingParams
from verifier_svc.front.admission import build_requests

MAX_MODEL_LEN = 64
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
PROMPT = [72, 101, 108, 108, 111]


def load(directory: Path, **options: Any) -> LLM:
    small: dict[str, Any] = {"max_model_len": MAX_MODEL_LEN, "kv_cache_memory": "1M", "max_num_seqs": 4}
    return LLM(str(directory), **(small | options))


def tokens_of(llm: LLM) -> list[int]:
    return llm.generate(PROMPT, GREEDY, use_tqdm=False)[0].outputs[0].token_ids


@pytest.fixture(scope="module")
def llm(tiny_llama: Path) -> Iterator[LLM]:
    with load(tiny_llama, max_num_waiting=3) as llm:
        yield llm


@pytest.fixture(scope="module")
def expected(llm: LLM) -> list[int]:
    return tokens_of(llm)


def check_still_serving(llm: LLM, expected: list[int]) -> None:
    assert tokens_of(llm) == expected
    pool = llm._engine.orchestrator.pool
    assert pool.num_free == pool.num_blocks - 1


# parameters, and what the message must say: field and value, then the limit
PARAMETERS: list[tuple[dict[str, Any], str, str]] = [
    ({"n": 0}, "n = 0", "1"),
    ({"n": 65}, "n = 65", "64"),
    ({"temperature": -0.1}, "temperature = -0.1", "0"),
    ({"temperature": float("nan")}, "temperature = nan", "100"),
    ({"top_p": 0.0}, "top_p = 0.0", "greater than 0"),
    ({"top_p": 1.1}, "top_p = 1.1", "1"),
    ({"top_k": -2}, "top_k = -2", "-1"),
    ({"min_p": 1.5}, "min_p = 1.5", "1"),
    ({"repetition_penalty": 0.0}, "repetition_penalty = 0.0", "0"),
    ({"presence_penalty": 2.5}, "presence_penalty = 2.5", "2"),
    ({"frequency_penalty": -2.5}, "frequency_penalty = -2.5", "-2"),
    ({"max_tokens": 0}, "max_tokens = 0", "1"),
    ({"min_tokens": -1}, "min_tokens = -1", "0"),
    ({"min_tokens": 9, "max_tokens": 8}, "min_tokens = 9", "max_tokens = 8"),
    ({"min_tokens": 60, "max_tokens": None}, "min_tokens = 60", "= 59"),
    ({"seed": -1}, "seed = -1", "0"),
    ({"seed": 2**64}, f"seed = {2**64}", str(2**64 - 1)),
    ({"logprobs": 21}, "logprobs = 21", "20"),
    ({"prompt_logprobs": -1}, "prompt_logprobs = -1", "0"),
    ({"num_speculative_tokens": -1}, "num_speculative_tokens = -1", "0"),
    ({"stop": [""]}, "stop = ''", "1 to 512"),
    ({"stop": ["x"] * 17}, "stop = '17 entries'", "16"),
    ({"stop_token_ids": [1, 320]}, "stop_token_ids = 320", "[0, 320)"),
    ({"stop_token_ids": [-1]}, "stop_token_ids = -1", "[0, 320)"),
    ({"logit_bias": {320: 1.0}}, "logit_bias = 320", "[0, 320)"),
    ({"logit_bias": {1: 101.0}}, "logit_bias[1] = 101.0", "[-100, 100]"),
    ({"bad_words": [""]}, "bad_words = ''", "not empty"),
    ({"bad_words": ["\ud800"]}, "bad_words = '\\ud800'", "surrogates"),
    ({"bad_words_token_ids": [[1, 999]]}, "bad_words_token_ids = 999", "[0, 320)"),
    ({"bad_words_token_ids": [[]]}, "bad_words_token_ids = ()", "not empty"),
    ({"temperature": "hot"}, "temperature = 'hot'", "number"),
    ({"stop": 7}, "stop = 7", "tuple"),
]


@pytest.mark.parametrize(("params", "named", "limit"), PARAMETERS, ids=[named for _, named, _ in PARAMETERS])
def test_parameters(llm: LLM, expected: list[int], params: dict[str, Any], named: str, limit: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        llm.generate(PROMPT, SamplingParams(**params), use_tqdm=False)
    assert str(caught.value).startswith(f"{named}: expected ")
    assert limit in caught.value.expected
    check_still_serving(llm, expected)


PROMPTS: list[tuple[Any, str, str]] = [
    ("", "prompt = []", "at least one token"),
    ([[]], "prompt = []", "at least one token"),
    ([[1], []], "prompt = []", "at least one token"),
    ([320], "prompt[0] = 320", "[0, 320)"),
    ([[5, -1]], "prompt[1] = -1", "[0, 320)"),
    ([True, False], "prompt[0] = True", "[0, 320)"),
    ([[1, 2.0]], "prompt[1] = 2.0", "[0, 320)"),
    ([[1, None]], "prompt[1] = None", "[0, 320)"),
    ([[1] * 64], "prompt = '64 tokens'", "fewer than max_model_len = 64"),
    ("x" * 1000, "prompt = '1000 tokens'", "fewer than max_model_len = 64"),
    ("a\ud800", "prompt = 'a\\ud800'", "surrogates"),
    (5, "prompts = 5", "token ids"),
    (None, "prompts = None", "token ids"),
    (b"bytes", "prompts = b'bytes'", "token ids"),
    ({"prompt": "x"}, "prompts = {'prompt': 'x'}", "token ids"),
    (["x", 5.0], "prompts[1] = 5.0", "token ids"),
    (["x", b"y"], "prompts[1] = b'y'", "token ids"),
]


@pytest.mark.parametrize(("prompts", "named", "limit"), PROMPTS, ids=map(repr, range(len(PROMPTS))))
def test_prompts(llm: LLM, expected: list[int], prompts: Any, named: str, limit: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        llm.generate(prompts, GREEDY, use_tqdm=False)
    assert str(caught.value).startswith(f"{named}: expected ")
    assert limit in caught.value.expected
    check_still_serving(llm, expected)


@pytest.mark.parametrize("params", ["greedy", 5, [5], [GREEDY, None], {"temperature": 0}])
def test_parameters_of_the_wrong_type(llm: LLM, expected: list[int], params: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="sampling_params = "):
        llm.generate([PROMPT, PROMPT], params, use_tqdm=False)
    with pytest.raises(InvalidArgumentError, match="sampling_params = "):
        next(llm.stream(PROMPT, params))
    check_still_serving(llm, expected)


def test_parameters_for_another_number_of_prompts(llm: LLM) -> None:
    with pytest.raises(InvalidArgumentError, match="sampling_params = '3 entries': expected one for each of the 2"):
        llm.generate([PROMPT, PROMPT], [GREEDY] * 3)


def test_an_unknown_parameter() -> None:
    with pytest.raises(UnknownOptionError, match="unknown option 'max_token'; did you mean 'max_tokens'"):
        SamplingParams(max_token=5)


def test_streams_are_checked_as_well(llm: LLM, expected: list[int]) -> None:
    for prompt, params in (([320], GREEDY), (PROMPT, GREEDY.model_copy(update={"n": 2})), (5, GREEDY)):
        with pytest.raises(InvalidArgumentError):
            next(llm.stream(prompt, params))  # type: ignore[arg-type]
    check_still_serving(llm, expected)


def test_a_bad_request_leaves_the_others_alone(llm: LLM, expected: list[int]) -> None:
    """Refused while another request is in the middle of its output."""
    stream = llm.stream(PROMPT, GREEDY)
    got = list(next(stream).token_ids)
    for bad in ([999], [], "\ud800"):
        with pytest.raises(InvalidArgumentError):
            llm.generate([PROMPT, bad], GREEDY, use_tqdm=False)  # type: ignore[list-item]
    got += [token for delta in stream for token in delta.token_ids]
    assert got == expected
    check_still_serving(llm, expected)


def test_a_full_queue(llm: LLM, expected: list[int]) -> None:
    engine = llm._engine
    for index in range(3):
        engine.add(build_requests(f"waiting-{index}", PROMPT, GREEDY, llm._served)[0])
    with pytest.raises(ResourceExhaustedError, match=r"3 requests .*max_num_waiting = 3"):
        engine.add(build_requests("one-more", PROMPT, GREEDY, llm._served)[0])
    for index in range(3):
        assert engine.abort(f"waiting-{index}")
    check_still_serving(llm, expected)


def test_token_ids_only_without_a_tokenizer(tiny_llama: Path, expected: list[int]) -> None:
    with load(tiny_llama, skip_tokenizer_init=True) as llm:
        for prompt, params in (
            ("text", GREEDY),
            (PROMPT, GREEDY.model_copy(update={"stop": ("x",)})),
            (PROMPT, GREEDY.model_copy(update={"bad_words": ("x",)})),
        ):
            with pytest.raises(InvalidArgumentError, match="no tokenizer"):
                llm.generate(prompt, params, use_tqdm=False)
        check_still_serving(llm, expected)
