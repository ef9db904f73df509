"""Metrics, logs and spans of a real front and engine process; the engine needs no model."""

from __future__ import annotations

import json
import socket
import sys
import time
import urllib.request
from collections.abc import Iterator

import grpc
import pytest
from prometheus_client.parser import text_string_to_metric_families
from smg_grpc_proto.generated.vllm_engine_pb2_grpc import VllmEngineStub

from tests.engine_calls import connected, generate, make_request, wait_idle
from tests.fake_engine import fake_output
from tests.service_process import ServiceProcess, running

# `tests.fake_verifier` with a log level of one's own.
_CODE = """
import sys
from outrider import cli
from outrider.commands import verifier
verifier.ENGINE_COMMAND = (sys.executable, "-m", "tests.fake_engine", "--step-ms", "1")
sys.exit(cli.main(["--log-level", sys.argv[1], "verifier", "fake-model", "--port", "0", *sys.argv[2:]]))
"""


def command(level: str, *flags: str) -> list[str]:
    return [sys.executable, "-c", _CODE, level, *flags]


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


class Verifier:
    """One that logs everything, and where it is."""

    def __init__(self, process: ServiceProcess, address: str, metrics_port: int) -> None:
        self.process = process
        self.address = address
        self.metrics_port = metrics_port

    def scrape(self) -> dict[tuple[str, str], float]:
        """Sample values by name and, where there is one, the label that tells samples apart."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.metrics_port}/metrics", timeout=10) as response:
            page = response.read().decode()
        found: dict[tuple[str, str], float] = {}
        for family in text_string_to_metric_families(page):
            for sample in family.samples:
                found[sample.name, sample.labels.get("finished_reason", "")] = sample.value
        return found

    def records(self, request_id: str) -> list[dict[str, str]]:
        """Of one request, in both processes. Waits for the last of them."""
        deadline = time.monotonic() + 10
        while True:
            records = [json.loads(line) for line in list(self.process.errors) if request_id in line]
            if sum(record["event"] == "request finished" for record in records) == 2 or time.monotonic() > deadline:
                return records
            time.sleep(0.02)


@pytest.fixture(scope="module")
def verifier() -> Iterator[Verifier]:
    port = free_port()
    with running(command("debug", "--metrics-port", str(port), "--max-num-seqs", "2")) as process:
        yield Verifier(process, process.wait_ready(), port)


@pytest.fixture
def stub(verifier: Verifier) -> Iterator[VllmEngineStub]:
    with connected(verifier.address) as stub:
        yield stub
        wait_idle(stub)


def test_metrics_count_what_was_served(verifier: Verifier, stub: VllmEngineStub) -> None:
    before = verifier.scrape()
    generate(stub, make_request("abcd", max_tokens=30, seed=0))
    generate(stub, make_request("abcd", max_tokens=30, seed=0, stop=[chr(fake_output("abcd", 30)[10])]))
    wait_idle(stub)
    after = verifier.scrape()
    gained = {key: after[key] - before[key] for key in after if key in before}
    assert gained["vllm:prompt_tokens_total", ""] == 8
    assert gained["vllm:request_success_total", "length"] == 1
    assert gained["vllm:request_success_total", "stop"] == 1
    for name in ("time_to_first_token_seconds", "e2e_request_latency_seconds", "request_queue_time_seconds"):
        assert gained[f"vllm:{name}_count", ""] == 2
    assert 0 < gained["vllm:e2e_request_latency_seconds_sum", ""] < 30
    assert gained["vllm:spec_decode_num_accepted_tokens_total", ""] > 0
    assert gained["outrider_engine_steps_total", ""] > 15
    assert after["vllm:num_requests_running", ""] == after["vllm:num_requests_waiting", ""] == 0
    assert after["process_resident_memory_bytes", ""] > 1 << 20


def test_a_cancelled_request_counts_as_aborted(verifier: Verifier, stub: VllmEngineStub) -> None:
    before = verifier.scrape()["vllm:request_success_total", "abort"]
    call = stub.Generate(make_request("abcd", max_tokens=3000))
    next(iter(call))
    call.cancel()
    deadline = time.monotonic() + 10
    while verifier.scrape()["vllm:request_success_total", "abort"] == before:
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_request_can_be_followed_through_both_processes(verifier: Verifier, stub: VllmEngineStub) -> None:
    prompt = "a prompt that stands in no log"
    generate(stub, make_request(prompt, request_id="follow-me", max_tokens=4))
    records = verifier.records("follow-me")
    assert [record["level"] for record in records] == ["debug"] * 4
    by_logger = {record["logger"]: [] for record in records}
    for record in records:
        by_logger[record["logger"]].append(record["event"])
    assert by_logger == {
        "verifier_svc.front.servicer": ["request accepted", "request finished"],
        "verifier_svc.engine.process": ["request added", "request finished"],
    }
    assert prompt not in verifier.process.error_text


def test_a_bad_request_is_debug_and_names_itself(verifier: Verifier, stub: VllmEngineStub) -> None:
    with pytest.raises(grpc.RpcError):
        generate(stub, make_request("abcd", request_id="bad-one", temperature=-1.0))
    deadline = time.monotonic() + 10
    while not (lines := [line for line in list(verifier.process.errors) if "bad-one" in line]):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    (record,) = map(json.loads, lines)
    assert (record["event"], record["level"]) == ("request failed", "debug")


def test_metrics_port_in_use_is_said_at_once() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with running(command("error", "--metrics-port", str(port))) as process:
            assert process.wait(30) == 2
    assert f"metrics_port = '127.0.0.1:{port}'" in process.error_text


def test_spans_are_no_cost_to_a_collector_that_is_not_there() -> None:
    """Requests are served, and the end comes within seconds."""
    with running(command("error", "--otlp-endpoint", f"http://127.0.0.1:{free_port()}")) as process:
        with connected(process.wait_ready()) as stub:
            (output,) = generate(stub, make_request("abcd", max_tokens=20, seed=0))
            assert output.token_ids == fake_output("abcd", 20)
        start = time.monotonic()
        process.terminate()
        assert process.wait(30) == 0
        assert time.monotonic() - start < 15
