"""A call that fails by a bug: one record, with the id that the call was bound to and a traceback without its values.
A call whose caller leaves while it is written to: none."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
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


@asynccontextmanager
async def serving(handler: Any) -> AsyncIterator[grpc.aio.Channel]:
    """A channel to a server whose method /test.Test/Call is the handler."""
    server = build_server(ServerLimits())
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Test", {"Call": handler}),))
    port = listen_tcp(server, "127.0.0.1", 0)
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield channel
    finally:
        await server.stop(None)


async def call_twice() -> list[grpc.StatusCode]:
    async with serving(grpc.unary_unary_rpc_method_handler(fail)) as channel:
        call = channel.unary_unary("/test.Test/Call")
        answers = await asyncio.gather(call(b"one"), call(b"two"), return_exceptions=True)
    return [answer.code() for answer in answers if isinstance(answer, grpc.aio.AioRpcError)]


async def leave(ended: asyncio.Event, handler: Any) -> None:
    """Cancel a stream after its first message, and wait until its handler has ended."""
    async with serving(handler) as channel:
        call = channel.unary_stream("/test.Test/Call")(b"one")
        assert await call.read() == b"first"
        call.cancel()
        await asyncio.wait_for(ended.wait(), 10)


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


@pytest.mark.parametrize("is_generator", [False, True])
def test_a_write_to_a_caller_that_has_left_is_no_failure(stream: io.StringIO, is_generator: bool) -> None:
    ended = asyncio.Event()

    async def write(request: bytes, context: Any) -> None:
        try:
            await context.write(b"first")
            with contextlib.suppress(asyncio.CancelledError):  # the write comes first: under load it does so by itself
                await asyncio.sleep(10)
            await context.write(b"late")
        finally:
            ended.set()

    async def generate(request: bytes, context: Any) -> AsyncIterator[bytes]:
        try:
            yield b"first"
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(10)
            yield b"late"
        finally:
            ended.set()

    asyncio.run(leave(ended, grpc.unary_stream_rpc_method_handler(generate if is_generator else write)))
    assert stream.getvalue() == ""
