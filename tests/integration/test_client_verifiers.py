"""`outrider.Client` with two real verifiers, one of which dies: the tokens are those of the offline `LLM`."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from common.errors import RequestTimeoutError
from common.sampling_params import SamplingParams
from outrider import LLM, Client
from outrider.outputs import CompletionOutput, RequestOutput
from tests.service_process import OUTRIDER, ServiceProcess, running
from verifier_svc.front.output_stream import OutputDelta

LIMIT_S = 60.0
PROMPT = "once upon a time "
PARAMS = {
    "greedy": SamplingParams(temperature=0.0, seed=0, max_tokens=300, ignore_eos=True),
    "sampled": SamplingParams(seed=2**40, top_p=0.9, max_tokens=300, ignore_eos=True, logprobs=2),
    "penalties": SamplingParams(
        seed=5, max_tokens=300, presence_penalty=0.5, frequency_penalty=0.25, repetition_penalty=1.1, min_tokens=290
    ),
}


@pytest.fixture(scope="module")
def expected(tiny_llama: Path) -> dict[str, RequestOutput]:
    """What an engine makes of it that never fails."""
    with LLM(str(tiny_llama)) as llm:
        return {name: llm.generate(PROMPT, params, use_tqdm=False)[0] for name, params in PARAMS.items()}


def command(tiny_llama: Path, *flags: str) -> list[str]:
    return [*OUTRIDER, "verifier", str(tiny_llama), "--port", "0", *flags]


@pytest.fixture(scope="module")
def survivor(tiny_llama: Path) -> Iterator[str]:
    with running(command(tiny_llama)) as service:
        yield service.wait_ready()


def test_a_verifier_gives_what_the_offline_llm_gives(survivor: str, tiny_llama: Path) -> None:
    params = SamplingParams(seed=11, n=3, max_tokens=40, logprobs=2, prompt_logprobs=1, stop=("e", "th"))
    with LLM(str(tiny_llama)) as llm:
        offline = llm.generate(PROMPT, params, use_tqdm=False)[0]
    with Client(survivor, timeout=LIMIT_S) as client:
        output = client.generate(PROMPT, params)
    assert output.prompt_token_ids == offline.prompt_token_ids
    for found, wanted in zip(output.outputs, offline.outputs, strict=True):
        assert_same(found, wanted)
        assert found.draft_stats.num_drafts == wanted.draft_stats.num_drafts
    assert output.prompt_logprobs is not None
    assert offline.prompt_logprobs is not None
    for entry, other in zip(output.prompt_logprobs[1:], offline.prompt_logprobs[1:], strict=True):
        assert list(entry or {}) == list(other or {})


def test_what_a_client_gives_up_is_given_back(survivor: str) -> None:
    params = SamplingParams(seed=1, max_tokens=300, ignore_eos=True)
    with Client(survivor, timeout=LIMIT_S) as client:
        deltas = client.stream(PROMPT, params)
        next(deltas)
        deltas.close()
        with pytest.raises(RequestTimeoutError):
            client.generate(PROMPT, params, timeout=0.05)
        wait_idle(client, survivor)


@pytest.mark.parametrize("how", ["kill", "kill engine", "terminate"])
def test_a_verifier_that_dies_is_not_noticed(
    survivor: str, tiny_llama: Path, expected: dict[str, RequestOutput], how: str
) -> None:
    with running(command(tiny_llama, "--shutdown-timeout", "0")) as victim:
        address = victim.wait_ready()
        begun = threading.Barrier(4, timeout=LIMIT_S)
        streams = [_Stream(name, begun) for name in PARAMS]
        with Client([address, survivor], timeout=LIMIT_S) as client:
            # One address until all have begun there: the other one looks busy.
            client.addresses[1].num_in_flight += 100
            threads = [threading.Thread(target=stream.run, args=(client,)) for stream in streams]
            for thread in threads:
                thread.start()
            begun.wait()
            _end(victim, how)
            for thread in threads:
                thread.join(LIMIT_S)
            failures = client.addresses[0].num_failures
            wait_idle(client, survivor)
        assert [stream.failure for stream in streams] == [None] * len(streams)
        for stream in streams:
            wanted = expected[stream.name].outputs[0]
            assert [token for delta in stream.deltas for token in delta.token_ids] == wanted.token_ids
            assert "".join(delta.text for delta in stream.deltas) == wanted.text
            assert str(stream.deltas[-1].finish_reason) == wanted.finish_reason
        assert failures >= len(streams)  # it did die under all of them


def wait_idle(client: Client, address: str) -> None:
    """All rows and blocks are back."""
    end = time.monotonic() + 10
    while any(load.num_running or load.num_waiting or load.kv_cache_usage for load in client.loads(address)):
        assert time.monotonic() < end, client.loads(address)
        time.sleep(0.02)


def _end(victim: ServiceProcess, how: str) -> None:
    if how == "kill":
        os.killpg(victim.pid, signal.SIGKILL)
    elif how == "terminate":
        victim.terminate()
    else:
        (engine,) = victim.children()
        os.kill(engine, signal.SIGKILL)


class _Stream:
    """One stream in a thread of its own."""

    def __init__(self, name: str, begun: threading.Barrier) -> None:
        self.name = name
        self.deltas: list[OutputDelta] = []
        self.failure: BaseException | None = None
        self._begun = begun

    def run(self, client: Client) -> None:
        try:
            for delta in client.stream(PROMPT, PARAMS[self.name]):
                self.deltas.append(delta)
                if len(self.deltas) == 2:
                    self._begun.wait()
        except BaseException as error:
            self.failure = error


def assert_same(found: CompletionOutput, wanted: CompletionOutput) -> None:
    assert found.token_ids == wanted.token_ids
    assert found.text == wanted.text
    assert (found.finish_reason, found.stop_reason) == (wanted.finish_reason, wanted.stop_reason)
    assert found.logprobs is not None
    assert wanted.logprobs is not None
    for entry, other in zip(found.logprobs, wanted.logprobs, strict=True):
        assert list(entry) == list(other)
        for token, logprob in entry.items():
            assert logprob.logprob == pytest.approx(other[token].logprob, abs=1e-4)
            assert logprob.decoded_token == other[token].decoded_token
            assert logprob.rank in (None, other[token].rank)
