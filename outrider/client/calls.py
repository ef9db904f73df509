"""Calls to the addresses of a client, with retries."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import grpc.aio
from smg_grpc_proto.generated import vllm_engine_pb2_grpc

from common.errors import UnavailableError
from outrider.client.addresses import Address, AddressPool
from outrider.client.attempts import Attempts, Deadline
from outrider.client.channels import Channels

Stub = Any  # the generated stub has no types

_T = TypeVar("_T")


class Calls:
    """Where calls go and what they carry.

    Args:
        pool: the addresses.
        channels: to reach them.
        max_retries: attempts after the first.
    """

    def __init__(self, pool: AddressPool, channels: Channels, max_retries: int) -> None:
        self.pool = pool
        self._channels = channels
        self._max_retries = max_retries
        self._closed = False

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Of every call."""
        return self._channels.metadata

    def stub(self, address: Address) -> Stub:
        if self._closed:
            raise UnavailableError("the client has been closed")
        return vllm_engine_pb2_grpc.VllmEngineStub(self._channels.get(address))

    def attempts(self, deadline: Deadline, first: Address) -> Attempts:
        return Attempts(self.pool, self._max_retries, deadline, first=first)

    async def unary(
        self,
        method: Callable[[Stub], Callable[..., Awaitable[Any]]],
        message: Any,
        deadline: Deadline,
        only: Address | None = None,
        max_retries: int | None = None,
    ) -> Any:
        """The answer of `only`, or of any address."""

        async def ask(address: Address) -> Any:
            call = method(self.stub(address))
            return await call(message, metadata=self.metadata, timeout=deadline.remaining())

        return await self.retry(ask, deadline, only, max_retries)

    async def retry(
        self,
        work: Callable[[Address], Awaitable[_T]],
        deadline: Deadline,
        only: Address | None = None,
        max_retries: int | None = None,
        first: Address | None = None,
    ) -> _T:
        """Do `work` at one address after the other, beginning with `first`, until it succeeds.

        Raises:
            OutriderError: it cannot, or has failed too often.
        """
        max_retries = self._max_retries if max_retries is None else max_retries
        attempts = Attempts(self.pool, max_retries, deadline, only, first)
        while True:
            address = attempts.next_address()
            try:
                with self.pool.call(address):
                    result = await work(address)
            except grpc.aio.AioRpcError as failure:
                pause = attempts.failed(address, failure)
            else:
                attempts.succeeded(address)
                return result
            await asyncio.sleep(pause)

    async def close(self) -> None:
        self._closed = True
        await self._channels.close()
