"""The asynchronous client: one or more verifiers behind one object."""

from __future__ import annotations

import asyncio
import secrets
import uuid
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

from smg_grpc_proto.generated import vllm_engine_pb2 as pb
from tokenizers import Tokenizer

from common.errors import InvalidArgumentError, OutriderError
from common.sampling_params import SamplingParams
from outrider.client.addresses import Address, AddressPool, parse_addresses
from outrider.client.attempts import Deadline
from outrider.client.calls import Calls
from outrider.client.channels import ChannelOptions, Channels
from outrider.client.generation import Generation
from outrider.client.info import Health, Load, ModelInfo, ServerInfo, to_loads, to_model_info, to_server_info
from outrider.client.models import Models
from outrider.client.results import build_output
from outrider.client.streaming import Running, stream_output
from outrider.outputs import RequestOutput
from verifier_svc.front.admission import build_requests
from verifier_svc.front.output_stream import OutputDelta

DEFAULT_TIMEOUT_S = 600.0
DEFAULT_MAX_RETRIES = 5
DEFAULT_KEEPALIVE_S = 10.0
MAX_REQUEST_ID_LENGTH = 200
"""The service allows 256; each output and attempt adds to it."""

_INFO_TIMEOUT_S = 10.0


class AsyncClient:
    """Generates with one or more verifiers that serve the same model. Belongs to one event loop.

    A call that fails before its first token is tried again, at another address first. One that fails later goes on at
    another address, behind the tokens it has: the caller sees the same tokens as without the failure.

    Args:
        addresses: HOST:PORT or unix:PATH, `grpcs://` for TLS; several in a list or with commas between them. A name
            that stands for several hosts is resolved again when one is lost.
        api_key: sent as a bearer key.
        tls_ca: PEM file with the certificates to trust; turns TLS on.
        tls_cert: PEM file of this client's certificate, for mutual TLS.
        tls_key: PEM file of its key.
        timeout: seconds that a call may take, with all its attempts; None: for ever.
        max_retries: attempts that may fail in a row, after the first, before the caller hears of it.
        keepalive_s: an address that is silent for this long during a call is asked for a sign of life.

    Raises:
        InvalidArgumentError: an address, a file or a number is wrong.
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
        _check_seconds("timeout", timeout)
        _check_seconds("keepalive_s", keepalive_s)
        if max_retries < 0:
            raise InvalidArgumentError("max_retries", max_retries, "at least 0")
        channels = Channels(ChannelOptions(api_key, tls_ca, tls_cert, tls_key, keepalive_s))
        self._pool = AddressPool(parse_addresses(addresses))
        self._calls = Calls(self._pool, channels, max_retries)
        self._models = Models(self._calls)
        self._timeout = timeout
        self._running: dict[str, Running] = {}  # by request id

    @property
    def addresses(self) -> tuple[Address, ...]:
        """The addresses, with what the client has counted of each."""
        return tuple(self._pool.addresses)

    # -- generation ----------------------------------------------------------------------------------------------

    async def generate(
        self,
        prompt: str | Sequence[int],
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        timeout: float | None = None,
    ) -> RequestOutput:
        """All outputs of a prompt, when they are complete. Cancelling the task cancels the request.

        Args:
            prompt: text or token ids.
            sampling_params: None: the defaults. Without a seed one is drawn here.
            request_id: for `abort` and for the logs; None: one is made up.
            timeout: seconds; None: that of the client.

        Raises:
            InvalidArgumentError: the prompt or a parameter is out of range.
            RequestTimeoutError: it took too long.
            UnavailableError: no address took it, with all retries.
            ResourceExhaustedError: the same, since they are full.
            ResumeError: it was cut off, and no other address goes on exactly as it began.
        """
        deadline = self._deadline(timeout)
        with self._run(request_id) as (request_id, running):
            first, generations = await self._prepare(request_id, prompt, sampling_params, deadline)
            # Each output is a call of its own, so that each can be resumed by itself.
            tasks = [
                asyncio.create_task(self._finish(generation, running, deadline, first)) for generation in generations
            ]
            try:
                await asyncio.gather(*tasks)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
        return build_output(request_id, prompt if isinstance(prompt, str) else None, generations)

    async def stream(
        self,
        prompt: str | Sequence[int],
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        timeout: float | None = None,
    ) -> AsyncGenerator[OutputDelta, None]:
        """What each step adds to one output. Closing the iterator, or cancelling its task, cancels the request.

        Arguments and errors are those of `generate`; `n` has to be 1.
        """
        if sampling_params is not None and sampling_params.n != 1:
            raise InvalidArgumentError("n", sampling_params.n, "1, when streaming")
        deadline = self._deadline(timeout)
        with self._run(request_id) as (request_id, running):
            first, (generation,) = await self._prepare(request_id, prompt, sampling_params, deadline)
            async with aclosing(stream_output(self._calls, generation, running, deadline, first)) as deltas:
                async for delta in deltas:
                    yield delta

    async def abort(self, request_id: str) -> None:
        """End a request with what it has: its outputs get the finish reason `abort`.

        One that this client does not run is ended at every address that can be reached, by its id there.
        """
        running = self._running.get(request_id)
        if running is not None:
            running.abort()
            return
        message = pb.AbortRequest(request_ids=[request_id])
        await self._ask_all(lambda stub: stub.Abort, message)

    async def _finish(self, generation: Generation, running: Running, deadline: Deadline, first: Address) -> None:
        async for _ in stream_output(self._calls, generation, running, deadline, first):
            pass

    async def _prepare(
        self, request_id: str, prompt: str | Sequence[int], params: SamplingParams | None, deadline: Deadline
    ) -> tuple[Address, list[Generation]]:
        """What to generate, and the address whose model it was checked against."""
        params = SamplingParams() if params is None else params
        if params.bad_words or params.bad_words_token_ids:
            field = "bad_words" if params.bad_words else "bad_words_token_ids"
            raise InvalidArgumentError(field, getattr(params, field), "none: the protocol has no field for them")
        if params.seed is None:
            # Drawn here, since an output can be resumed only with a seed that is known.
            params = params.model_copy(update={"seed": secrets.randbits(31)})
        address, model = await self._models.pick(deadline)
        if isinstance(prompt, str):
            token_ids: Sequence[int] = model.tokenize(prompt)
        elif isinstance(prompt, Sequence) and not isinstance(prompt, bytes | bytearray):
            token_ids = prompt
        else:
            raise InvalidArgumentError("prompt", prompt, "text or a list of token ids")
        requests = build_requests(request_id, token_ids, params, model)
        return address, [Generation(request, model.tokenizer, index) for index, request in enumerate(requests)]

    @contextmanager
    def _run(self, request_id: str | None) -> Iterator[tuple[str, Running]]:
        if request_id is None:
            request_id = f"client-{uuid.uuid4().hex}"
        if not 1 <= len(request_id) <= MAX_REQUEST_ID_LENGTH:
            raise InvalidArgumentError("request_id", request_id, f"1 to {MAX_REQUEST_ID_LENGTH} characters")
        if request_id in self._running:
            raise InvalidArgumentError("request_id", request_id, "an id that no running request has")
        running = self._running[request_id] = Running()
        try:
            yield request_id, running
        finally:
            del self._running[request_id]

    # -- information ---------------------------------------------------------------------------------------------

    async def health(self) -> dict[str, Health]:
        """Of every address; one that does not answer is not healthy."""
        answers = await self._ask_all(lambda stub: stub.HealthCheck, pb.HealthCheckRequest())
        return {
            target: Health(False, str(answer))
            if isinstance(answer, OutriderError)
            else Health(answer.healthy, answer.message)
            for target, answer in answers.items()
        }

    async def model_info(self, address: str | None = None) -> ModelInfo:
        """What `address` serves; None: any that answers."""
        return to_model_info(await self._ask(lambda stub: stub.GetModelInfo, pb.GetModelInfoRequest(), address))

    async def server_info(self, address: str | None = None) -> ServerInfo:
        """How `address` runs; None: any that answers."""
        return to_server_info(await self._ask(lambda stub: stub.GetServerInfo, pb.GetServerInfoRequest(), address))

    async def loads(self, address: str | None = None) -> list[Load]:
        """The load of each rank of `address`; None: of any that answers."""
        return to_loads(await self._ask(lambda stub: stub.GetLoads, pb.GetLoadsRequest(), address))

    async def tokenizer(self, address: str | None = None) -> Tokenizer | None:
        """The tokenizer of `address`; None: of any. A service of token ids has none."""
        _, model = await self._models.pick(self._deadline(None), self._find(address))
        return model.tokenizer

    async def _ask(self, method: Any, message: Any, address: str | None) -> Any:
        return await self._calls.unary(method, message, self._info_deadline(), self._find(address))

    async def _ask_all(self, method: Any, message: Any) -> dict[str, Any]:
        """Each address once: its answer, or the error."""

        async def ask(address: Address) -> Any:
            try:
                return await self._calls.unary(method, message, self._info_deadline(), address, max_retries=0)
            except OutriderError as error:
                return error

        answers = await asyncio.gather(*(ask(address) for address in self._pool.addresses))
        return {address.target: answer for address, answer in zip(self._pool.addresses, answers, strict=True)}

    def _find(self, address: str | None) -> Address | None:
        return None if address is None else self._pool.find(address)

    def _deadline(self, timeout: float | None) -> Deadline:
        _check_seconds("timeout", timeout)
        return Deadline.after(self._timeout if timeout is None else timeout)

    def _info_deadline(self) -> Deadline:
        return Deadline.after(_INFO_TIMEOUT_S if self._timeout is None else min(_INFO_TIMEOUT_S, self._timeout))

    # -- life ----------------------------------------------------------------------------------------------------

    async def close(self) -> None:
        """Close all connections. Requests that still run end as by `abort`."""
        for running in list(self._running.values()):
            running.abort()
        await self._calls.close()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()


def _check_seconds(field: str, value: float | None) -> None:
    if value is not None and not value > 0:
        raise InvalidArgumentError(field, value, "seconds above 0")
