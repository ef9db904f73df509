"""A real model behind gRPC: the same tokens as `outrider.LLM` with the same seeds."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from smg_grpc_proto.generated import vllm_engine_pb2 as pb
from smg_grpc_proto.generated.vllm_engine_pb2_grpc import VllmEngineStub

from common.engine_extensions import NUM_OUTPUT_TOKENS, NUM_SPECULATIVE_TOKENS, SEED
from outrider import LLM, RequestOutput, SamplingParams
from tests.engine_calls import Received, connected, generate, make_request, wait_idle
from tests.service_process import OUTRIDER, ServiceProcess, running

PROMPTS = ("to be or not to be, to be or not", "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa", "né\u20ac", "x")


@pytest.fixture(scope="module")
def llm(tiny_llama: Path) -> Iterator[LLM]:
    with LLM(str(tiny_llama), drafter="none", max_num_seqs=8) as llm:
        yield llm


@pytest.fixture(scope="module")
def verifier(tiny_llama: Path) -> Iterator[ServiceProcess]:
    flags = ["--port", "0", "--max-num-seqs", "8", "--num-threads", "1"]
    with running([*OUTRIDER, "verifier", str(tiny_llama), *flags]) as process:
        yield process
        process.terminate()
        assert process.wait(10) == 0


@pytest.fixture(scope="module")
def address(verifier: ServiceProcess) -> str:
    return verifier.wait_ready()


@pytest.fixture(scope="module")
def stub(address: str) -> Iterator[VllmEngineStub]:
    with connected(address) as stub:
        yield stub
        wait_idle(stub)


def expected(llm: LLM, prompt: str | list[int], **params: Any) -> RequestOutput:
    (output,) = llm.generate([prompt], SamplingParams(**params), use_tqdm=False)
    return output


def check_equal(received: list[Received], expected: RequestOutput) -> None:
    assert len(received) == len(expected.outputs)
    for got, want in zip(received, expected.outputs, strict=True):
        assert got.token_ids == want.token_ids
        complete = got.complete
        assert list(complete.output_ids) == want.token_ids
        assert complete.finish_reason == want.finish_reason
        assert complete.prompt_tokens == len(expected.prompt_token_ids)
        kind = complete.WhichOneof("matched_stop")
        assert (None if kind is None else getattr(complete, kind)) == want.stop_reason


PARAMS: list[dict[str, Any]] = [
    {"temperature": 0.0, "seed": 0},
    {"temperature": 1.0, "seed": 7},
    {"temperature": 0.8, "seed": 11, "top_p": 0.9, "top_k": 20, "min_p": 0.02, "n": 2},
    {"temperature": 1.0, "seed": 3, "presence_penalty": 0.6, "frequency_penalty": -0.4, "repetition_penalty": 1.3},
    {"temperature": 1.2, "seed": 2**31 - 1, "logit_bias": {97: 4.0, 98: -100.0}, "ignore_eos": True, "n": 3},
    {"temperature": 1.0, "seed": 5, "stop_token_ids": list(range(100, 110)), "min_tokens": 6},
]


@pytest.mark.parametrize("number", range(len(PARAMS)))
def test_same_tokens_as_offline(llm: LLM, stub: VllmEngineStub, number: int) -> None:
    params = PARAMS[number]
    with ThreadPoolExecutor() as pool:
        calls = [pool.submit(generate, stub, make_request(prompt, max_tokens=40, **params)) for prompt in PROMPTS]
        for prompt, call in zip(PROMPTS, calls, strict=True):
            check_equal(call.result(), expected(llm, prompt, max_tokens=40, **params))


def test_speculation_ran_and_can_be_turned_off(llm: LLM, stub: VllmEngineStub) -> None:
    request = {"max_tokens": 60, "temperature": 0.0, "seed": 1, "ignore_eos": True}
    on = generate(stub, make_request(PROMPTS[1], **request))
    off = generate(stub, make_request(PROMPTS[1], **request), metadata=((NUM_SPECULATIVE_TOKENS, "0"),))
    assert on[0].complete.spec_draft_tokens > 0
    assert off[0].complete.spec_draft_tokens == 0
    check_equal(on, expected(llm, PROMPTS[1], **request))
    check_equal(off, expected(llm, PROMPTS[1], **request))


def test_stop_strings(llm: LLM, stub: VllmEngineStub) -> None:
    free = expected(llm, PROMPTS[0], max_tokens=60, temperature=1.0, seed=21, ignore_eos=True)
    text = free.outputs[0].text
    stop = text[12:14]
    params: dict[str, Any] = {"max_tokens": 60, "temperature": 1.0, "seed": 21, "ignore_eos": True, "stop": [stop]}
    want = expected(llm, PROMPTS[0], **params)
    assert want.outputs[0].stop_reason == stop
    check_equal(generate(stub, make_request(PROMPTS[0], skip_special_tokens=True, **params)), want)


def test_logprobs(llm: LLM, stub: VllmEngineStub) -> None:
    params: dict[str, Any] = {"max_tokens": 12, "temperature": 1.0, "seed": 2, "logprobs": 3, "prompt_logprobs": 2}
    want = expected(llm, PROMPTS[0], **params)
    (got,) = generate(stub, make_request(PROMPTS[0], stream=False, **params))
    output = got.complete.output_logprobs
    assert list(output.token_ids) == want.outputs[0].token_ids
    for index, entry in enumerate(want.outputs[0].logprobs or []):
        token = output.token_ids[index]
        assert output.token_logprobs[index] == pytest.approx(entry[token].logprob, abs=1e-4)
        top = output.top_logprobs[index]
        assert len(top.token_ids) == 3
        for other, value in zip(top.token_ids, top.values, strict=True):
            assert value == pytest.approx(entry[other].logprob, abs=1e-4)
    entries = got.complete.input_logprobs
    assert list(entries.token_ids) == want.prompt_token_ids
    assert want.prompt_logprobs is not None
    for token, value, entry in zip(
        entries.token_ids[1:], entries.token_logprobs[1:], want.prompt_logprobs[1:], strict=True
    ):
        assert entry is not None
        assert value.value == pytest.approx(entry[token].logprob, abs=1e-4)


def test_an_output_goes_on_where_another_server_left_it(llm: LLM, stub: VllmEngineStub) -> None:
    seed = 2**63 + 5
    params: dict[str, Any] = {"max_tokens": 40, "temperature": 1.0, "presence_penalty": 0.7, "ignore_eos": True}
    want = expected(llm, PROMPTS[0], seed=seed, **params)
    done = want.outputs[0].token_ids[:15]
    call = stub.Generate(
        make_request([*want.prompt_token_ids, *done], **params),
        metadata=((NUM_OUTPUT_TOKENS, "15"), (SEED, str(seed))),
        timeout=60,
    )
    answer = {entry.key: entry.value for entry in call.initial_metadata()}
    assert (answer[NUM_OUTPUT_TOKENS], answer[SEED]) == ("15", str(seed))
    tokens = [token for response in call for token in response.chunk.token_ids]
    assert done + tokens == want.outputs[0].token_ids


def test_many_streams_at_once_with_cancels(llm: LLM, stub: VllmEngineStub) -> None:
    """More requests than rows, some of which leave in the middle: the others get their own tokens."""

    def run(index: int) -> tuple[int, list[Received] | None]:
        request = make_request(PROMPTS[index % 4], max_tokens=30, temperature=1.0, seed=index, ignore_eos=True)
        if index % 5 == 4:
            call = stub.Generate(request, timeout=60)
            next(iter(call))
            call.cancel()
            return index, None
        return index, generate(stub, request)

    with ThreadPoolExecutor(24) as pool:
        results = list(pool.map(run, range(24)))
    for index, received in results:
        if received is not None:
            want = expected(llm, PROMPTS[index % 4], max_tokens=30, temperature=1.0, seed=index, ignore_eos=True)
            check_equal(received, want)
    wait_idle(stub)


def test_the_front_is_a_process_without_torch(verifier: ServiceProcess, stub: VllmEngineStub) -> None:
    (engine,) = verifier.children()
    front, back = (Path(f"/proc/{pid}/maps").read_text() for pid in (verifier.pid, engine))
    assert "libtorch" not in front
    assert "libtorch" in back


def test_model_info(stub: VllmEngineStub, tiny_llama: Path) -> None:
    info = stub.GetModelInfo(pb.GetModelInfoRequest(), timeout=10)
    assert (info.model_type, list(info.architectures)) == ("llama", ["LlamaForCausalLM"])
    assert info.tokenizer_path == str(tiny_llama.resolve())
    assert (info.bos_token_id, info.pad_token_id) == (257, 258)


def test_a_directory_that_cannot_be_served(tmp_path: Path) -> None:
    with running([*OUTRIDER, "--log-level", "error", "verifier", str(tmp_path), "--port", "0"]) as process:
        assert process.wait(60) == 2
        assert process.error_text.startswith("outrider: ")
        assert str(tmp_path) in process.error_text
