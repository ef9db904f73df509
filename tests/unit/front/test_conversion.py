"""Messages of VllmEngine as our values: what unset means, field by field."""

from __future__ import annotations

from typing import Any

import pytest
from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from common.engine_extensions import NUM_OUTPUT_TOKENS, NUM_SPECULATIVE_TOKENS, SEED, STEP_COUNTS
from common.errors import InvalidArgumentError
from common.sampling_params import MAX_SEED, SamplingParams
from common.types import TokenLogprobs
from verifier_svc.front.conversion import Wishes, input_logprobs, output_logprobs, to_sampling_params, truncated

NO_WISHES = Wishes()


def convert(**fields: Any) -> SamplingParams:
    return to_sampling_params(pb.SamplingParams(**fields), NO_WISHES)


def test_an_empty_message_is_the_defaults_and_no_limit() -> None:
    assert convert() == SamplingParams(max_tokens=None, skip_special_tokens=False)


@pytest.mark.parametrize(
    ("field", "zero_means"),
    [
        ("top_p", 1.0),
        ("top_k", 0),
        ("min_p", 0.0),
        ("frequency_penalty", 0.0),
        ("presence_penalty", 0.0),
        ("repetition_penalty", 1.0),
        ("min_tokens", 0),
        ("n", 1),
    ],
)
def test_zero_is_unset(field: str, zero_means: float) -> None:
    assert getattr(convert(**{field: 0}), field) == zero_means


def test_zero_is_a_value_where_the_proto_can_tell() -> None:
    assert convert(temperature=0).is_greedy
    assert convert(seed=0).seed == 0
    assert (convert(logprobs=0).logprobs, convert(prompt_logprobs=0).prompt_logprobs) == (0, 0)
    assert convert().temperature == 1.0
    assert (convert().seed, convert().logprobs) == (None, None)
    with pytest.raises(InvalidArgumentError, match="max_tokens = 0"):
        convert(max_tokens=0)


def test_every_field_arrives() -> None:
    params = convert(
        temperature=0.5,
        top_p=0.25,
        top_k=7,
        min_p=0.125,
        frequency_penalty=-1.5,
        presence_penalty=0.75,
        repetition_penalty=1.25,
        max_tokens=9,
        min_tokens=3,
        stop=["a", "b"],
        stop_token_ids=[4, 5],
        skip_special_tokens=True,
        spaces_between_special_tokens=True,
        ignore_eos=True,
        n=2,
        logprobs=4,
        prompt_logprobs=5,
        seed=6,
        include_stop_str_in_output=True,
        logit_bias={7: -2.5},
    )
    assert params == SamplingParams(
        temperature=0.5,
        top_p=0.25,
        top_k=7,
        min_p=0.125,
        frequency_penalty=-1.5,
        presence_penalty=0.75,
        repetition_penalty=1.25,
        max_tokens=9,
        min_tokens=3,
        stop=("a", "b"),
        stop_token_ids=(4, 5),
        skip_special_tokens=True,
        ignore_eos=True,
        n=2,
        logprobs=4,
        prompt_logprobs=5,
        seed=6,
        include_stop_str_in_output=True,
        logit_bias={7: -2.5},
    )


def test_wishes() -> None:
    metadata = {
        NUM_SPECULATIVE_TOKENS: "0",
        NUM_OUTPUT_TOKENS: "12",
        SEED: str(MAX_SEED),
        STEP_COUNTS: "1",
        "other": "x",
    }
    wishes = Wishes.of(metadata)
    assert wishes == Wishes(0, 12, MAX_SEED, True)
    assert dict(wishes.answer) == {NUM_OUTPUT_TOKENS: "12", SEED: str(MAX_SEED)}
    params = to_sampling_params(pb.SamplingParams(seed=3), wishes)
    assert (params.seed, params.num_speculative_tokens) == (MAX_SEED, 0)
    assert Wishes.of({}) == NO_WISHES
    assert NO_WISHES.answer == ()


@pytest.mark.parametrize("key", [NUM_SPECULATIVE_TOKENS, NUM_OUTPUT_TOKENS, SEED, STEP_COUNTS])
@pytest.mark.parametrize("value", ["", "-1", "1.5", "x", "\u0661", "9" * 21, "99999999999999999999"])
def test_wishes_that_are_no_numbers(key: str, value: str) -> None:
    with pytest.raises(InvalidArgumentError, match=key):
        Wishes.of({key: value})


def test_truncated_prompts() -> None:
    prompt = list(range(10))
    assert truncated(prompt, pb.SamplingParams(), 5) == prompt
    assert truncated(prompt, pb.SamplingParams(truncate_prompt_tokens=3), 5) == [7, 8, 9]
    assert truncated(prompt, pb.SamplingParams(truncate_prompt_tokens=30), 5) == prompt
    assert truncated(prompt, pb.SamplingParams(truncate_prompt_tokens=-1), 5) == [6, 7, 8, 9]


def test_logprobs() -> None:
    entries = [TokenLogprobs([5, 5, 6], [-1.0, -1.0, -2.0], 1), TokenLogprobs([7, 8, 9], [-4.0, -0.5, -3.0], 3)]
    output = output_logprobs([5, 7], entries)
    assert (list(output.token_ids), list(output.token_logprobs)) == ([5, 7], [-1.0, -4.0])
    assert [list(top.token_ids) for top in output.top_logprobs] == [[5, 6], [8, 9]]
    prompt = input_logprobs([1, 5, 7], entries)
    assert [entry.value if entry.HasField("value") else None for entry in prompt.token_logprobs] == [None, -1.0, -4.0]
    assert [list(top.values) for top in prompt.top_logprobs] == [[], [-1.0, -2.0], [-0.5, -3.0]]
