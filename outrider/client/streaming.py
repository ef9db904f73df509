"""One output as it streams, over all the calls that it takes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any

import grpc.aio
from google.protobuf.message import DecodeError
from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from common.errors import OutriderError
from outrider.client.addresses import Address
from outrider.client.attempts import Deadline
from outrider.client.calls import Calls
from outrider.client.errors import BrokenStreamError
from outrider.client.generation import Generation
from verifier_svc.front.output_stream import OutputDelta

_END_TIMEOUT_S = 1.0

_Call = Any  # grpc.aio's call, whose types know nothing of the messages


@dataclass(slots=True, eq=False)
class Running:
    """A request that is being made, and what ends it early."""

    aborted: asyncio.Event = field(default_factory=asyncio.Event)
    calls: set[_Call] = field(default_factory=set[_Call])

    def abort(self) -> None:
        self.aborted.set()
        for call in self.calls:
            call.cancel()


async def stream_output(
    calls: Calls, generation: Generation, running: Running, deadline: Deadline, first: Address
) -> AsyncGenerator[OutputDelta, None]:
    """Call until the output is finished, and yield what each step adds. Closing it cancels the call.

    Args:
        calls: where to.
        generation: the output; holds what was received.
        running: ends it early, with the finish reason `abort`.
        deadline: of all calls together.
        first: takes the first call.

    Raises:
        OutriderError: it cannot be finished.
    """
    attempts = calls.attempts(deadline, first)
    while not generation.is_finished:
        if running.aborted.is_set():
            for delta in generation.abort():
                yield delta
            return
        num_received = generation.num_received
        plan = generation.next_call()
        pause = 0.0
        address = attempts.next_address()
        with calls.pool.call(address):
            call: _Call = calls.stub(address).Generate(
                plan.request, metadata=(*calls.metadata, *plan.metadata), timeout=deadline.remaining()
            )
            running.calls.add(call)
            try:
                is_checked = not plan.required
                while not generation.is_finished:
                    response = await _read(call)
                    if not is_checked:  # not before there is a message: a call that fails has no metadata
                        generation.check_answer(address.target, plan, dict(await call.initial_metadata()))
                        is_checked = True
                    for delta in generation.accept(response):
                        yield delta
                    if generation.num_received > num_received:
                        attempts.succeeded(address)
                        num_received = generation.num_received
                await _read_end(call, generation)
            except asyncio.CancelledError:
                if not running.aborted.is_set() or _is_cancelling():
                    raise
            except (grpc.aio.AioRpcError, BrokenStreamError) as failure:
                pause = attempts.failed(address, failure)
            finally:
                running.calls.discard(call)
                call.cancel()
        if pause:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(running.aborted.wait(), pause)


async def _read(call: _Call) -> pb.GenerateResponse:
    try:
        response = await call.read()
    except DecodeError:
        raise BrokenStreamError("a message that cannot be decoded") from None
    if not isinstance(response, pb.GenerateResponse):
        raise BrokenStreamError("the stream ended before the output did")
    return response


async def _read_end(call: _Call, generation: Generation) -> None:
    """A stop string ends the output here with its last token; the service's own end follows at once, if it looks for
    stop strings too. Taking it leaves the service with a request that finished, not with one that was cancelled."""
    with contextlib.suppress(grpc.aio.AioRpcError, BrokenStreamError, OutriderError, TimeoutError):
        async with asyncio.timeout(_END_TIMEOUT_S):
            response = await _read(call)
            if response.HasField("complete"):
                generation.accept(response)
                await _read(call)


def _is_cancelling() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
