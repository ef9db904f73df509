"""OpenAI's client against the services of the compose file: smg, two verifiers and a drafter, on a CPU.

What comes back is compared with the offline `LLM`, which drafts with nothing.
"""

from __future__ import annotations

import re
import shutil
import threading
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import grpc
import pytest

from common.protos.outrider.v1 import drafter_pb2
from outrider import LLM, RequestOutput, SamplingParams
from tests.deployment import Container, deployment
from tests.deployment_files import ROOT
from tests.drafter_process import wait_until
from tests.engine_calls import connected, wait_idle

openai = pytest.importorskip("openai")
pytest.importorskip("smg")

MODEL = ROOT / "models" / "demo-target"
NAME = "demo"
PROMPT = "def fibonacci(n):\n"
REPETITIVE = "serving " * 24
NUM_TOKENS = 48
CALL_LIMIT_S = 60.0
SPREAD_LIMIT_S = 20.0
SMALL = "--max-num-seqs 8 --kv-cache-memory 64M --num-threads 1"
BAD_VALUES: list[dict[str, Any]] = [
    {"temperature": -1.0},
    {"max_tokens": 0},
    {"top_p": 1.5},
    {"n": 10_000},
    {"stop": ["x"] * 1000},
    {"model": "other"},
]


@dataclass
class Services:
    verifiers: list[Container]
    drafter: Container
    gateway: Container

    @property
    def url(self) -> str:
        return f"http://{self.gateway.address(8000)}/v1"


@pytest.fixture(scope="module")
def services(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Services]:
    models = tmp_path_factory.mktemp("models")
    shutil.copytree(MODEL, models / NAME)
    variables = {
        "OUTRIDER_MODEL": f"/models/{NAME}",
        # Without a fallback, every draft token that is accepted came from the drafter.
        "OUTRIDER_VERIFIER_ARGS": f"--served-model-name {NAME} --draft-fallback none {SMALL}",
    }
    with deployment({"/models": models}, **variables) as deployed:
        drafter = deployed.start("drafter-cpu")
        deployed.names["drafter:50052"] = drafter.address(50052)
        verifiers = [deployed.start("verifier-cpu") for _ in range(2)]
        for container in (drafter, *verifiers):
            container.wait_healthy()
        # The gateway's container has no models: all that it knows comes from the verifiers.
        shutil.rmtree(models / NAME)
        urls = " ".join(f"grpc://{verifier.address(50051)}" for verifier in verifiers)
        gateway = deployed.start("gateway", OUTRIDER_WORKER_URLS=urls)
        gateway.wait_healthy()
        yield Services(verifiers, drafter, gateway)


@pytest.fixture(scope="module")
def client(services: Services) -> Iterator[Any]:
    with openai.OpenAI(base_url=services.url, api_key="none", timeout=CALL_LIMIT_S, max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(str(MODEL), drafter="none", kv_cache_memory="64M", max_num_seqs=8, num_threads=1) as llm:
        yield llm


def offline(llm: LLM, prompt: str = PROMPT, **params: Any) -> RequestOutput:
    (output,) = llm.generate(prompt, SamplingParams(**({"max_tokens": NUM_TOKENS} | params)), use_tqdm=False)
    return output


# -- completions -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("stream", [False, True])
def test_completions_are_those_of_the_offline_engine(client: Any, llm: LLM, temperature: float, stream: bool) -> None:
    for seed in (1, 2**31 - 1):
        (expected,) = offline(llm, temperature=temperature, seed=seed).outputs
        answer = client.completions.create(
            model=NAME, prompt=PROMPT, max_tokens=NUM_TOKENS, temperature=temperature, seed=seed, stream=stream
        )
        if stream:
            chunks = [chunk for chunk in answer if chunk.choices]
            text = "".join(chunk.choices[0].text for chunk in chunks)
            assert len([chunk for chunk in chunks if chunk.choices[0].text]) > 1
            finish_reason = chunks[-1].choices[0].finish_reason
        else:
            text, finish_reason = answer.choices[0].text, answer.choices[0].finish_reason
            assert answer.usage.completion_tokens == NUM_TOKENS
        assert text == expected.text
        assert finish_reason == expected.finish_reason


def test_a_stop_string_ends_the_text_before_it(client: Any, llm: LLM) -> None:
    full = offline(llm, temperature=0.0, seed=1).outputs[0].text
    stop = re.findall(r"\w+", full)[4]
    (expected,) = offline(llm, temperature=0.0, seed=1, stop=[stop]).outputs
    assert expected.stop_reason == stop
    for stream in (False, True):
        answer = client.completions.create(
            model=NAME, prompt=PROMPT, max_tokens=NUM_TOKENS, temperature=0, seed=1, stop=[stop], stream=stream
        )
        choices = [chunk.choices[0] for chunk in answer if chunk.choices] if stream else [answer.choices[0]]
        assert "".join(choice.text for choice in choices) == expected.text
        assert choices[-1].finish_reason == "stop"


def test_several_outputs_of_a_prompt(client: Any, llm: LLM) -> None:
    expected = offline(llm, temperature=1.0, seed=11, n=3).outputs
    answer = client.completions.create(model=NAME, prompt=PROMPT, max_tokens=NUM_TOKENS, temperature=1, seed=11, n=3)
    texts = {choice.index: choice.text for choice in answer.choices}
    assert texts == {output.index: output.text for output in expected}
    assert len(set(texts.values())) == 3


def test_penalties_and_nucleus_reach_the_sampler(client: Any, llm: LLM) -> None:
    params: dict[str, Any] = {"temperature": 0.9, "top_p": 0.8, "presence_penalty": 0.5, "frequency_penalty": 0.7}
    (expected,) = offline(llm, seed=5, **params).outputs
    answer = client.completions.create(model=NAME, prompt=PROMPT, max_tokens=NUM_TOKENS, seed=5, **params)
    assert answer.choices[0].text == expected.text


# -- chat --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_chat_renders_the_template_of_the_model(client: Any, llm: LLM, stream: bool) -> None:
    """The demo model's template is the text of the messages, one a line: the gateway got it from a verifier."""
    prompt = "import math\ndef area(radius):\n"
    (expected,) = offline(llm, prompt, temperature=1.0, seed=3).outputs
    answer = client.chat.completions.create(
        model=NAME,
        messages=[{"role": "system", "content": "import math"}, {"role": "user", "content": "def area(radius):\n"}],
        max_tokens=NUM_TOKENS,
        temperature=1,
        seed=3,
        stream=stream,
    )
    if stream:
        text = "".join(chunk.choices[0].delta.content or "" for chunk in answer if chunk.choices)
    else:
        text = answer.choices[0].message.content
    assert text == expected.text


def test_chat_gives_log_probabilities(client: Any, llm: LLM) -> None:
    (expected,) = offline(llm, temperature=1.0, seed=4, logprobs=3, max_tokens=12).outputs
    answer = client.chat.completions.create(
        model=NAME,
        messages=[{"role": "user", "content": PROMPT}],
        max_tokens=12,
        temperature=1,
        seed=4,
        logprobs=True,
        top_logprobs=3,
    )
    content = answer.choices[0].logprobs.content
    assert expected.logprobs is not None
    assert len(content) == len(expected.token_ids) == 12
    for entry, token_id, alternatives in zip(content, expected.token_ids, expected.logprobs, strict=True):
        assert entry.token == alternatives[token_id].decoded_token
        assert entry.logprob == pytest.approx(alternatives[token_id].logprob, abs=1e-3)
        best = sorted((found.logprob for found in alternatives.values()), reverse=True)[:3]
        assert [top.logprob for top in entry.top_logprobs] == pytest.approx(best, abs=1e-3)


# -- usage, models, errors ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_usage_counts_draft_tokens(client: Any, llm: LLM, stream: bool) -> None:
    (expected,) = offline(llm, REPETITIVE, temperature=0.0, seed=1).outputs
    settings: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    answer = client.completions.create(
        model=NAME, prompt=REPETITIVE, max_tokens=NUM_TOKENS, temperature=0, seed=1, **settings
    )
    usage = [chunk.usage for chunk in answer if chunk.usage][-1] if stream else answer.usage
    assert usage.completion_tokens == len(expected.token_ids)
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    details = usage.completion_tokens_details
    assert details.accepted_prediction_tokens > 0
    assert details.rejected_prediction_tokens >= 0


def test_models_are_listed_by_the_name_they_are_served_by(client: Any) -> None:
    assert [model.id for model in client.models.list()] == [NAME]


@pytest.mark.parametrize("change", BAD_VALUES, ids=lambda change: next(iter(change)))
def test_a_bad_request_is_an_error_of_the_client(client: Any, change: dict[str, Any]) -> None:
    arguments: dict[str, Any] = {"model": NAME, "prompt": PROMPT, "max_tokens": 4, **change}
    with pytest.raises(openai.APIStatusError) as caught:
        client.completions.create(**arguments)
    assert 400 <= caught.value.status_code < 500


# -- the whole ---------------------------------------------------------------------------------------------------------


def test_requests_spread_over_the_verifiers_and_are_drafted_by_the_drafter(
    client: Any, services: Services, llm: LLM
) -> None:
    def complete(seed: int) -> str:
        answer = client.completions.create(
            model=NAME, prompt=REPETITIVE, max_tokens=NUM_TOKENS, temperature=1, seed=seed
        )
        return answer.choices[0].text

    before = [num_finished(verifier) for verifier in services.verifiers]
    expected = [offline(llm, REPETITIVE, temperature=1.0, seed=seed).outputs[0].text for seed in range(16)]
    shares = [0.0, 0.0]
    with watched(services.drafter) as most, ThreadPoolExecutor(8) as pool:
        # The gateway asks once a second how busy each is: what comes within one second may all go to the same one.
        deadline = time.monotonic() + SPREAD_LIMIT_S
        while not all(shares):
            assert time.monotonic() < deadline, shares
            assert list(pool.map(complete, range(16))) == expected
            shares = [
                num_finished(verifier) - count for verifier, count in zip(services.verifiers, before, strict=True)
            ]
    assert most["drafter"] > 0
    assert most["streams"] == 2


@pytest.mark.parametrize("index", range(2))
def test_verifiers_count_what_they_did(services: Services, index: int) -> None:
    for name in ("vllm:generation_tokens_total", "vllm:spec_decode_num_accepted_tokens_total"):
        assert metric(services.verifiers[index], name) > 0


def num_finished(verifier: Container) -> float:
    return metric(verifier, "vllm:request_success_total")


def metric(verifier: Container, name: str) -> float:
    """Sum over its labels."""
    with urllib.request.urlopen(f"http://{verifier.address(29001)}/metrics", timeout=10) as page:
        text = page.read().decode()
    return sum(map(float, re.findall(rf"^{name}(?:{{[^}}]*}})? (\S+)$", text, flags=re.MULTILINE)))


def test_nothing_is_left_of_requests_that_have_ended(services: Services) -> None:
    for verifier in services.verifiers:
        with connected(verifier.address(50051)) as stub:
            wait_idle(stub)
    with grpc.insecure_channel(services.drafter.address(50052)) as channel:
        wait_until(lambda: load_of_drafter(channel).num_rows == 0, "sessions of the drafter freed")


@contextmanager
def watched(drafter: Container) -> Iterator[dict[str, int]]:
    """The most sessions and verifiers that the drafter had during the block."""
    most = {"drafter": 0, "streams": 0}
    stop = threading.Event()

    def watch() -> None:
        with grpc.insecure_channel(drafter.address(50052)) as channel:
            while not stop.wait(0.02):
                load = load_of_drafter(channel)
                most["drafter"] = max(most["drafter"], load.num_rows)
                most["streams"] = max(most["streams"], load.num_streams)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield most
    finally:
        stop.set()
        watcher.join(CALL_LIMIT_S)


def load_of_drafter(channel: grpc.Channel) -> drafter_pb2.Load:
    info = channel.unary_unary(
        "/outrider.v1.Drafter/Info",
        request_serializer=drafter_pb2.InfoRequest.SerializeToString,
        response_deserializer=drafter_pb2.InfoResponse.FromString,
    )
    return info(drafter_pb2.InfoRequest(), timeout=10).load
