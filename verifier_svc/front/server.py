"""The front process: starts the engine process, serves gRPC, drains on SIGTERM."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer
from grpc_reflection.v1alpha import reflection
from smg_grpc_proto.generated import vllm_engine_pb2, vllm_engine_pb2_grpc
from tokenizers import Tokenizer

from common.errors import InvalidArgumentError, UnavailableError
from common.logging import get_logger
from common.metrics import MetricsServer
from common.rpc.interceptors import OPEN_METHODS
from common.rpc.server import build_server, listen_tcp, listen_uds, read_api_keys
from verifier_svc.front.admission import ServedModel
from verifier_svc.front.config import VerifierConfig
from verifier_svc.front.engine_client import EngineClient
from verifier_svc.front.model_files import build_tokenizer_archive, read_model_config
from verifier_svc.front.servicer import Served, VllmEngineServicer
from verifier_svc.front.stats_log import StatsLog
from verifier_svc.messages import ServedFacts, Start

if TYPE_CHECKING:
    from verifier_svc.front.tracing import RequestTracer

SERVICE_NAME = str(vllm_engine_pb2.DESCRIPTOR.services_by_name["VllmEngine"].full_name)

EXIT_OK, EXIT_ENGINE_LOST = 0, 1

_STATUS_GRACE_S = 0.5  # for the last statuses to leave
_ENGINE_EXIT_S = 5.0
_WATCH_S = 1.0

_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING

logger = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class FrontOptions:
    """What is no part of the configuration."""

    engine_command: tuple[str, ...]
    """Starts the engine process; the number of a socket's file descriptor and our process id come behind it."""
    log_level: str
    version: str


async def serve(config: VerifierConfig, options: FrontOptions, announce: Callable[[str], None]) -> int:
    """Serve until SIGTERM or SIGINT, or until the engine is lost; returns the exit status.

    Args:
        config: what, where and to whom.
        options: how to start the engine.
        announce: called with the address once requests are served.

    Raises:
        OutriderError: the address cannot be bound, or the model cannot be served.
    """
    signals = _Signals()
    lost = asyncio.Event()
    engine = EngineClient(lambda error: lost.set(), config.capacity)
    tracer = _build_tracer(config, options.version)
    servicer = VllmEngineServicer(engine, config.request_timeout, config.engine_timeout, options.version, tracer)
    health_servicer = HealthServicer()
    server = _build(config, servicer, health_servicer)
    address = f"{config.host}:{listen_tcp(server, config.host, config.port, config.tls)}"
    if config.uds is not None:
        listen_uds(server, config.uds)
    metrics_server = _serve_metrics(config, engine)
    stats_log = asyncio.create_task(StatsLog(engine.metrics, logger).run())
    await health_servicer.set("", _SERVING)
    await health_servicer.set(SERVICE_NAME, _NOT_SERVING)
    process, sock = _start_engine(options.engine_command)
    try:
        await engine.connect(sock, Start(config.engine_options, options.log_level))
        await server.start()
        ready = asyncio.ensure_future(engine.ready())
        await _first(ready, signals.wait())
        if ready.done():
            served = _served(config, ready.result())
            engine.metrics.num_speculative_tokens = served.facts.num_speculative_tokens
            servicer.set_ready(served)
            await health_servicer.set(SERVICE_NAME, _SERVING)
            announce(address)
            await _first(lost.wait(), signals.wait(), _watch(servicer, health_servicer))
        ready.cancel()
        await health_servicer.set(SERVICE_NAME, _NOT_SERVING)
        if not lost.is_set():
            await _drain(servicer, signals, lost, config.shutdown_timeout)
        await server.stop(_STATUS_GRACE_S)
        if lost.is_set():
            logger.error("the engine is lost", error=str(engine.failure))
            return EXIT_ENGINE_LOST
        return EXIT_OK
    finally:
        engine.stop()
        await server.stop(None)
        if not servicer.has_loaded:
            process.kill()  # a load has nothing to lose, and may take minutes to look at the link again
        await _end(process)
        stats_log.cancel()
        if metrics_server is not None:
            await asyncio.to_thread(metrics_server.close)
        if tracer is not None:
            await asyncio.to_thread(tracer.close)
        if config.uds is not None:
            config.uds.unlink(missing_ok=True)


async def _watch(servicer: VllmEngineServicer, health_servicer: HealthServicer) -> None:
    """Say so where health is asked for, as long as the engine is stuck."""
    was_ready = True
    while True:
        await asyncio.sleep(_WATCH_S)
        if servicer.is_ready != was_ready:
            was_ready = servicer.is_ready
            logger.warning("the engine is heard of again" if was_ready else "the engine is stuck")
            await health_servicer.set(SERVICE_NAME, _SERVING if was_ready else _NOT_SERVING)


async def _drain(servicer: VllmEngineServicer, signals: _Signals, lost: asyncio.Event, timeout_s: float) -> None:
    """Finish what has started, up to a limit; then end the rest with a status. A second signal ends the wait."""
    servicer.refuse_new("the server is shutting down")
    logger.info("draining", num_requests=servicer.num_generations, timeout_s=timeout_s)
    signals.clear()
    try:
        async with asyncio.timeout(timeout_s):
            await _first(servicer.wait_idle(), signals.wait(), lost.wait())
    except TimeoutError:
        pass
    if servicer.num_generations:
        logger.warning("requests end unfinished", num_requests=servicer.num_generations)
        servicer.fail_all(UnavailableError("the server is shutting down, and the request took too long to finish"))
        try:
            async with asyncio.timeout(_STATUS_GRACE_S):
                await servicer.wait_idle()
        except TimeoutError:
            pass


def _build(config: VerifierConfig, servicer: VllmEngineServicer, health_servicer: HealthServicer) -> grpc.aio.Server:
    api_keys = [] if config.api_key_file is None else read_api_keys(config.api_key_file)
    if api_keys and config.tls is None and config.host not in ("127.0.0.1", "::1", "localhost"):
        logger.warning("keys travel in the clear: give --tls-cert and --tls-key as well")
    open_methods = (*OPEN_METHODS, f"/{SERVICE_NAME}/HealthCheck")
    server = build_server(config.limits, api_keys=api_keys, open_methods=open_methods)
    vllm_engine_pb2_grpc.add_VllmEngineServicer_to_server(servicer, server)
    health_pb2_grpc.add_HealthServicer_to_server(health_servicer, server)
    health_name = str(health_pb2.DESCRIPTOR.services_by_name["Health"].full_name)
    reflection.enable_server_reflection([SERVICE_NAME, health_name, reflection.SERVICE_NAME], server)
    return server


def _served(config: VerifierConfig, facts: ServedFacts) -> Served:
    tokenizer = None if facts.tokenizer_json is None else Tokenizer.from_str(facts.tokenizer_json)
    directory = Path(config.model)
    longest = 1
    archive = None
    if tokenizer is not None and facts.tokenizer_json is not None:
        longest = max(len(token.encode()) for token in tokenizer.get_vocab(with_added_tokens=True))
        archive = build_tokenizer_archive(directory, facts.tokenizer_json)
    return Served(
        facts=facts,
        model=ServedModel(
            vocab_size=facts.vocab_size,
            max_model_len=facts.max_model_len,
            eos_token_ids=facts.eos_token_ids,
            num_speculative_tokens=facts.num_speculative_tokens,
            tokenizer=tokenizer,
        ),
        name=config.name,
        path=str(directory.resolve()),
        model_config=read_model_config(directory),
        tokenizer_archive=archive,
        max_text_bytes=facts.max_model_len * longest,
    )


def _serve_metrics(config: VerifierConfig, engine: EngineClient) -> MetricsServer | None:
    engine.metrics.model_name = config.name
    if config.metrics_port is None:
        return None
    server = MetricsServer(config.metrics_host, config.metrics_port, engine.metrics)
    logger.info("metrics", url=f"http://{server.address}/metrics")
    return server


def _build_tracer(config: VerifierConfig, version: str) -> RequestTracer | None:
    endpoint = config.otlp_endpoint
    if endpoint is None:
        return None
    try:
        from verifier_svc.front.tracing import build_tracer
    except ImportError as error:
        expected = f"the extra otel to be installed, as in pip install 'outrider[otel]' ({error.name} is missing)"
        raise InvalidArgumentError("otlp_endpoint", endpoint, expected) from None
    return build_tracer(endpoint, config.name, version)


def _start_engine(command: tuple[str, ...]) -> tuple[subprocess.Popen[bytes], socket.socket]:
    ours, theirs = socket.socketpair()
    with theirs:
        arguments = [*command, str(theirs.fileno()), str(os.getpid())]
        return subprocess.Popen(arguments, pass_fds=[theirs.fileno()]), ours


async def _end(process: subprocess.Popen[bytes]) -> None:
    """The engine leaves after the step that runs; one that takes too long is killed."""
    try:
        await asyncio.to_thread(process.wait, _ENGINE_EXIT_S)
    except subprocess.TimeoutExpired:
        logger.warning("the engine does not end, and is killed", pid=process.pid)
        process.kill()
        await asyncio.to_thread(process.wait)


async def _first(*awaitables: object) -> None:
    """Until one of them is done; the others are cancelled, except tasks of the caller's."""
    tasks = [asyncio.ensure_future(awaitable) for awaitable in awaitables]  # type: ignore[arg-type]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task, awaitable in zip(tasks, awaitables, strict=True):
            if task is not awaitable:
                task.cancel()


class _Signals:
    """SIGTERM and SIGINT as an event of the running loop."""

    def __init__(self) -> None:
        self._event = asyncio.Event()
        if sys.platform != "win32":
            loop = asyncio.get_running_loop()
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(number, self._event.set)

    async def wait(self) -> None:
        await self._event.wait()

    def clear(self) -> None:
        self._event.clear()
