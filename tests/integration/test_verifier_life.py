"""Starts and ends of a verifier: its two processes, signals, ports. The engine needs no model."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from tests.engine_calls import Received, connected, generate, health_of, make_request, wait_idle, wait_load
from tests.fake_engine import MAX_MODEL_LEN, fake_output
from tests.service_process import FAKE_VERIFIER, ServiceProcess, running, wait_gone

SERVICE = "vllm.grpc.engine.VllmEngine"
ENDLESS = MAX_MODEL_LEN - 100
UNAVAILABLE = grpc.StatusCode.UNAVAILABLE


def command(*flags: str, engine: tuple[str, ...] = ("--step-ms", "2"), port: int = 0) -> list[str]:
    return [*FAKE_VERIFIER, *engine, "--", "--port", str(port), "--max-num-seqs", "4", *flags]


@pytest.fixture
def verifier() -> Iterator[ServiceProcess]:
    with running(command()) as process:
        yield process


def outcome(call: Iterator[pb.GenerateResponse]) -> tuple[grpc.StatusCode, Received]:
    """How a call ended, and what it had brought until then."""
    received = Received()
    try:
        for response in call:
            if response.HasField("chunk"):
                received.token_ids += response.chunk.token_ids
            else:
                received.completes.append(response.complete)
    except grpc.RpcError as error:
        return error.code(), received
    return grpc.StatusCode.OK, received


def test_kill_of_the_engine_ends_every_stream_within_a_second(verifier: ServiceProcess) -> None:
    with connected(verifier.wait_ready()) as stub, ThreadPoolExecutor() as pool:
        calls = [
            stub.Generate(make_request([1], stream=index % 2 == 0, max_tokens=ENDLESS), timeout=60)
            for index in range(6)
        ]
        wait_load(stub, lambda load: load.num_total_reqs == 6)
        outcomes = [pool.submit(outcome, call) for call in calls]
        (engine,) = verifier.children()
        start = time.monotonic()
        os.kill(engine, signal.SIGKILL)
        for future in outcomes:
            code, received = future.result(5)
            assert code is UNAVAILABLE
            assert not received.completes
        assert time.monotonic() - start < 1
        assert verifier.wait(5) == 1
        assert "the engine is lost" in verifier.error_text


def test_kill_of_the_front_takes_the_engine_with_it() -> None:
    long_steps = command(engine=("--step-ms", "3000"))  # also in the middle of one
    with running(long_steps) as process, connected(process.wait_ready()) as stub:
        call = stub.Generate(make_request([1], max_tokens=ENDLESS), timeout=60)
        time.sleep(0.3)
        (engine,) = process.children()
        os.kill(process.pid, signal.SIGKILL)
        assert wait_gone(engine, 2) < 1
        assert outcome(call)[0] is UNAVAILABLE


def test_a_step_that_fails_is_the_end_with_its_reason() -> None:
    with running(command(engine=("--fail-at", "5"))) as process:
        with connected(process.wait_ready()) as stub:
            code, received = outcome(stub.Generate(make_request([1], max_tokens=50, seed=0), timeout=60))
            assert code is UNAVAILABLE
            assert received.token_ids == fake_output([1], 50, seed=0)[: len(received.token_ids)]
        assert process.wait(5) == 1
        assert "the device is gone" in process.error_text


def test_sigterm_under_load_loses_nothing_that_started(verifier: ServiceProcess) -> None:
    """Requests that run or wait are finished; new ones go elsewhere; the process ends with 0."""
    address = verifier.wait_ready()
    with connected(address) as stub, ThreadPoolExecutor() as pool, grpc.insecure_channel(address) as channel:
        calls = [
            stub.Generate(make_request([index], max_tokens=300, seed=index, stream=index % 2 == 0), timeout=60)
            for index in range(8)
        ]
        wait_load(stub, lambda load: load.num_total_reqs == 8)
        outcomes = [pool.submit(outcome, call) for call in calls]
        verifier.terminate()
        deadline = time.monotonic() + 2
        while health_of(channel, SERVICE):
            assert time.monotonic() < deadline
        assert not stub.HealthCheck(pb.HealthCheckRequest(), timeout=5).healthy
        with pytest.raises(grpc.RpcError) as caught:
            generate(stub, make_request([1]))
        assert caught.value.code() is UNAVAILABLE
        assert "shutting down" in str(caught.value.details())
        for index, future in enumerate(outcomes):
            code, received = future.result(30)
            assert code is grpc.StatusCode.OK
            assert list(received.complete.output_ids) == fake_output([index], 300, seed=index)
        assert verifier.wait(5) == 0


def test_what_does_not_finish_in_time_ends_with_a_status() -> None:
    with running(command("--shutdown-timeout", "0.3")) as process:
        with connected(process.wait_ready()) as stub:
            call = stub.Generate(make_request([1], max_tokens=ENDLESS), timeout=60)
            next(iter(call))
            start = time.monotonic()
            process.terminate()
            code, received = outcome(call)
            assert code is UNAVAILABLE
            assert not received.completes
        assert process.wait(5) == 0
        assert time.monotonic() - start < 4


def test_a_second_signal_does_not_wait(verifier: ServiceProcess) -> None:
    with connected(verifier.wait_ready()) as stub:
        call = stub.Generate(make_request([1], max_tokens=ENDLESS), timeout=60)
        next(iter(call))
        verifier.terminate()
        time.sleep(0.3)
        verifier.terminate()
        assert outcome(call)[0] is UNAVAILABLE
        assert verifier.wait(5) == 0


def test_port_in_use_is_said_before_the_model_loads() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with running(command(port=port, engine=("--load-s", "60"))) as process:
            assert process.wait(10) == 2
            time.sleep(0.1)
            assert process.error_text == (
                f"outrider: port = '127.0.0.1:{port}': expected an address that can be bound (Address already in use)\n"
            )


def test_two_verifiers_do_not_share_a_port(verifier: ServiceProcess) -> None:
    port = int(verifier.wait_ready().rpartition(":")[2])
    with running(command(port=port)) as second:
        assert second.wait(10) == 2


def test_alive_but_not_ready_while_the_model_loads() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    address = f"127.0.0.1:{port}"
    loading = command(port=port, engine=("--load-s", "1.5"))
    with running(loading) as process, grpc.insecure_channel(address) as channel, connected(address) as stub:
        assert health_of(channel, wait_for_ready=True)
        assert not health_of(channel, SERVICE)
        with pytest.raises(grpc.RpcError) as caught:
            generate(stub, make_request([1]))
        assert caught.value.code() is UNAVAILABLE
        assert "loading" in str(caught.value.details())
        process.wait_ready()
        assert health_of(channel, SERVICE)
        assert generate(stub, make_request([1], max_tokens=2, seed=0))[0].token_ids == fake_output([1], 2)


def test_sigterm_while_the_model_loads() -> None:
    with running(command(engine=("--load-s", "30"))) as process:
        time.sleep(1.5)
        process.terminate()
        assert process.wait(3) == 0


def test_unix_socket(tmp_path: Path) -> None:
    path = tmp_path / "verifier.sock"
    with socket.socket(socket.AF_UNIX) as stale:  # of a process that died
        stale.bind(str(path))
    with running(command("--uds", str(path))) as process:
        process.wait_ready()
        with connected(f"unix:{path}") as stub:
            assert generate(stub, make_request([1], max_tokens=2, seed=0))[0].token_ids == fake_output([1], 2)
        with running(command("--uds", str(path))) as second:
            assert second.wait(10) == 2
        process.terminate()
        assert process.wait(10) == 0
    assert not path.exists()


def test_request_timeout() -> None:
    with running(command("--request-timeout", "0.3")) as process, connected(process.wait_ready()) as stub:
        code, received = outcome(stub.Generate(make_request([1], max_tokens=ENDLESS), timeout=60))
        assert code is grpc.StatusCode.DEADLINE_EXCEEDED
        assert received.token_ids
        wait_idle(stub)


def test_a_stuck_engine_is_unhealthy_until_it_goes_on() -> None:
    with running(command("--engine-timeout", "0.5")) as process:
        address = process.wait_ready()
        with connected(address) as stub, grpc.insecure_channel(address) as channel:

            def wait_health(expected: bool) -> None:
                deadline = time.monotonic() + 10
                while not (
                    stub.HealthCheck(pb.HealthCheckRequest()).healthy == health_of(channel, SERVICE) == expected
                ):
                    assert time.monotonic() < deadline
                    time.sleep(0.05)

            time.sleep(0.6)
            wait_health(True)  # without work, silence is nothing
            call = stub.Generate(make_request([1], max_tokens=400, seed=2), timeout=60)
            next(iter(call))
            (engine,) = process.children()
            os.kill(engine, signal.SIGSTOP)
            wait_health(False)
            os.kill(engine, signal.SIGCONT)
            code, received = outcome(call)
            assert code is grpc.StatusCode.OK
            assert list(received.complete.output_ids) == fake_output([1], 400, seed=2)
            wait_health(True)


def test_more_connections_than_allowed_are_closed() -> None:
    with running(command("--max-connections", "3")) as process:
        address = process.wait_ready()
        channels = [grpc.insecure_channel(address, [("grpc.use_local_subchannel_pool", 1)]) for _ in range(6)]
        results: list[bool] = []

        def check(channel: grpc.Channel) -> None:
            try:
                results.append(health_of(channel, timeout=2))
            except grpc.RpcError:
                results.append(False)

        threads = [threading.Thread(target=check, args=(channel,)) for channel in channels]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for channel in channels:
            channel.close()
        assert sorted(results) == [False] * 3 + [True] * 3
        with connected(address) as stub:
            deadline = time.monotonic() + 5
            while True:
                try:
                    assert stub.HealthCheck(pb.HealthCheckRequest(), timeout=2).healthy
                    break
                except grpc.RpcError:
                    assert time.monotonic() < deadline
