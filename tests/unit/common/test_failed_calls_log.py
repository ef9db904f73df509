"""A call that fails by a bug: one record, with the id that the call was bound to and a traceback without its values."""

from __future__ import annotations

import asyncio
import io
import json
import logging
from collections.abc import Iterator
from typing import Any

import grpc
import grpc.aio
import pytest
import structlog

from common.logging import configure_logging
from common.rpc.server import ServerLimits, build_server, listen_tcp

PROMPT = "a prompt that belongs in no log"


@pytest.fixture
def stream() -> Iterator[io.StringIO]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    stream = io.StringIO()
    configure_logging(fmt="json", stream=stream)
    yield stream
    root.handlers[:] = handlers
    root.setLevel(level)
    structlog.reset_defaults()


async def fail(request: bytes, context: Any) -> bytes:
    structlog.contextvars.bind_contextvars(request_id=request.decode())
    await asyncio.sleep(0.05)  # the other call binds its own id meanwhile
    prompt = PROMPT
    raise RuntimeError(f"a bug with {len(prompt)} characters")


async def call_twice() -> list[grpc.StatusCode]:
    server = build_server(ServerLimits())
    handler = grpc.unary_unary_rpc_method_handler(fail)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Test", {"Fail": handler}),))
    port = listen_tcp(server, "127.0.0.1", 0)
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            call = channel.unary_unary("/test.Test/Fail")
            answers = await asyncio.gather(call(b"one"), call(b"two"), return_exceptions=True)
    finally:
        await server.stop(None)
    return [answer.code() for answer in answers if isinstance(answer, grpc.aio.AioRpcError)]


def test_a_bug_is_logged_with_the_id_of_its_call_and_without_its_prompt(stream: io.StringIO) -> None:
    codes = asyncio.run(call_twice())
    assert codes == [grpc.StatusCode.INTERNAL] * 2
    records = [json.loads(line) for line in stream.getvalue().splitlines()]
    failures = [record for record in records if record["event"] == "a call failed"]
    assert sorted(record["request_id"] for record in failures) == ["one", "two"]
    for record in failures:
        assert record["level"] == "error"
        assert record["exception"][0]["exc_type"] == "RuntimeError"
        assert record["exception"][0]["frames"]
    assert PROMPT not in stream.getvalue()
