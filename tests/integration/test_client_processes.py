"""Servers that are killed and stopped as processes, names, and TLS: what in-process servers cannot show."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from common.errors import InvalidArgumentError, UnavailableError
from common.sampling_params import SamplingParams
from outrider import Client
from tests.certificates import Certificates, make_certificates
from tests.fake_engine_server import FakeEngine, expected_outputs, start_server

ROOT = Path(__file__).resolve().parents[2]
PROMPT = list(b"once upon")
PARAMS = SamplingParams(seed=3, max_tokens=60, ignore_eos=True, presence_penalty=0.5)
LIMIT_S = 20.0


@contextmanager
def server_process() -> Iterator[tuple[subprocess.Popen[str], str]]:
    command = [sys.executable, "-m", "tests.fake_engine_server", "--delay", "0.01"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield process, f"127.0.0.1:{int(process.stdout.readline())}"
    finally:
        process.kill()
        process.wait(10)
        assert process.stdout is not None
        process.stdout.close()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_server_that_vanishes_in_mid_stream_is_not_noticed(how: signal.Signals) -> None:
    with ExitStack() as stack:
        servers = [stack.enter_context(server_process()) for _ in range(2)]
        addresses = [address for _, address in servers]
        # A stopped process keeps its connections: only its silence gives it away.
        client = stack.enter_context(Client(addresses, timeout=LIMIT_S, keepalive_s=1.0))
        tokens: list[int] = []
        text = ""
        victim = 0
        start = time.monotonic()
        for number, delta in enumerate(client.stream(PROMPT, PARAMS)):
            tokens += delta.token_ids
            text += delta.text
            if number == 5:
                victim = max(range(2), key=lambda index: client.addresses[index].num_in_flight)
                os.kill(servers[victim][0].pid, how)
        assert time.monotonic() - start < 10
        (expected,) = expected_outputs(PROMPT, PARAMS)
        assert (tokens, text) == (expected.token_ids, expected.text)
        assert client.addresses[victim].num_failures >= 1
        # And the next requests do without it.
        for _ in range(3):
            assert client.generate(PROMPT, PARAMS).outputs[0].token_ids == expected.token_ids


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return make_certificates(tmp_path_factory.mktemp("certificates"))


def test_mutual_tls_and_a_key(certificates: Certificates) -> None:
    credentials = grpc.ssl_server_credentials(
        [(certificates.server_key.read_bytes(), certificates.server_cert.read_bytes())],
        certificates.ca.read_bytes(),
        require_client_auth=True,
    )
    with start_server(FakeEngine(), credentials=credentials) as server:
        tls: Any = {"tls_ca": certificates.ca}
        tls_of_client: Any = {"tls_cert": certificates.client_cert, "tls_key": certificates.client_key}
        address = f"localhost:{server.port}"
        with Client(address, api_key="secret", timeout=LIMIT_S, **tls, **tls_of_client) as client:
            (expected,) = expected_outputs(PROMPT, PARAMS)
            assert client.generate(PROMPT, PARAMS).outputs[0].token_ids == expected.token_ids
        assert server.engine.metadata[0]["authorization"] == "Bearer secret"
        without: list[dict[str, Any]] = [{}, tls]
        for options in without:
            with Client(address, timeout=LIMIT_S, max_retries=0, **options) as client, pytest.raises(UnavailableError):
                client.model_info()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tls_cert": "a"}, "tls_key"),
        ({"tls_ca": "/does/not/exist"}, "can be read"),
        ({"tls_ca": __file__}, "PEM"),
        ({"timeout": 0}, "timeout"),
        ({"max_retries": -1}, "max_retries"),
        ({"keepalive_s": 0.0}, "keepalive_s"),
    ],
)
def test_wrong_options_are_refused_at_once(options: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        Client("127.0.0.1:1", **options)  # type: ignore[arg-type]


def test_a_name_is_resolved_again_when_its_host_is_lost() -> None:
    """`localhost` stands for a service name: the server behind it goes, and another one comes at the same port."""
    first = start_server(FakeEngine(delay_s=0.01))
    with Client(f"localhost:{first.port}", timeout=LIMIT_S) as client:
        deltas = client.stream(PROMPT, PARAMS)
        tokens = [token for _ in range(3) for token in next(deltas).token_ids]
        first.stop()
        with start_server(port=first.port):
            tokens += [token for delta in deltas for token in delta.token_ids]
    assert tokens == expected_outputs(PROMPT, PARAMS)[0].token_ids


def test_the_client_is_light() -> None:
    """Neither torch nor transformers, and `import outrider` alone does not even load gRPC."""
    code = """
import sys
import outrider
assert "grpc" not in sys.modules, "grpc"
from outrider import AsyncClient, Client, SamplingParams
import outrider.commands.client, outrider.commands.top
import pkgutil, importlib, outrider.client
for module in pkgutil.walk_packages(outrider.client.__path__, "outrider.client."):
    importlib.import_module(module.name)
print(*(name for name in ("torch", "transformers", "model_executor", "triton") if name in sys.modules))
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.split()) == (0, []), done.stderr
