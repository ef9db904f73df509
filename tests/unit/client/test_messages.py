"""Requests and answers of VllmEngine as messages."""

from __future__ import annotations

import grpc
import grpc.aio
import pytest
from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from common.engine_extensions import NUM_SPECULATIVE_TOKENS, SEED, StepCounts
from common.errors import InvalidArgumentError, OutriderError, UnavailableError
from common.sampling_params import SamplingParams
from outrider.client.errors import BrokenStreamError, is_connection_failure, is_transient, to_error
from outrider.client.generation import Generation
from outrider.client.messages import Piece, generate_request, read_chunk, read_logprobs, read_prompt_logprobs
from tests.fake_engine_server import MODEL
from verifier_svc.front.admission import build_requests

PARAMS = SamplingParams(
    temperature=0.0,
    top_p=0.5,
    top_k=7,
    min_p=0.25,
    repetition_penalty=1.5,
    presence_penalty=-1.0,
    frequency_penalty=0.5,
    logit_bias={3: -2.0},
    min_tokens=2,
    max_tokens=9,
    stop=("a", "b"),
    stop_token_ids=(5,),
    include_stop_str_in_output=True,
    ignore_eos=True,
    logprobs=0,
    prompt_logprobs=2,
    skip_special_tokens=False,
)


def test_every_parameter_arrives() -> None:
    request = generate_request("id", [1, 2], PARAMS, 2**32 - 1, wants_prompt_logprobs=True)
    sent = request.sampling_params
    assert (request.request_id, list(request.tokenized.input_ids), request.stream) == ("id", [1, 2], True)
    assert sent.HasField("temperature")
    for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "min_tokens"):
        assert getattr(sent, name) == getattr(PARAMS, name)
    for name in ("frequency_penalty", "max_tokens", "include_stop_str_in_output", "ignore_eos", "skip_special_tokens"):
        assert getattr(sent, name) == getattr(PARAMS, name)
    assert (list(sent.stop), list(sent.stop_token_ids), dict(sent.logit_bias)) == (["a", "b"], [5], {3: -2.0})
    assert (sent.logprobs, sent.prompt_logprobs, sent.n) == (0, 2, 1)
    assert sent.HasField("logprobs")
    assert sent.seed == -1  # the unsigned value, as the front reads it


def test_what_is_unset_stays_unset() -> None:
    sent = generate_request("id", [1], SamplingParams(max_tokens=None, top_k=-1), 5, True).sampling_params
    for name in ("max_tokens", "logprobs", "prompt_logprobs"):
        assert not sent.HasField(name)
    assert sent.top_k == 0
    assert sent.seed == 5


@pytest.mark.parametrize(("seed", "is_metadata"), [(0, False), (2**32 - 1, False), (2**32, True), (2**64 - 1, True)])
def test_large_seeds_go_as_metadata(seed: int, is_metadata: bool) -> None:
    params = SamplingParams(seed=seed, num_speculative_tokens=0)
    (request,) = build_requests("r", [1, 2], params, MODEL)
    plan = Generation(request, None).next_call()
    metadata = dict(plan.metadata)
    assert metadata[NUM_SPECULATIVE_TOKENS] == "0"
    assert (metadata.get(SEED) == str(seed)) is is_metadata
    assert plan.request.sampling_params.HasField("seed") is not is_metadata
    assert plan.required == ((SEED,) if is_metadata else ())


def test_prompt_logprobs_are_asked_for_once() -> None:
    requests = build_requests("r", [1, 2], PARAMS.model_copy(update={"n": 2, "seed": 1}), MODEL)
    calls = [Generation(request, None, index).next_call() for index, request in enumerate(requests)]
    assert [call.request.sampling_params.HasField("prompt_logprobs") for call in calls] == [True, False]


def test_logprobs_that_do_not_fit_are_no_logprobs() -> None:
    good = pb.OutputLogProbs(token_ids=[1, 2], token_logprobs=[-1.0, -2.0])
    good.top_logprobs.add(token_ids=[9, 1], values=[-0.5, -1.0])
    good.top_logprobs.add(token_ids=[9], values=[-0.5])
    first, second = read_logprobs(good, [1, 2])
    assert (first.token_ids, first.logprobs, first.rank) == ([1, 9, 1], [-1.0, -0.5, -1.0], 2)
    assert second.rank == 0
    bad = [pb.OutputLogProbs() for _ in range(4)]
    for message in bad:
        message.CopyFrom(good)
    bad[0].token_ids[0] = 7
    del bad[1].token_logprobs[1:]
    del bad[2].top_logprobs[1:]
    del bad[3].top_logprobs[0].values[1:]
    for message in bad:
        with pytest.raises(BrokenStreamError):
            read_logprobs(message, [1, 2])


def test_prompt_logprobs_have_none_for_the_first_token() -> None:
    message = pb.InputLogProbs(token_ids=[4, 5])
    message.token_logprobs.add()
    message.token_logprobs.add(value=-3.0)
    assert read_prompt_logprobs(message, 2)[0].logprobs == [-3.0]
    assert read_prompt_logprobs(pb.InputLogProbs(), 2) == []
    with pytest.raises(BrokenStreamError):
        read_prompt_logprobs(message, 3)


def test_the_first_tokens_of_a_piece_can_be_taken_off() -> None:
    piece = Piece([1, 2, 3, 4], None, [StepCounts(3, 4, 2), StepCounts(1, 0, 0)])
    assert piece.without(1) == Piece([2, 3, 4], None, [StepCounts(2, 4, 1), StepCounts(1, 0, 0)])
    assert piece.without(3) == Piece([4], None, [StepCounts(1, 0, 0)])
    assert piece.without(0) == piece


def test_a_chunk_without_step_counts_says_nothing_of_steps() -> None:
    assert read_chunk(pb.GenerateStreamChunk(token_ids=[1]), wants_logprobs=False) == Piece([1], None, None)


def failure(code: grpc.StatusCode, details: str = "") -> grpc.aio.AioRpcError:
    empty = grpc.aio.Metadata()
    return grpc.aio.AioRpcError(code, empty, empty, details)


@pytest.mark.parametrize("code", list(grpc.StatusCode))
def test_every_status_is_an_error_of_ours(code: grpc.StatusCode) -> None:
    error = to_error("a:1", failure(code, "the reason"))
    assert isinstance(error, OutriderError)
    assert "a:1" in str(error)
    assert "the reason" in str(error)


def test_which_failures_are_tried_again() -> None:
    transient = [code for code in grpc.StatusCode if is_transient(failure(code))]
    expected = {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.CANCELLED}
    assert set(transient) == expected
    assert not is_connection_failure(failure(grpc.StatusCode.RESOURCE_EXHAUSTED))
    assert is_transient(failure(grpc.StatusCode.INTERNAL, "Received RST_STREAM with error code 2"))
    assert is_transient(BrokenStreamError("x"))
    assert isinstance(to_error("a:1", BrokenStreamError("x")), UnavailableError)
    assert isinstance(to_error("a:1", failure(grpc.StatusCode.INVALID_ARGUMENT, "n = 0")), InvalidArgumentError)
