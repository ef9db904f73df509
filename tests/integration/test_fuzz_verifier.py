"""Calls of VllmEngine that no client would make: each ends with a status, and the verifier goes on as if nothing was.

A call is a method, bytes, metadata and what the client does with the answer. Several run at the same time.
"""

from __future__ import annotations

import string
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from smg_grpc_proto.generated import vllm_engine_pb2 as pb
from smg_grpc_proto.generated.vllm_engine_pb2_grpc import VllmEngineStub

from common.engine_extensions import NUM_OUTPUT_TOKENS, NUM_SPECULATIVE_TOKENS, SEED, STEP_COUNTS
from tests.byte_tokenizer import VOCAB_SIZE
from tests.drafter_process import running_drafter
from tests.engine_calls import collect, connected, generate, make_request, wait_idle
from tests.fake_engine import fake_output, fake_token
from tests.proto_strategies import damaged, floats, messages, signed, texts, unsigned
from tests.remote_llm import wait_until_idle
from tests.service_process import FAKE_VERIFIER, OUTRIDER, ServiceProcess, running

SERVICE = pb.DESCRIPTOR.services_by_name["VllmEngine"]
OTHER_METHODS = [method for method in SERVICE.methods if method.name != "Generate"]
MAX_MODEL_LEN = 128
CALL_LIMIT_S = 20.0
SMALL = ["--port", "0", "--max-num-seqs", "4", "--max-num-waiting", "8", "--max-model-len", str(MAX_MODEL_LEN)]
EXPECTED = {
    grpc.StatusCode.OK,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.UNIMPLEMENTED,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
}


@dataclass(frozen=True)
class Call:
    method: str
    data: bytes
    metadata: tuple[tuple[str, str | bytes], ...] = ()
    ends_after: int | None = None
    """Messages after which the client cancels."""
    timeout: float = CALL_LIMIT_S


# -- strategies --------------------------------------------------------------------------------------------------------

IDS = st.integers(0, 50).map("call-{}".format)  # now and then two at the same time with the same one
TOKENS = st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=40)
ANY_TOKENS = st.lists(unsigned(32) | st.integers(0, VOCAB_SIZE - 1), max_size=150)
ODD_TEXT = st.sampled_from(["", "a\0b", "e" * 500, "\U0001f600" * 20])

GOOD: dict[str, st.SearchStrategy[Any]] = {
    "temperature": st.sampled_from([0.0, 1e-30, 0.7, 1.0, 100.0]),
    "top_p": st.sampled_from([0.0, 1e-6, 0.5, 1.0]),
    "top_k": st.sampled_from([0, 1, 5, 319, 2**31, 2**32 - 1]),
    "min_p": st.sampled_from([0.0, 1e-6, 1.0]),
    "frequency_penalty": st.floats(-2, 2, width=32),
    "presence_penalty": st.floats(-2, 2, width=32),
    "repetition_penalty": st.sampled_from([0.0, 1e-3, 1.0, 100.0]),
    "max_tokens": st.integers(1, 50) | st.just(2**32 - 1),
    "min_tokens": st.integers(0, 3),
    "stop": st.lists(texts(4).filter(bool), max_size=3),
    "stop_token_ids": st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=3),
    "skip_special_tokens": st.booleans(),
    "ignore_eos": st.booleans(),
    "n": st.integers(0, 4),
    "logprobs": st.integers(0, 20),
    "prompt_logprobs": st.integers(0, 20),
    "seed": signed(31),
    "include_stop_str_in_output": st.booleans(),
    "logit_bias": st.dictionaries(st.integers(0, VOCAB_SIZE - 1), st.floats(-100, 100, width=32), max_size=3),
    "truncate_prompt_tokens": st.sampled_from([-1, 1, 7, 2**31 - 1]),
}
BAD: dict[str, st.SearchStrategy[Any]] = {
    **dict.fromkeys(["temperature", "top_p", "min_p"], floats()),
    **dict.fromkeys(["frequency_penalty", "presence_penalty", "repetition_penalty"], floats()),
    **dict.fromkeys(["top_k", "max_tokens", "min_tokens", "n"], unsigned(32)),
    **dict.fromkeys(["logprobs", "prompt_logprobs", "truncate_prompt_tokens"], signed(31)),
    "stop": st.lists(texts(), max_size=20) | st.just(["x" * 600]),
    "stop_token_ids": st.lists(unsigned(32), max_size=5) | st.just([1] * 200),
    "logit_bias": st.dictionaries(signed(31), floats(), max_size=3),
    **dict.fromkeys(["json_schema", "regex", "grammar", "structural_tag"], texts()),
    "json_object": st.booleans(),
}


@st.composite
def generate_requests(draw: st.DrawFn) -> bytes:
    """Right in everything but a few fields, or in everything."""
    names = draw(st.lists(st.sampled_from(sorted(GOOD)), max_size=6, unique=True))
    values = {name: draw(GOOD[name]) for name in names}
    is_right = draw(st.integers(0, 3)) > 0
    if not is_right:
        for name in draw(st.lists(st.sampled_from(sorted(BAD)), max_size=2)):
            values[name] = draw(BAD[name])
    request_id = draw(IDS) if is_right else draw(texts())
    request = pb.GenerateRequest(request_id=request_id, stream=draw(st.booleans()))
    request.sampling_params.CopyFrom(pb.SamplingParams(**values))
    if draw(st.booleans()):
        request.tokenized.input_ids.extend(draw(TOKENS if is_right else ANY_TOKENS))
        request.tokenized.original_text = draw(texts())
    else:
        request.text = draw(texts(30).filter(bool) if is_right else ODD_TEXT)
    return request.SerializeToString()


NUMBERS = st.sampled_from(["0", "1", "7", "9999", "10000", str(2**31), str(2**64 - 1), str(2**64), "-1", "1e3", ""])
KEYS = st.sampled_from([NUM_SPECULATIVE_TOKENS, NUM_OUTPUT_TOKENS, SEED, STEP_COUNTS])
WORDS = st.text(string.ascii_letters + string.digits + " -_:;=%/\"'{}", max_size=40)
ENTRIES = st.one_of(
    st.tuples(KEYS, NUMBERS | WORDS),
    st.tuples(st.sampled_from(["authorization", "traceparent", "tracestate", "x-request-id", "user-agent"]), WORDS),
    st.tuples(st.sampled_from(["x-any-bin", NUM_SPECULATIVE_TOKENS + "-bin"]), st.binary(max_size=40)),
)
RAW = st.one_of(
    st.binary(max_size=200),
    damaged(generate_requests()),
    st.sampled_from([b"\x0b" * 5000, b"\xff" * 11, b"\x0a\xff\xff\xff\xff\x0f", b"\x1a\x02\xc3\x28"]),
)


KINDS = ["generate"] * 5 + ["any generate", "raw", "other", "other", "raw other"]


@st.composite
def calls(draw: st.DrawFn) -> Call:
    kind = draw(st.sampled_from(KINDS))
    metadata = tuple(draw(st.lists(ENTRIES, max_size=2))) if draw(st.integers(0, 2)) == 0 else ()
    if kind in ("other", "raw other"):
        method = draw(st.sampled_from(OTHER_METHODS))
        if method.name == "Abort" and draw(st.booleans()):
            ids = draw(st.lists(IDS, max_size=30))
            return Call("Abort", pb.AbortRequest(request_ids=ids).SerializeToString(), metadata)
        data = draw(st.binary(max_size=60) if kind == "raw other" else messages(method.input_type).map(_to_bytes))
        return Call(method.name, data, metadata)
    if kind == "generate":
        data = draw(generate_requests())
        ends_after = draw(st.sampled_from([None] * 6 + [0, 1]))
        timeout = draw(st.sampled_from([CALL_LIMIT_S] * 6 + [0.002, 0.02]))
        return Call("Generate", data, metadata, ends_after, timeout)
    data = draw(RAW if kind == "raw" else messages(pb.GenerateRequest.DESCRIPTOR).map(_to_bytes))
    return Call("Generate", data, metadata)


def _to_bytes(message: Any) -> bytes:
    return message.SerializeToString()


# -- what must hold ----------------------------------------------------------------------------------------------------


@dataclass
class Outcome:
    call: Call
    code: grpc.StatusCode
    details: str
    responses: list[bytes]


def run_together(channel: grpc.Channel, some: Sequence[Call]) -> list[Outcome]:
    """All begin before the first answer is read."""
    begun: list[Any] = []
    for call in some:
        method: Any = channel.unary_stream(f"/{SERVICE.full_name}/{call.method}")
        begun.append(method(call.data, timeout=call.timeout, metadata=call.metadata))
    return [_finish(call, answer) for call, answer in zip(some, begun, strict=True)]


def _finish(call: Call, answer: Any) -> Outcome:
    responses: list[bytes] = []
    try:
        if call.ends_after == 0:
            answer.cancel()
        for response in answer:
            responses.append(response)
            if len(responses) == call.ends_after:
                answer.cancel()
    except grpc.RpcError:
        pass
    return Outcome(call, answer.code(), str(answer.details()), responses)


def check_status(outcome: Outcome) -> None:
    call = outcome.call
    allowed = set(EXPECTED)
    if call.ends_after is not None:
        allowed.add(grpc.StatusCode.CANCELLED)
    if call.timeout < CALL_LIMIT_S:
        allowed.add(grpc.StatusCode.DEADLINE_EXCEEDED)
    assert outcome.code in allowed, outcome
    assert len(outcome.details) < 2000
    if outcome.code is grpc.StatusCode.INVALID_ARGUMENT:
        assert outcome.details


def check_outputs(outcome: Outcome, *, is_fake: bool) -> None:
    """A Generate call that ended well gave each output whole, once."""
    if outcome.call.method != "Generate" or outcome.code is not grpc.StatusCode.OK:
        return
    request = pb.GenerateRequest.FromString(outcome.call.data)
    params = request.sampling_params
    outputs = collect(map(pb.GenerateResponse.FromString, outcome.responses), max(1, params.n))
    for index, output in enumerate(outputs):
        complete = output.complete
        tokens = list(complete.output_ids)
        assert output.token_ids == (tokens if request.stream else [])
        assert complete.finish_reason in ("stop", "length", "abort")
        assert complete.completion_tokens == len(tokens)
        if is_fake and params.HasField("seed") and not outcome.call.metadata:
            seed = (params.seed % 2**32 + index) % 2**64
            start = complete.prompt_tokens
            assert tokens == [fake_token(seed, position) for position in range(start, start + len(tokens))]


def fuzz(channel: grpc.Channel, stub: VllmEngineStub, num_examples: int, *, is_fake: bool) -> int:
    """Returns the number of calls."""
    count = 0

    # No shrinking: a verifier that has died answers every example in the same way.
    @settings(max_examples=num_examples, phases=[Phase.generate], suppress_health_check=[HealthCheck.too_slow])
    @given(st.lists(calls(), min_size=1, max_size=10))
    def run(some: list[Call]) -> None:
        nonlocal count
        count += len(some)
        for outcome in run_together(channel, some):
            check_status(outcome)
            check_outputs(outcome, is_fake=is_fake)
        wait_idle(stub, 20)

    run()
    return count


def check_log(process: ServiceProcess) -> None:
    """Nobody was surprised."""
    assert process.popen.poll() is None
    lines = process.error_text.splitlines()
    assert not [line for line in lines if any(word in line for word in ("Traceback", "a call failed", "Exception"))]


@pytest.fixture(scope="module")
def fake() -> Iterator[ServiceProcess]:
    with running([*FAKE_VERIFIER, "--step-ms", "0", "--", *SMALL]) as process:
        yield process


def test_any_calls_against_the_front(fake: ServiceProcess) -> None:
    address = fake.wait_ready()
    with connected(address) as stub, grpc.insecure_channel(address) as channel:
        count = fuzz(channel, stub, 330, is_fake=True)
        assert count >= 1000
        assert generate(stub, make_request([1], max_tokens=20, seed=3))[0].token_ids == fake_output([1], 20, seed=3)
    check_log(fake)


def test_any_calls_against_an_engine_with_a_drafter(tiny_llama: Path) -> None:
    flags = [*SMALL, "--num-threads", "1", "--draft-transport", "grpc"]
    with running_drafter() as drafter:
        command = [*OUTRIDER, "verifier", str(tiny_llama), "--drafter", f"grpc://{drafter.address}", *flags]
        with running(command) as process:
            address = process.wait_ready()
            with connected(address) as stub, grpc.insecure_channel(address) as channel:
                request = {"max_tokens": 40, "temperature": 1.0, "seed": 5, "ignore_eos": True}
                expected = generate(stub, make_request([40, 41, 42] * 10, **request))[0].token_ids
                assert fuzz(channel, stub, 40, is_fake=False) >= 100
                assert generate(stub, make_request([40, 41, 42] * 10, **request))[0].token_ids == expected
            check_log(process)
        wait_until_idle(drafter.address)
        assert drafter.process.popen.poll() is None
