"""Calls of VllmEngine against a real front and link, with an engine process that needs no model."""

from __future__ import annotations

import hashlib
import io
import random
import re
import socket
import threading
import time
import zipfile
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import grpc
import pytest
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from smg_grpc_proto.generated import common_pb2
from smg_grpc_proto.generated import vllm_engine_pb2 as pb
from smg_grpc_proto.generated.vllm_engine_pb2_grpc import VllmEngineStub
from tokenizers import Tokenizer

from common.engine_extensions import NUM_SPECULATIVE_TOKENS, STEP_COUNTS
from tests.engine_calls import (
    Received,
    collect,
    connected,
    generate,
    health_of,
    load_of,
    make_request,
    wait_idle,
    wait_load,
)
from tests.fake_engine import MAX_MODEL_LEN, fake_output
from tests.service_process import FAKE_VERIFIER, running

SERVICE = "vllm.grpc.engine.VllmEngine"
ENDLESS = MAX_MODEL_LEN - 100


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    flags = ["--port", "0", "--max-num-seqs", "4", "--max-num-waiting", "4", "--max-num-batched-tokens", "64"]
    with running([*FAKE_VERIFIER, "--step-ms", "2", "--", *flags]) as process:
        yield process.wait_ready()


@pytest.fixture
def stub(address: str) -> Iterator[VllmEngineStub]:
    """Every test leaves all rows and blocks behind as it found them."""
    with connected(address) as stub:
        yield stub
        wait_idle(stub)


def status_of(stub: VllmEngineStub, request: pb.GenerateRequest, **call: Any) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.RpcError) as caught:
        generate(stub, request, **call)
    return caught.value.code(), str(caught.value.details())


# -- outputs -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [True, False])
def test_chunks_then_one_complete(stub: VllmEngineStub, stream: bool) -> None:
    (output,) = generate(stub, make_request("abc", stream=stream, max_tokens=40, seed=5))
    expected = fake_output("abc", 40, seed=5)
    assert output.token_ids == (expected if stream else [])
    complete = output.complete
    assert list(complete.output_ids) == expected
    assert (complete.finish_reason, complete.prompt_tokens, complete.completion_tokens) == ("length", 3, 40)
    assert complete.spec_draft_tokens > complete.spec_accepted_tokens > 0
    assert complete.WhichOneof("matched_stop") is None


def test_tokenized_input_and_several_outputs(stub: VllmEngineStub) -> None:
    outputs = generate(stub, make_request([7, 8, 9], n=3, max_tokens=10, seed=2**31 - 1))
    for index, output in enumerate(outputs):
        assert output.token_ids == fake_output([7, 8, 9], 10, seed=2**31 - 1 + index)
        assert len(output.completes) == 1


def test_a_negative_seed_is_its_unsigned_value(stub: VllmEngineStub) -> None:
    (output,) = generate(stub, make_request("abc", max_tokens=5, seed=-2))
    assert output.token_ids == fake_output("abc", 5, seed=2**32 - 2)


@pytest.mark.parametrize("include", [True, False])
def test_stop_string_ends_the_output_and_the_request(stub: VllmEngineStub, include: bool) -> None:
    expected = bytes(fake_output("abc", 400, seed=1)).decode()
    stop = expected[20:23]
    end = expected.index(stop) + 3
    request = make_request(
        "abc", max_tokens=400, seed=1, stop=[stop, "0"], include_stop_str_in_output=include, logprobs=1
    )
    (output,) = generate(stub, request)
    assert bytes(output.token_ids).decode() == expected[:end]
    assert output.complete.finish_reason == "stop"
    assert output.complete.matched_stop_str == stop
    wait_idle(stub)


def test_tokens_that_may_begin_a_stop_string_are_held_back(stub: VllmEngineStub) -> None:
    expected = bytes(fake_output("abc", 30)).decode()
    stop = expected[10:14] + "0"  # it begins and does not come
    chunks = generate(stub, make_request("abc", max_tokens=30, seed=0, stop=[stop]))[0].chunks
    sent = ""
    for chunk in chunks[:-1]:
        sent += bytes(chunk.token_ids).decode()
        assert not any(sent.endswith(stop[:size]) for size in range(1, 5))
    assert sent + bytes(chunks[-1].token_ids).decode() == expected


def test_stop_token(stub: VllmEngineStub) -> None:
    # The made-up device knows no stop tokens, so this is about the message alone.
    (output,) = generate(stub, make_request("abc", max_tokens=4, seed=0, stop_token_ids=[258]))
    assert output.complete.finish_reason == "length"


def test_logprobs(stub: VllmEngineStub) -> None:
    for stream in (True, False):
        (output,) = generate(stub, make_request("abcd", stream=stream, max_tokens=6, logprobs=2, prompt_logprobs=1))
        parts = [chunk.output_logprobs for chunk in output.chunks] if stream else [output.complete.output_logprobs]
        tokens = [token for part in parts for token in part.token_ids]
        values = [value for part in parts for value in part.token_logprobs]
        assert tokens == list(output.complete.output_ids)
        assert values == pytest.approx([-token / 100 for token in tokens])
        tops = [top for part in parts for top in part.top_logprobs]
        assert [list(top.token_ids) for top in tops] == [[token, 0] for token in tokens]
        first = output.chunks[0] if stream else output.complete
        assert list(first.input_logprobs.token_ids) == list(b"abcd")
        entries = first.input_logprobs.token_logprobs
        assert not entries[0].HasField("value")
        assert [entry.value for entry in entries[1:]] == pytest.approx([-token / 100 for token in b"bcd"])
        assert not any(chunk.HasField("input_logprobs") for chunk in output.chunks[1:])


def test_cached_tokens_and_flush(stub: VllmEngineStub) -> None:
    prompt = [5] * 50
    flush = common_pb2.FlushCacheRequest(timeout_s=5)
    assert stub.FlushCache(flush, timeout=10).success
    first, second = (generate(stub, make_request(prompt, max_tokens=4))[0].complete for _ in range(2))
    assert (first.cached_tokens, second.cached_tokens) == (0, 48)
    assert load_of(stub).cache_hit_rate > 0
    assert stub.FlushCache(flush, timeout=10).success
    assert generate(stub, make_request(prompt, max_tokens=4))[0].complete.cached_tokens == 0


def test_flush_waits_and_gives_up(stub: VllmEngineStub) -> None:
    call = stub.Generate(make_request("a", max_tokens=ENDLESS), timeout=60)
    next(iter(call))
    refused = stub.FlushCache(common_pb2.FlushCacheRequest(timeout_s=0.2), timeout=10)
    assert not refused.success
    assert "1 outputs" in refused.message
    assert not stub.FlushCache(common_pb2.FlushCacheRequest(timeout_s=float("nan")), timeout=10).success
    threading.Timer(0.3, call.cancel).start()
    assert stub.FlushCache(common_pb2.FlushCacheRequest(timeout_s=10), timeout=20).success


def test_wishes_in_metadata(stub: VllmEngineStub) -> None:
    request = make_request("abc", max_tokens=20, seed=1)
    (output,) = generate(stub, request, metadata=((NUM_SPECULATIVE_TOKENS, "0"),))
    assert output.complete.spec_draft_tokens == 0
    assert output.token_ids == fake_output("abc", 20, seed=1)
    code, message = status_of(stub, make_request("abc"), metadata=((NUM_SPECULATIVE_TOKENS, "-1"),))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert NUM_SPECULATIVE_TOKENS in message


def test_step_counts_of_the_extension(stub: VllmEngineStub) -> None:
    (plain,) = generate(stub, make_request("abc", max_tokens=20, seed=1))
    (counted,) = generate(stub, make_request("abc", max_tokens=20, seed=1), metadata=((STEP_COUNTS, "1"),))
    assert counted.token_ids == plain.token_ids
    assert sum(chunk.ByteSize() for chunk in counted.chunks) > sum(chunk.ByteSize() for chunk in plain.chunks)


# -- ends --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [True, False])
def test_abort_ends_the_call_with_what_there_is(stub: VllmEngineStub, stream: bool) -> None:
    request = make_request("abc", stream=stream, max_tokens=ENDLESS, seed=3, n=2)
    call = stub.Generate(request, timeout=60)
    wait_load(stub, lambda load: load.num_running_reqs == 2)
    time.sleep(0.05)
    stub.Abort(pb.AbortRequest(request_ids=["no-such-request", request.request_id]), timeout=10)
    for index, output in enumerate(collect(call, 2)):
        complete = output.complete
        assert complete.finish_reason == "abort"
        tokens = list(complete.output_ids)
        assert tokens == fake_output("abc", len(tokens), seed=3 + index)
        assert output.token_ids == (tokens if stream else [])
    wait_idle(stub)


@pytest.mark.parametrize("how", ["cancel", "deadline", "abort"])
@pytest.mark.parametrize("phase", ["queued", "prefill", "decode", "last token"])
def test_a_call_that_ends_early_leaves_nothing(stub: VllmEngineStub, phase: str, how: str) -> None:
    """In every phase: rows, blocks and the place in the queue come back, and the others go on."""
    others = []
    if phase == "queued":
        others = [stub.Generate(make_request([1, 2], max_tokens=ENDLESS), timeout=60) for _ in range(4)]
        wait_load(stub, lambda load: load.num_running_reqs == 4)
    prompt = [3] * (MAX_MODEL_LEN - 200) if phase == "prefill" else [3] * 5
    max_tokens = 30 if phase == "last token" else 150
    request = make_request(prompt, max_tokens=max_tokens, seed=1, prompt_logprobs=0)
    timeout = {"queued": 0.1, "prefill": 0.05, "decode": 0.15, "last token": 0.075}[phase]
    call = stub.Generate(request, timeout=timeout if how == "deadline" else 60)
    if how != "deadline":
        time.sleep(timeout)
        if how == "cancel":
            call.cancel()
        else:
            stub.Abort(pb.AbortRequest(request_ids=[request.request_id]), timeout=10)
    code = grpc.StatusCode.OK
    output = Received()
    try:
        (output,) = collect(call)
    except grpc.RpcError as error:
        code = error.code()
    if code is grpc.StatusCode.OK:  # the last token may have come before the end
        assert how == "abort" or phase == "last token"
        assert output.complete.finish_reason in ("abort", "length")
    else:
        expected = {"cancel": grpc.StatusCode.CANCELLED, "deadline": grpc.StatusCode.DEADLINE_EXCEEDED}
        assert code is expected[how]
    if phase == "queued":
        wait_load(stub, lambda load: load.num_total_reqs == 4)
        for other in others:
            other.cancel()
    wait_idle(stub)
    assert generate(stub, make_request([1], max_tokens=3, seed=0))[0].token_ids == fake_output([1], 3)


def test_full_queue_refuses_and_a_closed_channel_frees(address: str, stub: VllmEngineStub) -> None:
    with connected(address) as second:
        calls = [second.Generate(make_request([1], max_tokens=ENDLESS, stream=False), timeout=60) for _ in range(8)]
        wait_load(stub, lambda load: load.num_total_reqs == 8)
        code, message = status_of(stub, make_request([1], n=1))
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "fit 8" in message
        assert load_of(stub).num_waiting_uncached_tokens >= 4
        del calls
    wait_idle(stub)


def test_a_reader_that_stops_reading_slows_nobody(address: str, stub: VllmEngineStub) -> None:
    # Without probes for more, the window stays at 64 KiB: the server can send no more than that.
    options = [("grpc.use_local_subchannel_pool", 1), ("grpc.http2.bdp_probe", 0)]
    with grpc.insecure_channel(address, options) as channel:
        slow = VllmEngineStub(channel).Generate(make_request([1], max_tokens=ENDLESS, seed=9, logprobs=0), timeout=60)
        next(iter(slow))
        start = time.monotonic()
        (quick,) = generate(stub, make_request([2], max_tokens=300, seed=1))
        assert quick.token_ids == fake_output([2], 300, seed=1)
        assert time.monotonic() - start < 10
        wait_load(stub, lambda load: load.num_total_reqs == 0, 30)  # the engine has finished the slow one too
        (rest,) = collect(slow)
        assert max(len(chunk.token_ids) for chunk in rest.chunks) > 100  # what piled up came as one
        tokens = fake_output([1], ENDLESS, seed=9)
        assert rest.token_ids == tokens[-len(rest.token_ids) :]
        assert list(rest.complete.output_ids) == tokens


def test_request_ids_are_unique_while_they_run(stub: VllmEngineStub) -> None:
    call = stub.Generate(make_request([1], max_tokens=ENDLESS, request_id="twice"), timeout=60)
    next(iter(call))
    code, message = status_of(stub, make_request([1], request_id="twice"))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert "twice" in message
    call.cancel()
    wait_idle(stub)
    assert generate(stub, make_request([1], max_tokens=2, request_id="twice"))[0].complete.completion_tokens == 2


# -- requests that are wrong -------------------------------------------------------------------------------------------

INVALID, UNIMPLEMENTED = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.UNIMPLEMENTED


def _edited(**fields: Any) -> pb.GenerateRequest:
    request = make_request([1, 2, 3], max_tokens=3)
    request.MergeFrom(pb.GenerateRequest(**fields))
    return request


WRONG_REQUESTS = [
    (pb.GenerateRequest(request_id="x"), INVALID, "no prompt"),
    (pb.GenerateRequest(request_id="x", text=""), INVALID, "at least one token"),
    (make_request([], max_tokens=3), INVALID, "at least one token"),
    (make_request([1], request_id=""), INVALID, "request_id"),
    (make_request([1], request_id="x" * 300), INVALID, "request_id"),
    (make_request([260]), INVALID, r"prompt\[0\] = 260"),
    (make_request([1] * MAX_MODEL_LEN), INVALID, "fewer than max_model_len = 4096"),
    (make_request([1] * 100_000), INVALID, "100000 tokens"),
    (make_request("x" * 5_000_000), INVALID, "5000000 bytes"),
    (make_request([1], temperature=-1), INVALID, "temperature"),
    (make_request([1], temperature=float("nan")), INVALID, "temperature"),
    (make_request([1], temperature=float("inf")), INVALID, "temperature"),
    (make_request([1], top_p=1.5), INVALID, "top_p"),
    (make_request([1], top_p=-0.5), INVALID, "top_p"),
    (make_request([1], min_p=2), INVALID, "min_p"),
    (make_request([1], repetition_penalty=-1), INVALID, "repetition_penalty"),
    (make_request([1], presence_penalty=3), INVALID, "presence_penalty"),
    (make_request([1], frequency_penalty=-3), INVALID, "frequency_penalty"),
    (make_request([1], max_tokens=0), INVALID, "max_tokens"),
    (make_request([1], max_tokens=2, min_tokens=3), INVALID, "min_tokens"),
    (make_request([1], n=65), INVALID, "n = 65"),
    (make_request([1], n=2**32 - 1), INVALID, "n = 4294967295"),
    (make_request([1], logprobs=-1), INVALID, "logprobs = -1.*whole vocabulary"),
    (make_request([1], prompt_logprobs=-1), INVALID, "prompt_logprobs = -1"),
    (make_request([1], logprobs=21), INVALID, "logprobs = 21"),
    (make_request([1], logprobs=-7), INVALID, "logprobs = -7"),
    (make_request([1], stop=[""]), INVALID, "stop"),
    (make_request([1], stop=["x"] * 17), INVALID, "at most 16"),
    (make_request([1], stop=["x" * 513]), INVALID, "512 characters"),
    (make_request([1], stop=["x" * 6_000_000]), INVALID, "6000000 characters"),
    (make_request([1], stop_token_ids=[260]), INVALID, "stop_token_ids = 260"),
    (make_request([1], stop_token_ids=[1] * 129), INVALID, "at most 128"),
    (make_request([1], stop_token_ids=[1] * 100_000), INVALID, "100000 entries"),
    (make_request([1], logit_bias={-1: 1.0}), INVALID, "logit_bias"),
    (make_request([1], logit_bias={1: 101.0}), INVALID, "logit_bias"),
    (make_request([1], logit_bias={1: float("nan")}), INVALID, "logit_bias"),
    (make_request([1], logit_bias=dict.fromkeys(range(1025), 1.0)), INVALID, "at most 1024"),
    (make_request([1], truncate_prompt_tokens=0), INVALID, "truncate_prompt_tokens"),
    (make_request([1], truncate_prompt_tokens=-2), INVALID, "truncate_prompt_tokens"),
    (make_request([1], json_schema="{}"), INVALID, "json_schema.*not supported yet"),
    (make_request([1], regex="a*"), INVALID, "regex"),
    (make_request([1], json_object=True), INVALID, "json_object"),
    (make_request([1], choice=pb.ChoiceConstraint(choices=["a"])), INVALID, "choice"),
    (_edited(data_parallel_rank=1), INVALID, "data_parallel_rank"),
    (_edited(mm_inputs=pb.MultimodalInputs()), UNIMPLEMENTED, "images"),
    (_edited(media_refs=pb.MediaRefs()), UNIMPLEMENTED, "images"),
    (_edited(extra_mm_inputs=[pb.MultimodalInputs()]), UNIMPLEMENTED, "images"),
    (_edited(kv_transfer_params=pb.KvTransferParams()), UNIMPLEMENTED, "KV transfer"),
    (_edited(kv_transfer_params_json="{}"), UNIMPLEMENTED, "KV transfer"),
]


@pytest.mark.parametrize("number", range(len(WRONG_REQUESTS)))
def test_a_wrong_request_is_answered_with_what_was_wrong(stub: VllmEngineStub, number: int) -> None:
    request_, code, words = WRONG_REQUESTS[number]
    got, message = status_of(stub, request_)
    assert got is code, message
    assert re.search(words, message), message
    assert len(message) < 1000


def test_a_message_over_the_limit(stub: VllmEngineStub) -> None:
    code, _ = status_of(stub, make_request("x" * (65 << 20)))
    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED


def test_truncated_prompts(stub: VllmEngineStub) -> None:
    prompt = list(range(100))
    (output,) = generate(stub, make_request(prompt, max_tokens=3, seed=0, truncate_prompt_tokens=10))
    assert output.complete.prompt_tokens == 10
    long = [1] * (MAX_MODEL_LEN + 500)
    (output,) = generate(stub, make_request(long, max_tokens=3, seed=0, truncate_prompt_tokens=-1))
    assert output.complete.prompt_tokens == MAX_MODEL_LEN - 1
    assert output.complete.completion_tokens == 1


def test_without_max_tokens_the_context_is_the_limit(stub: VllmEngineStub) -> None:
    prompt = [1] * (MAX_MODEL_LEN - 5)
    assert len(generate(stub, make_request(prompt, seed=0))[0].token_ids) == 5


def test_bytes_that_are_no_grpc(address: str, stub: VllmEngineStub) -> None:
    """Garbage, half a handshake, messages of the wrong type: that peer's trouble alone."""
    host, _, port = address.rpartition(":")
    preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
    for data in (b"", b"\x00" * 5000, b"GET / HTTP/1.1\r\n\r\n", preface, preface + random.Random(0).randbytes(20_000)):
        with socket.create_connection((host, int(port)), timeout=5) as sock:
            sock.sendall(data)
            sock.settimeout(0.2)
            with suppress(OSError):
                while sock.recv(4096):
                    pass
    with grpc.insecure_channel(address) as channel:
        for data in (b"\xff" * 100, random.Random(1).randbytes(1000)):
            with pytest.raises(grpc.RpcError) as caught:
                list(channel.unary_stream(f"/{SERVICE}/Generate")(data, timeout=10))
            assert caught.value.code() is INVALID
            assert "cannot be read" in str(caught.value.details())
        with pytest.raises(grpc.RpcError) as caught:
            channel.unary_unary(f"/{SERVICE}/NoSuchMethod")(b"", timeout=10)
        assert caught.value.code() is UNIMPLEMENTED
        metadata = (("x-large", "x" * 100_000),)
        with pytest.raises(grpc.RpcError) as caught:
            list(channel.unary_stream(f"/{SERVICE}/Generate")(b"", timeout=10, metadata=metadata))
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert generate(stub, make_request([1], max_tokens=2, seed=0))[0].token_ids == fake_output([1], 2)


# -- the other methods -------------------------------------------------------------------------------------------------


def test_health_and_reflection(address: str, stub: VllmEngineStub) -> None:
    assert stub.HealthCheck(pb.HealthCheckRequest(), timeout=10).healthy
    with grpc.insecure_channel(address) as channel:
        assert health_of(channel)
        assert health_of(channel, SERVICE)
        reflection: Any = reflection_pb2_grpc.ServerReflectionStub(channel)
        question = reflection_pb2.ServerReflectionRequest(list_services="")
        (answer,) = reflection.ServerReflectionInfo(iter([question]), timeout=10)
        assert SERVICE in [service.name for service in answer.list_services_response.service]


def test_model_and_server_info(stub: VllmEngineStub) -> None:
    model = stub.GetModelInfo(pb.GetModelInfoRequest(), timeout=10)
    assert (model.vocab_size, model.max_context_length, list(model.eos_token_ids)) == (260, MAX_MODEL_LEN, [256])
    assert model.served_model_name == "fake-model"
    assert model.is_generation
    server = stub.GetServerInfo(pb.GetServerInfoRequest(), timeout=10)
    assert (server.max_num_seqs, server.server_type, server.is_paused) == (4, "vllm-grpc", False)


def test_tokenizer_archive(stub: VllmEngineStub) -> None:
    chunks = list(stub.GetTokenizer(common_pb2.GetTokenizerRequest(), timeout=10))
    data = b"".join(chunk.data for chunk in chunks)
    assert chunks[-1].sha256 == hashlib.sha256(data).hexdigest()
    assert not any(chunk.sha256 for chunk in chunks[:-1])
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        tokenizer = Tokenizer.from_str(archive.read("tokenizer.json").decode())
    assert tokenizer.encode("hello").ids == list(b"hello")


def test_what_is_not_built(stub: VllmEngineStub) -> None:
    calls: list[Any] = [
        lambda: stub.Embed(pb.EmbedRequest(request_id="x"), timeout=10),
        lambda: stub.StartProfile(common_pb2.StartProfileRequest(), timeout=10),
        lambda: stub.StopProfile(common_pb2.StopProfileRequest(), timeout=10),
        lambda: list(stub.SubscribeKvEvents(common_pb2.SubscribeKvEventsRequest(), timeout=10)),
    ]
    for call in calls:
        with pytest.raises(grpc.RpcError) as caught:
            call()
        assert caught.value.code() is UNIMPLEMENTED
