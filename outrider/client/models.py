"""What the addresses serve: asked once for each, with the tokenizer."""

from __future__ import annotations

import asyncio

import grpc
import grpc.aio
from smg_grpc_proto.generated import common_pb2
from smg_grpc_proto.generated import vllm_engine_pb2 as pb
from tokenizers import Tokenizer

from common.config import MAX_SPECULATIVE_TOKENS
from outrider.client.addresses import Address
from outrider.client.attempts import Deadline
from outrider.client.calls import Calls
from outrider.client.errors import ServiceError
from outrider.client.tokenizer_archive import MAX_ARCHIVE_BYTES, check_archive, read_tokenizer
from verifier_svc.front.admission import ServedModel


class Models:
    """Models by address."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self._known: dict[str, ServedModel] = {}  # by target

    async def pick(self, deadline: Deadline, only: Address | None = None) -> tuple[Address, ServedModel]:
        """The address for the next request, and what it serves.

        Raises:
            OutriderError: no address can be asked.
        """
        address = only or self._calls.pool.pick()
        model = self._known.get(address.target)
        if model is not None:
            return address, model

        async def ask(address: Address) -> tuple[Address, ServedModel]:
            model = self._known.get(address.target) or await self._fetch(address, deadline)
            self._known[address.target] = model
            return address, model

        return await self._calls.retry(ask, deadline, only, first=address)

    async def _fetch(self, address: Address, deadline: Deadline) -> ServedModel:
        info = await self._calls.stub(address).GetModelInfo(
            pb.GetModelInfoRequest(), metadata=self._calls.metadata, timeout=deadline.remaining()
        )
        if info.vocab_size < 1 or info.max_context_length < 2:
            raise ServiceError(f"{address.target} does not say which vocabulary and context length it serves")
        return ServedModel(
            vocab_size=info.vocab_size,
            max_model_len=info.max_context_length,
            eos_token_ids=tuple(token for token in info.eos_token_ids if token >= 0),
            num_speculative_tokens=MAX_SPECULATIVE_TOKENS,
            tokenizer=await self._fetch_tokenizer(address, deadline),
        )

    async def _fetch_tokenizer(self, address: Address, deadline: Deadline) -> Tokenizer | None:
        """None: the service has none."""
        call = self._calls.stub(address).GetTokenizer(
            common_pb2.GetTokenizerRequest(), metadata=self._calls.metadata, timeout=deadline.remaining()
        )
        archive = bytearray()
        sha256 = ""
        try:
            while isinstance(chunk := await call.read(), common_pb2.GetTokenizerChunk):
                archive += chunk.data
                sha256 = chunk.sha256
                if len(archive) > MAX_ARCHIVE_BYTES:
                    raise ServiceError(f"the tokenizer of {address.target} has more than {MAX_ARCHIVE_BYTES} bytes")
        except grpc.aio.AioRpcError as error:
            if error.code() in (grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.NOT_FOUND):
                return None
            raise
        finally:
            call.cancel()
        data = bytes(archive)
        check_archive(data, sha256)
        return await asyncio.to_thread(read_tokenizer, data)
