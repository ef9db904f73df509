"""A verifier and smg's router in front of it, as two processes that live and die together.

The verifier listens on a port of 127.0.0.1 that the system chooses. The router is asked for `/readiness` on a port of
its own, which speaks plain HTTP also where the public one speaks TLS.
"""

from __future__ import annotations

import asyncio
import ctypes
import importlib.util
import os
import re
import signal
import socket
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import IO, Any

from common.errors import UnavailableError
from common.logging import get_logger
from common.options import ENVIRONMENT_PREFIX
from common.rpc.server import check_free
from outrider.gateway import INSTALL_HINT, RECOVERY_FLAGS, read_api_key
from outrider.serve_config import ServeConfig

_LOCAL = "127.0.0.1"
_READY_LINE = re.compile(rb" ready on \w+://(\S+)")
_GATEWAY_START_S = 60.0
_POLL_S = 0.1
_PROBE_S = 2.0
# The router listens for 5 more seconds after SIGTERM, so that load balancers see that it is not ready any more.
_EXIT_MARGIN_S = 15.0
_LOST_GRACE_S = 2.0
_PR_SET_PDEATHSIG = 1

logger = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Child:
    """One of the two processes."""

    name: str
    process: Process


async def serve(config: ServeConfig, log_level: str, announce: Callable[[str], None]) -> int:
    """Serve until SIGTERM or SIGINT; returns 0 then. A second signal ends everything at once.

    Args:
        config: what to serve, and where.
        log_level: of both processes.
        announce: called with the URL once requests are served.

    Raises:
        InvalidArgumentError: the address is taken, or the key cannot be read.
        UnavailableError: smg is not installed, or one of the two processes ended; the other has been ended too.
    """
    if importlib.util.find_spec("smg") is None:
        raise UnavailableError(f"smg, the router that speaks HTTP, is not installed: {INSTALL_HINT}")
    check_free(config.host, config.port)
    if config.api_key_file is not None:
        read_api_key(config.api_key_file)
    signals = _StopSignals()
    children: list[Child] = []
    try:
        with suppress(_StoppedError):
            await signals.unless_stopped(_run(config, log_level, announce, children))
        await _drain(children, config.shutdown_timeout, signals)
    finally:
        await _end(children)
    return 0


async def _run(config: ServeConfig, log_level: str, announce: Callable[[str], None], children: list[Child]) -> None:
    """Start both, then wait; raises when one of them ends."""
    verifier = Child("verifier", await _start(verifier_command(config, log_level), PIPE))
    children.append(verifier)
    address = await _read_address(verifier)
    health_port, metrics_port = _free_ports(2)
    metrics_port = config.gateway_metrics_port or metrics_port
    command = gateway_command(config, log_level, address, health_port, metrics_port)
    # What the router writes are logs; our output is the ready line alone.
    gateway = Child("gateway", await _start(command, sys.stderr))
    children.append(gateway)
    ended = asyncio.create_task(_first_to_end(children))
    try:
        await _first(ended, _wait_ready(health_port))
        logger.info("ready", verifier=address, gateway_metrics=f"{_LOCAL}:{metrics_port}")
        host = f"[{config.host}]" if ":" in config.host else config.host
        announce(f"{config.scheme}://{host}:{config.port}")
        await ended
    finally:
        ended.cancel()


def verifier_command(config: ServeConfig, log_level: str) -> list[str]:
    """How the verifier is started."""
    program = "import sys; from outrider.cli import main; sys.exit(main())"
    command = [sys.executable, "-c", program, "--log-level", log_level, "verifier", config.model]
    return [*command, f"--host={_LOCAL}", "--port=0", *config.verifier_flags]


def gateway_command(
    config: ServeConfig, log_level: str, verifier_address: str, health_port: int, metrics_port: int
) -> list[str]:
    """How smg's router is started."""
    command = [sys.executable, "-m", "outrider.gateway", "--worker-urls", f"grpc://{verifier_address}"]
    command += ["--host", config.host, "--port", str(config.port), "--health-check-port", str(health_port)]
    command += ["--prometheus-host", _LOCAL, "--prometheus-port", str(metrics_port), *RECOVERY_FLAGS]
    command += ["--request-timeout-secs", str(max(1, round(config.request_timeout)))]
    command += ["--shutdown-grace-period-secs", str(max(1, round(config.shutdown_timeout)))]
    command += ["--log-level", "warn" if log_level == "warning" else log_level]
    if config.api_key_file is not None:
        command += ["--api-key-file", str(config.api_key_file)]
    if config.tls_cert is not None and config.tls_key is not None:
        command += ["--tls-cert-path", str(config.tls_cert), "--tls-key-path", str(config.tls_key)]
    return command


class _StoppedError(Exception):
    """A signal came."""


class _StopSignals:
    """SIGTERM and SIGINT of this process."""

    def __init__(self) -> None:
        self._first = asyncio.Event()
        self._second = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._take)

    async def unless_stopped(self, work: Coroutine[Any, Any, None]) -> None:
        """Raises _StoppedError if the first signal comes before the work is done."""
        await _first(asyncio.ensure_future(work), self._wait(self._first))

    async def unless_hurried(self, work: Coroutine[Any, Any, None]) -> None:
        """Raises _StoppedError if the second signal comes before the work is done."""
        await _first(asyncio.ensure_future(work), self._wait(self._second))

    def _take(self) -> None:
        (self._second if self._first.is_set() else self._first).set()

    async def _wait(self, event: asyncio.Event) -> None:
        await event.wait()
        raise _StoppedError


async def _first(task: asyncio.Future[None], other: Coroutine[Any, Any, None]) -> None:
    """Until one of the two is done; raises what it raised. `task` goes on if `other` was first and raised nothing."""
    waiting = asyncio.ensure_future(other)
    try:
        done, _ = await asyncio.wait((task, waiting), return_when=asyncio.FIRST_COMPLETED)
        for future in done:
            future.result()
    except BaseException:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        raise
    finally:
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)


async def _start(command: Sequence[str], stdout: int | IO[Any]) -> Process:
    # Options in our environment have been taken in: the children must not take them for their own.
    environment = {name: value for name, value in os.environ.items() if not name.startswith(ENVIRONMENT_PREFIX)}
    return await asyncio.create_subprocess_exec(
        *command,
        env=environment,
        stdin=DEVNULL,
        stdout=stdout,
        # A session of its own: Ctrl-C reaches this process alone, which ends the two in the right order.
        start_new_session=True,
        preexec_fn=_die_with_parent if sys.platform == "linux" else None,
    )


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


async def _read_address(verifier: Child) -> str:
    """The address of the verifier's ready line; a model may take any time to load."""
    stream = verifier.process.stdout
    assert stream is not None  # it was started with a pipe
    while line := await stream.readline():
        if match := _READY_LINE.search(line):
            return match[1].decode()
    raise UnavailableError(f"the verifier ended with status {await verifier.process.wait()} before it was ready")


async def _first_to_end(children: Sequence[Child]) -> None:
    """Wait for the end of any of them, and raise it as an error."""
    waits = {asyncio.ensure_future(child.process.wait()): child for child in children}
    try:
        done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()
    names = " and ".join(f"the {waits[wait].name} ended with status {wait.result()}" for wait in done)
    raise UnavailableError(f"{names}; everything has been stopped")


async def _wait_ready(port: int) -> None:
    """Until the router has found the verifier and its tokenizer."""
    try:
        async with asyncio.timeout(_GATEWAY_START_S):
            while not await _is_ready(port):
                await asyncio.sleep(_POLL_S)
    except TimeoutError:
        raise UnavailableError(f"the gateway was not ready after {_GATEWAY_START_S:.0f} s") from None


async def _is_ready(port: int) -> bool:
    try:
        async with asyncio.timeout(_PROBE_S):
            reader, writer = await asyncio.open_connection(_LOCAL, port)
            try:
                writer.write(b"GET /readiness HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
                status_line = await reader.readline()
            finally:
                writer.close()
        return status_line.split()[1:2] == [b"200"]
    except (OSError, TimeoutError):
        return False


async def _drain(children: Sequence[Child], timeout_s: float, signals: _StopSignals) -> None:
    """End them in the order that requests come in, each with the time that requests may take to finish."""
    for child in reversed(children):
        if child.process.returncode is not None:
            continue
        logger.info("stopping", process=child.name, timeout_s=timeout_s)
        child.process.terminate()
        try:
            async with asyncio.timeout(timeout_s + _EXIT_MARGIN_S):
                await signals.unless_hurried(_wait_end(child))
        except (TimeoutError, _StoppedError):
            return


async def _wait_end(child: Child) -> None:
    await child.process.wait()


async def _end(children: Sequence[Child]) -> None:
    """Whatever is left: asked, then killed. The verifier's engine goes with it."""
    running = [child for child in children if child.process.returncode is None]
    for child in running:
        child.process.terminate()
    for child in running:
        try:
            async with asyncio.timeout(_LOST_GRACE_S):
                await child.process.wait()
        except TimeoutError:
            child.process.kill()
            await child.process.wait()


def _free_ports(count: int) -> list[int]:
    """Ports of 127.0.0.1 that nobody listens on."""
    sockets = [socket.create_server((_LOCAL, 0)) for _ in range(count)]
    try:
        return [found.getsockname()[1] for found in sockets]
    finally:
        for found in sockets:
            found.close()
