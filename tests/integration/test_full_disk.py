"""A full disk under log and output costs records and the ready line, and nothing else."""

from __future__ import annotations

import time

import grpc
import pytest
from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from tests.drafter_process import wait_until
from tests.engine_calls import connected, generate, health_of, make_request
from tests.fake_engine import fake_output
from tests.integration.test_observability import command, free_port
from tests.remote_llm import info
from tests.service_process import OUTRIDER, running

START_LIMIT_S = 30.0


def on_full_disk(service: list[str], where: str) -> list[str]:
    return ["bash", "-c", f'exec "$@" {where}', "bash", *service]


@pytest.mark.parametrize("where", ["2>/dev/full", ">/dev/full", ">/dev/full 2>&1"])
def test_a_verifier_serves_and_ends(where: str) -> None:
    port = free_port()
    with running(on_full_disk(command("debug", "--port", str(port)), where)) as process:
        with connected(f"127.0.0.1:{port}") as stub:
            stub.HealthCheck(pb.HealthCheckRequest(), timeout=START_LIMIT_S, wait_for_ready=True)
            ready = pb.HealthCheckRequest()
            wait_until(lambda: stub.HealthCheck(ready, timeout=10).healthy, "it is ready", START_LIMIT_S)
            for number in range(20):
                (output,) = generate(stub, make_request("abcd", max_tokens=20, seed=number), timeout=20)
                assert output.token_ids == fake_output("abcd", 20, seed=number)
            with pytest.raises(grpc.RpcError):
                generate(stub, make_request("abcd", temperature=-1.0))
        process.terminate()
        assert process.wait(20) == 0


def test_a_drafter_serves_and_ends() -> None:
    port = free_port()
    drafter = [*OUTRIDER, "--log-level", "debug", "drafter", "--port", str(port), "--shm-dir", ""]
    with running(on_full_disk(drafter, ">/dev/full 2>&1")) as process:
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            assert health_of(channel, timeout=START_LIMIT_S, wait_for_ready=True)
        assert info(f"127.0.0.1:{port}").method == "ngram"
        start = time.monotonic()
        process.terminate()
        assert process.wait(20) == 0
        assert time.monotonic() - start < 10
