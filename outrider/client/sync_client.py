"""The synchronous client: the asynchronous one on an event loop in a thread of its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Generator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from tokenizers import Tokenizer

from common.errors import UnavailableError
from common.sampling_params import SamplingParams
from outrider.client.addresses import Address
from outrider.client.async_client import (
    DEFAULT_KEEPALIVE_S,
    DEFAULT_MAX_RETRIES,
    DEFAULT_TIMEOUT_S,
    AsyncClient,
)
from outrider.client.info import Health, Load, ModelInfo, ServerInfo
from outrider.outputs import RequestOutput
from verifier_svc.front.output_stream import OutputDelta

_END_TIMEOUT_S = 1.0

_T = TypeVar("_T")


class Client:
    """`AsyncClient` for code without an event loop; any number of threads may use one at the same time.

    Arguments, methods and errors are those of `AsyncClient`.
    """

    def __init__(
        self,
        addresses: str | Sequence[str],
        *,
        api_key: str | None = None,
        tls_ca: str | Path | None = None,
        tls_cert: str | Path | None = None,
        tls_key: str | Path | None = None,
        timeout: float | None = DEFAULT_TIMEOUT_S,
        max_retries: int = DEFAULT_MAX_RETRIES,
        keepalive_s: float = DEFAULT_KEEPALIVE_S,
    ) -> None:
        self._client = AsyncClient(
            addresses,
            api_key=api_key,
            tls_ca=tls_ca,
            tls_cert=tls_cert,
            tls_key=tls_key,
            timeout=timeout,
            max_retries=max_retries,
            keepalive_s=keepalive_s,
        )
        self._loop = _LoopThread()

    @property
    def addresses(self) -> tuple[Address, ...]:
        """The addresses, with what the client has counted of each."""
        return self._client.addresses

    def generate(
        self,
        prompt: str | Sequence[int],
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        timeout: float | None = None,
    ) -> RequestOutput:
        """All outputs of a prompt, when they are complete."""
        return self._loop.run(self._client.generate(prompt, sampling_params, request_id=request_id, timeout=timeout))

    def stream(
        self,
        prompt: str | Sequence[int],
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        timeout: float | None = None,
    ) -> Generator[OutputDelta, None, None]:
        """What each step adds to one output. Closing the iterator cancels the request."""
        deltas = self._client.stream(prompt, sampling_params, request_id=request_id, timeout=timeout)
        try:
            while (delta := self._loop.run(_next(deltas))) is not None:
                yield delta
        finally:
            if self._loop.is_running:
                self._loop.run(deltas.aclose())

    def abort(self, request_id: str) -> None:
        """End a request with what it has."""
        self._loop.run(self._client.abort(request_id))

    def health(self) -> dict[str, Health]:
        """Of every address; one that does not answer is not healthy."""
        return self._loop.run(self._client.health())

    def model_info(self, address: str | None = None) -> ModelInfo:
        """What `address` serves; None: any that answers."""
        return self._loop.run(self._client.model_info(address))

    def server_info(self, address: str | None = None) -> ServerInfo:
        """How `address` runs; None: any that answers."""
        return self._loop.run(self._client.server_info(address))

    def loads(self, address: str | None = None) -> list[Load]:
        """The load of each rank of `address`; None: of any that answers."""
        return self._loop.run(self._client.loads(address))

    def tokenizer(self, address: str | None = None) -> Tokenizer | None:
        """The tokenizer of `address`; None: of any. A service of token ids has none."""
        return self._loop.run(self._client.tokenizer(address))

    def close(self) -> None:
        """Close all connections. Requests that still run end as by `abort`. May be called again."""
        if self._loop.is_running:
            self._loop.run(self._close())
        self._loop.stop()

    async def _close(self) -> None:
        await self._client.close()
        # Other threads still wait for what was aborted just now.
        others = asyncio.all_tasks() - {asyncio.current_task()}
        if others:
            await asyncio.wait(others, timeout=_END_TIMEOUT_S)

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


async def _next(deltas: Any) -> OutputDelta | None:
    """The end as a value: StopAsyncIteration does not pass through a future."""
    return await anext(deltas, None)


class _LoopThread:
    """An event loop that runs until it is stopped. The thread is started with the first call."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._stopped = False

    @property
    def is_running(self) -> bool:
        return self._loop is not None and not self._stopped

    def run(self, work: Coroutine[Any, Any, _T]) -> _T:
        """The result of `work`. Whatever interrupts the wait cancels it."""
        try:
            loop = self._started()
        except UnavailableError:
            work.close()
            raise
        future = asyncio.run_coroutine_threadsafe(work, loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def stop(self) -> None:
        with self._lock:
            loop, thread, self._stopped = self._loop, self._thread, True
            self._loop = None
        if loop is not None and thread is not None and thread is not threading.current_thread():
            loop.call_soon_threadsafe(loop.stop)
            thread.join()

    def _started(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._stopped:
                raise UnavailableError("the client has been closed")
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(
                    target=_run_loop, args=(self._loop,), name="outrider-client", daemon=True
                )
                self._thread.start()
            return self._loop


def _run_loop(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
        pending = asyncio.all_tasks(loop)
        for task in pending:
            task.cancel()
        loop.run_until_complete(asyncio.gather(*pending, return_exceptions=True))
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.run_until_complete(loop.shutdown_default_executor())
    finally:
        loop.close()
