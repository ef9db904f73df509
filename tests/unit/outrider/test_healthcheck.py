"""The probe, against servers in this process."""

from __future__ import annotations

import http.server
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from outrider.healthcheck import UnhealthyError, decode_status, encode_request, main

Status = health_pb2.HealthCheckResponse


@pytest.fixture(scope="module")
def grpc_address() -> Iterator[str]:
    servicer = health.HealthServicer()
    server = grpc.server(ThreadPoolExecutor(2))
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    servicer.set("ready", Status.SERVING)
    servicer.set("loading", Status.NOT_SERVING)
    yield f"127.0.0.1:{port}"
    server.stop(None).wait(5)


@pytest.fixture(scope="module")
def http_address() -> Iterator[str]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/readiness" else 503)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join(5)


@pytest.mark.parametrize("name", ["", "ready", "loading", "x" * 127, "größer"])
def test_messages_are_those_of_the_protocol(name: str) -> None:
    assert encode_request(name) == health_pb2.HealthCheckRequest(service=name).SerializeToString()


@pytest.mark.parametrize("status", Status.ServingStatus.values())
def test_statuses_are_those_of_the_protocol(status: Status.ServingStatus.ValueType) -> None:
    assert decode_status(Status(status=status).SerializeToString()) == status


@pytest.mark.parametrize("answer", [b"\x08", b"\x10\x01", b"\x08\x01\x08\x01", b"hello"])
def test_an_answer_that_is_no_status_is_refused(answer: bytes) -> None:
    with pytest.raises(UnhealthyError):
        decode_status(answer)


@pytest.mark.parametrize("prefix", ["", "grpc://"])
@pytest.mark.parametrize(("service", "expected"), [("", 0), ("ready", 0), ("loading", 1), ("unknown", 1)])
def test_a_grpc_service(grpc_address: str, prefix: str, service: str, expected: int) -> None:
    assert main([prefix + grpc_address, "--service", service]) == expected


def test_the_reason_is_one_line(grpc_address: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([grpc_address, "--service", "loading"]) == 1
    assert capsys.readouterr().err == f"unhealthy: {grpc_address}: NOT_SERVING\n"


@pytest.mark.parametrize(("path", "expected"), [("/readiness", 0), ("/other", 1), ("", 1)])
def test_an_http_address(http_address: str, path: str, expected: int) -> None:
    assert main([http_address + path]) == expected


@pytest.mark.parametrize("address", ["127.0.0.1:1", "grpc://127.0.0.1:1", "http://127.0.0.1:1", "http:///x"])
def test_nobody_there(address: str) -> None:
    assert main([address, "--timeout", "1"]) == 1


def test_it_imports_nothing_heavy() -> None:
    program = "import sys, outrider.healthcheck as h; h.main(['127.0.0.1:1', '--timeout', '0.1']); print(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=30, check=True)
    loaded = {name.partition(".")[0] for name in run.stdout.split()}
    assert "grpc" in loaded
    assert not loaded & {"torch", "numpy", "pydantic", "google", "smg", "structlog"}
