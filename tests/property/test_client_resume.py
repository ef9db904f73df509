"""An output that is cut anywhere, any number of times, is the output without a cut."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from common.engine_extensions import NUM_OUTPUT_TOKENS, encode_step_counts
from common.errors import OutriderError
from common.sampling_params import SamplingParams
from outrider.client.errors import BrokenStreamError, ResumeError
from outrider.client.generation import Generation
from outrider.client.results import build_output
from tests.fake_engine_server import MAX_MODEL_LEN, MODEL, expected_outputs, respond
from verifier_svc.front.admission import build_requests
from verifier_svc.front.output_stream import OutputDelta, OutputStream

_PARAMS = st.builds(
    SamplingParams,
    seed=st.integers(0, 2**64 - 1) | st.integers(0, 50),
    max_tokens=st.none() | st.integers(20, 60),
    min_tokens=st.integers(0, 20),
    presence_penalty=st.sampled_from([0.0, 0.0, 0.5]),
    stop=st.lists(st.text("abcdefghij", min_size=1, max_size=3), max_size=3).map(tuple),
    stop_token_ids=st.lists(st.integers(97, 122), max_size=1).map(tuple),
    include_stop_str_in_output=st.booleans(),
    ignore_eos=st.booleans(),
    logprobs=st.none() | st.integers(0, 2),
    skip_special_tokens=st.booleans(),
)
_CUTS = st.lists(st.integers(0, 12), max_size=8)
PROMPT = list(b"once upon")


def run(params: SamplingParams, cuts: list[int], *, repeats_all: bool = False) -> tuple[Generation, list[OutputDelta]]:
    """Cut the n-th call after cuts[n] messages; the last call runs to its end."""
    (request,) = build_requests("r", PROMPT, params, MODEL)
    generation = Generation(request, MODEL.tokenizer)
    deltas: list[OutputDelta] = []
    remaining = list(cuts)
    while not generation.is_finished:
        plan = generation.next_call()
        cut = remaining.pop(0) if remaining else None
        for number, response in enumerate(respond(plan.request, dict(plan.metadata), repeats_all=repeats_all)):
            if number == cut or generation.is_finished:
                break
            deltas += generation.accept(response)
        assert remaining or cut is None or len(deltas) < 10 * MAX_MODEL_LEN
    return generation, deltas


@given(_PARAMS, _CUTS, st.booleans())
@example(SamplingParams(seed=1, max_tokens=3), [3, 3, 3], False)
def test_a_cut_never_shows(params: SamplingParams, cuts: list[int], repeats_all: bool) -> None:
    (expected,) = expected_outputs(PROMPT, params)
    generation, deltas = run(params, cuts, repeats_all=repeats_all)
    stream = generation.stream
    assert stream.token_ids == expected.token_ids
    assert stream.text == expected.text
    assert (stream.finish_reason, stream.stop_reason) == (expected.finish_reason, expected.stop_reason)
    # What the caller saw piece by piece is the same.
    assert [token for delta in deltas for token in delta.token_ids] == expected.token_ids
    assert "".join(delta.text for delta in deltas) == expected.text
    assert [delta.finish_reason for delta in deltas][:-1] == [None] * (len(deltas) - 1)
    assert deltas[-1].finish_reason is expected.finish_reason
    if params.logprobs is not None:
        assert _without_ranks(stream) == _without_ranks(expected)


@given(_PARAMS)
def test_without_a_cut_the_draft_statistics_are_those_of_the_steps(params: SamplingParams) -> None:
    (expected,) = expected_outputs(PROMPT, params)
    generation, deltas = run(params, [])
    assert generation.stream.draft_stats == expected.draft_stats
    assert sum(delta.num_accepted_tokens for delta in deltas) == expected.draft_stats.num_accepted_tokens


@given(_PARAMS, _CUTS)
def test_a_service_that_knows_no_extensions_resumes_what_does_not_look_at_the_output(
    params: SamplingParams, cuts: list[int]
) -> None:
    params = params.model_copy(update={"presence_penalty": 0.0, "min_tokens": 0, "seed": (params.seed or 0) % 2**32})
    (expected,) = expected_outputs(PROMPT, params)
    (request,) = build_requests("r", PROMPT, params, MODEL)
    generation = Generation(request, MODEL.tokenizer)
    remaining = list(cuts)
    while not generation.is_finished:
        plan = generation.next_call()
        assert plan.required == ()
        cut = remaining.pop(0) if remaining else None
        for number, response in enumerate(respond(plan.request, {}, extensions=False)):
            if number == cut or generation.is_finished:
                break
            generation.accept(response)
    assert generation.stream.token_ids == expected.token_ids
    assert generation.stream.text == expected.text
    assert generation.stream.finish_reason == expected.finish_reason


@pytest.mark.parametrize("changed", [{"presence_penalty": 0.5}, {"frequency_penalty": -0.5}, {"min_tokens": 9}])
def test_what_looks_at_the_output_is_not_resumed_by_a_service_that_cannot(changed: dict[str, float]) -> None:
    (request,) = build_requests("r", PROMPT, SamplingParams(seed=1, max_tokens=20, **changed), MODEL)
    generation = Generation(request, MODEL.tokenizer)
    plan = generation.next_call()
    assert plan.required == ()
    for number, response in enumerate(respond(plan.request, {})):
        if number == 3:
            break
        generation.accept(response)
    plan = generation.next_call()
    assert plan.required == (NUM_OUTPUT_TOKENS,)
    with pytest.raises(ResumeError, match="does not know"):
        generation.check_answer("a:1", plan, {})
    generation.check_answer("a:1", plan, {NUM_OUTPUT_TOKENS: "4"})


def test_another_model_at_the_other_address_is_noticed() -> None:
    params = SamplingParams(seed=1, max_tokens=20, ignore_eos=True)
    (request,) = build_requests("r", PROMPT, params, MODEL)
    generation = Generation(request, MODEL.tokenizer)
    responses = list(respond(generation.next_call().request, {}))
    for response in responses[:3]:
        generation.accept(response)
    before = list(generation.stream.token_ids)
    plan = generation.next_call()
    plan.request.sampling_params.seed = 2  # as good as another model
    response = next(respond(plan.request, dict(plan.metadata)))
    with pytest.raises(ResumeError, match=f"it was {before[-1]}"):
        generation.accept(response)
    assert generation.stream.token_ids == before


def test_an_end_that_does_not_fit_the_tokens_is_no_end() -> None:
    params = SamplingParams(seed=1, max_tokens=20, ignore_eos=True)
    (request,) = build_requests("r", PROMPT, params, MODEL)
    generation = Generation(request, MODEL.tokenizer)
    *chunks, end = respond(generation.next_call().request, {})
    for response in chunks[:2]:
        generation.accept(response)
    end.complete.ClearField("output_ids")
    with pytest.raises(BrokenStreamError, match="after 20 tokens"):
        generation.accept(end)


def test_tokens_that_only_the_end_brings_are_taken() -> None:
    params = SamplingParams(seed=1, max_tokens=20, ignore_eos=True)
    (expected,) = expected_outputs(PROMPT, params)
    (request,) = build_requests("r", PROMPT, params, MODEL)
    generation = Generation(request, MODEL.tokenizer)
    *chunks, end = respond(generation.next_call().request, {})
    for response in (*chunks[:2], end):
        generation.accept(response)
    assert generation.stream.token_ids == expected.token_ids
    assert build_output("r", None, [generation]).outputs[0].finish_reason == "length"


def _without_ranks(stream: OutputStream) -> list[tuple[list[int], list[float]]]:
    return [(entry.token_ids, entry.logprobs) for entry in stream.logprobs]


_TOKENS = st.lists(st.integers(0, 2**32 - 1) | st.integers(0, 260), max_size=5)
_FLOATS = st.lists(st.floats(width=32), max_size=5)
_TOP = st.builds(lambda ids, values: pb.TopLogProbs(token_ids=ids, values=values), _TOKENS, _FLOATS)
_LOGPROBS = st.builds(
    lambda ids, values, top: pb.OutputLogProbs(token_ids=ids, token_logprobs=values, top_logprobs=top),
    _TOKENS,
    _FLOATS,
    st.lists(_TOP, max_size=5),
)
_CHUNKS = st.builds(
    lambda ids, logprobs, index, extra: _with_unknown(
        pb.GenerateStreamChunk(token_ids=ids, output_logprobs=logprobs, index=index), extra
    ),
    _TOKENS,
    _LOGPROBS,
    st.sampled_from([0, 0, 0, 0, 1]),
    st.none() | st.binary(max_size=12),
)
_ENDS = st.builds(
    lambda ids, reason, count, index: pb.GenerateComplete(
        output_ids=ids, finish_reason=reason, completion_tokens=count, index=index
    ),
    _TOKENS,
    st.sampled_from(["stop", "length", "abort", "error", "", "STOP"]),
    st.integers(0, 8),
    st.sampled_from([0, 0, 0, 1]),
)
_RESPONSES = st.builds(lambda chunk: pb.GenerateResponse(chunk=chunk), _CHUNKS) | st.builds(
    lambda end: pb.GenerateResponse(complete=end), _ENDS
)


@given(
    st.lists(st.lists(_RESPONSES, max_size=6), min_size=1, max_size=3),
    st.booleans(),
    st.booleans(),
)
def test_nonsense_is_refused_and_never_more_than_was_asked_for(
    calls: list[list[pb.GenerateResponse]], wants_logprobs: bool, stops: bool
) -> None:
    params = SamplingParams(
        seed=1, max_tokens=6, stop=("a", "<s") if stops else (), logprobs=1 if wants_logprobs else None
    )
    (request,) = build_requests("r", PROMPT, params, MODEL)
    generation = Generation(request, MODEL.tokenizer)
    for responses in calls:
        if generation.is_finished:
            break
        generation.next_call()
        try:
            for response in responses:
                generation.accept(response)
        except (BrokenStreamError, OutriderError):
            continue
    stream = generation.stream
    assert len(stream.token_ids) <= 6
    if wants_logprobs:
        assert len(stream.logprobs) == len(stream.token_ids)
    build_output("r", None, [generation])


def _with_unknown(chunk: pb.GenerateStreamChunk, payload: bytes | None) -> pb.GenerateStreamChunk:
    if payload is not None:
        field = encode_step_counts([])[:-1] + bytes([len(payload)]) + payload
        chunk.MergeFromString(field)
    return chunk
