"""`outrider serve` as a user runs it: one command, OpenAI over HTTP, and an end in the right order."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.certificates import make_certificates
from tests.service_process import OUTRIDER, ServiceProcess, is_alive, running, wait_gone

pytest.importorskip("smg")

MODEL = "models/demo-target"
SMALL = ("--max-num-seqs", "4", "--kv-cache-memory", "64M", "--num-threads", "1")
# It listens 5 s after SIGTERM, and the verifier ends after it.
STOP_LIMIT_S = 30.0


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return found.getsockname()[1]


@contextmanager
def serving(*flags: str, environment: dict[str, str] | None = None) -> Iterator[tuple[ServiceProcess, str]]:
    command = [*OUTRIDER, "serve", MODEL, "--port", str(free_port()), *SMALL, *flags]
    with running(command, environment) as process:
        address = process.wait_ready()
        children = descendants(process.pid)
        try:
            yield process, address
        finally:
            # They are in sessions of their own, and follow their parent.
            process.kill_group()
            for pid in children:
                wait_gone(pid, 10)


def descendants(pid: int) -> list[int]:
    """Children, and their children."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(entry.parent.name)] = int(entry.read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError):
            continue
    found = [pid]
    for parent in found:
        found += [child for child, owner in parents.items() if owner == parent]
    return found[1:]


def post(address: str, path: str, body: dict[str, Any], key: str | None = None, ca: Path | None = None) -> Any:
    """Status and answer."""
    headers = {"Content-Type": "application/json"} | ({} if key is None else {"Authorization": f"Bearer {key}"})
    connection: http.client.HTTPConnection
    if ca is None:
        connection = http.client.HTTPConnection(address, timeout=60)
    else:
        context = ssl.create_default_context(cafile=str(ca))
        connection = http.client.HTTPSConnection(address, timeout=60, context=context)
    try:
        connection.request("POST", path, json.dumps(body), headers)
        response = connection.getresponse()
        body_text = response.read().decode()
        is_json = response.getheader("Content-Type", "").startswith("application/json")
        return response.status, json.loads(body_text) if is_json else body_text
    finally:
        connection.close()


def completion(num_tokens: int = 8, **fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": "def f(", "max_tokens": num_tokens, "temperature": 0, "seed": 1, **fields}


def test_it_serves_finishes_what_has_begun_and_ends() -> None:
    with serving("--shutdown-timeout", "20") as (process, address):
        status, answer = post(address, "/v1/completions", completion())
        assert (status, answer["usage"]["completion_tokens"]) == (200, 8)
        assert post(address, "/workers", {"url": "grpc://127.0.0.1:1"})[0] == 401
        answers: list[Any] = []
        request = completion(400, ignore_eos=True)
        asking = threading.Thread(target=lambda: answers.append(post(address, "/v1/completions", request)))
        asking.start()
        time.sleep(0.3)
        children = descendants(process.pid)
        assert len(children) == 3  # front, engine, router
        process.terminate()
        assert process.wait(STOP_LIMIT_S) == 0
        asking.join(10)
        ((status, answer),) = answers
        assert (status, answer["usage"]["completion_tokens"]) == (200, 400)
        assert not any(is_alive(pid) for pid in children)


@pytest.mark.parametrize("victim", ["verifier", "gateway"])
def test_when_one_process_dies_the_other_is_ended(victim: str) -> None:
    with serving() as (process, _):
        children = descendants(process.pid)
        names = {pid: Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode() for pid in children}
        sign = {"verifier": " verifier ", "gateway": "smg::router"}[victim]
        (pid,) = [pid for pid, name in names.items() if sign in name]
        os.kill(pid, signal.SIGKILL)
        assert process.wait(10) == 2
        assert f"the {victim} ended with status -9" in process.error_text
        for child in children:
            wait_gone(child, 5)


def test_children_do_not_outlive_a_killed_parent() -> None:
    with serving("--shutdown-timeout", "0") as (process, _):
        children = descendants(process.pid)
        os.kill(process.pid, signal.SIGKILL)
        for child in children:
            wait_gone(child, 20)


def test_https_with_a_key_that_no_command_line_shows(tmp_path: Path) -> None:
    key = "a-key-of-the-test"
    (tmp_path / "key").write_text(f"# for the gateway\n{key}\n")
    files = make_certificates(tmp_path)
    flags = ["--tls-cert", str(files.server_cert), "--tls-key", str(files.server_key)]
    # The verifier must not take the variable for its own: the router has no key for it.
    with serving(*flags, environment={"OUTRIDER_API_KEY_FILE": str(tmp_path / "key")}) as (process, address):
        assert post(address, "/v1/completions", completion(), key, files.ca)[0] == 200
        assert post(address, "/v1/completions", completion(), "another", files.ca)[0] == 401
        assert post(address, "/v1/completions", completion(), None, files.ca)[0] == 401
        # The key is for using the model: it adds no verifiers.
        assert post(address, "/workers", {"url": "grpc://127.0.0.1:1"}, key, files.ca)[0] == 401
        for pid in (process.pid, *descendants(process.pid)):
            assert key.encode() not in Path(f"/proc/{pid}/cmdline").read_bytes()
            assert key.encode() not in Path(f"/proc/{pid}/environ").read_bytes()


def test_a_model_that_is_not_there_ends_it() -> None:
    with running([*OUTRIDER, "serve", "no/such/model", "--port", str(free_port())]) as process:
        assert process.wait(30) == 2
        process.kill_group()
        assert "model directory no/such/model does not exist" in process.error_text
        assert "the verifier ended with status 2 before it was ready" in process.error_text


def test_port_in_use_is_said_before_the_model_loads() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with running([*OUTRIDER, "serve", MODEL, "--port", str(port)]) as process:
            assert process.wait(10) == 2
    assert f"port = '127.0.0.1:{port}': expected an address that can be bound" in process.error_text
    assert "Traceback" not in process.error_text
