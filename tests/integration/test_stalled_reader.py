"""Readers that stop reading: the memory they cost is bounded by their outputs, and nobody else waits for them."""

from __future__ import annotations

import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack

import grpc
import pytest
from smg_grpc_proto.generated import vllm_engine_pb2 as pb
from smg_grpc_proto.generated.vllm_engine_pb2_grpc import VllmEngineStub

from tests.engine_calls import collect, connected, generate, load_of, make_request, wait_idle
from tests.fake_engine import MAX_MODEL_LEN, fake_output
from tests.integration.test_observability import free_port
from tests.service_process import FAKE_VERIFIER, running

NUM_STALLED = 48
NUM_TOKENS = MAX_MODEL_LEN - 100
MAX_GROWTH_BYTES = 24 << 20
"""48 outputs of 4000 tokens are 1.5 MB as lists of integers. A queue of their 120,000 messages takes over 60 MB."""
# A connection of each reader's own, that takes little beyond what was asked for.
READER_OPTIONS = [
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.http2.lookahead_bytes", 1024),
    ("grpc.http2.bdp_probe", 0),
]
MAX_SLOWDOWN = 1.6


@pytest.fixture(scope="module")
def metrics_port() -> int:
    return free_port()


@pytest.fixture(scope="module")
def address(metrics_port: int) -> Iterator[str]:
    flags = ["--port", "0", "--max-num-seqs", "64", "--metrics-port", str(metrics_port)]
    with running([*FAKE_VERIFIER, "--step-ms", "1", "--", *flags]) as process:
        yield process.wait_ready()


def front_memory_bytes(port: int) -> float:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as response:
        lines = response.read().decode().splitlines()
    (line,) = [line for line in lines if line.startswith("process_resident_memory_bytes ")]
    return float(line.split()[1])


def time_of_a_reader(stub: VllmEngineStub) -> float:
    """Seconds of 300 tokens for one who reads, the best of three."""
    times: list[float] = []
    for seed in range(3):
        start = time.monotonic()
        (output,) = generate(stub, make_request("abc", max_tokens=300, seed=seed))
        times.append(time.monotonic() - start)
        assert output.token_ids == fake_output("abc", 300, seed=seed)
    return min(times)


def test_stalled_readers_are_bounded_and_slow_nobody(address: str, metrics_port: int) -> None:
    with connected(address) as stub, ExitStack() as stack:
        time_of_a_reader(stub)  # warm
        alone_s = time_of_a_reader(stub)
        before = front_memory_bytes(metrics_port)
        calls = []
        for number in range(NUM_STALLED):
            channel = stack.enter_context(grpc.insecure_channel(address, READER_OPTIONS))
            call = VllmEngineStub(channel).Generate(
                make_request("abc", max_tokens=NUM_TOKENS, seed=number), timeout=120
            )
            first = next(iter(call))
            calls.append((call, first))
        deadline = time.monotonic() + 60
        while load_of(stub).num_total_reqs:  # the engine does not wait for them
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert stub.GetServerInfo(pb.GetServerInfoRequest(), timeout=10).active_requests == NUM_STALLED
        assert front_memory_bytes(metrics_port) - before < MAX_GROWTH_BYTES
        assert time_of_a_reader(stub) < MAX_SLOWDOWN * alone_s
        for number, (call, first) in enumerate(calls):  # they have missed nothing
            (output,) = collect([first, *call])
            assert output.token_ids == fake_output("abc", NUM_TOKENS, seed=number)
            assert output.complete.completion_tokens == NUM_TOKENS
        wait_idle(stub)
