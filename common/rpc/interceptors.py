"""What every gRPC server of ours does around a call: errors become statuses, and keys are checked."""

from __future__ import annotations

import asyncio
import hmac
import inspect
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio

from common.errors import InvalidRequestError, OutriderError, UnauthenticatedError
from common.logging import get_logger

# Probes have no keys.
OPEN_METHODS = ("/grpc.health.v1.Health/",)

if TYPE_CHECKING:  # grpc's classes take parameters in their stubs only
    _MethodHandler = grpc.RpcMethodHandler[Any, Any]
    _Continuation = Callable[[grpc.HandlerCallDetails], Awaitable[_MethodHandler | None]]
_Handler = Any  # grpc's generated type knows the fields of one of the four kinds of a handler only

logger = get_logger(__name__)


class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """Maps errors of a call to a status: ours to the one that their class names, all others to INTERNAL.

    A handler is `async def method(request, context)`, which returns the response or writes responses to the context,
    or an asynchronous generator. What a bug raises is logged with its traceback and shown to the caller by its type
    alone.
    """

    async def intercept_service(
        self, continuation: _Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> _MethodHandler | None:
        handler: _Handler = await continuation(handler_call_details)
        if handler is None or not _is_asynchronous(handler):
            return handler
        method = str(handler_call_details.method)
        if handler.unary_unary is not None:
            return _rebuilt(grpc.unary_unary_rpc_method_handler, handler, _guarded(method, handler.unary_unary))
        if handler.unary_stream is not None:
            return _rebuilt(grpc.unary_stream_rpc_method_handler, handler, _guard_stream(method, handler.unary_stream))
        if handler.stream_stream is not None:
            behaviour = _guard_stream(method, handler.stream_stream)
            return _rebuilt(grpc.stream_stream_rpc_method_handler, handler, behaviour)
        return handler


class BearerKeyInterceptor(grpc.aio.ServerInterceptor):
    """Refuses calls without `authorization: Bearer KEY` for one of the keys; health checks stay open.

    Args:
        keys: all that are valid; each is compared in constant time.
        open_methods: beginnings of method paths that need no key.
    """

    def __init__(self, keys: Sequence[str], open_methods: Collection[str] = OPEN_METHODS) -> None:
        self._keys = [key.encode() for key in keys]
        self._open_methods = tuple(open_methods)

    async def intercept_service(
        self, continuation: _Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> _MethodHandler | None:
        handler: _Handler = await continuation(handler_call_details)
        details: Any = handler_call_details
        if handler is None or str(details.method).startswith(self._open_methods):
            return handler
        if self._is_valid(details.invocation_metadata or ()):
            return handler
        return _rebuilt(_kind_of(handler), handler, _refuse)

    def _is_valid(self, metadata: Sequence[tuple[str, str | bytes]]) -> bool:
        for name, value in metadata:
            if name == "authorization":
                raw = value if isinstance(value, bytes) else value.encode()
                scheme, _, key = raw.partition(b" ")
                # Every key is compared, whether or not one before it was equal.
                equal = [hmac.compare_digest(key.strip(), known) for known in self._keys]
                return scheme.lower() == b"bearer" and any(equal)
        return False


def status_of(error: OutriderError) -> grpc.StatusCode:
    return grpc.StatusCode[error.status]


async def _refuse(_: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
    error = UnauthenticatedError("a key is needed: expected metadata 'authorization: Bearer KEY'")
    await context.abort(status_of(error), str(error))


@dataclass(frozen=True, slots=True)
class _Undecodable:
    """Stands for a message that is none of the type expected."""

    reason: str


def _lenient(deserializer: Callable[[bytes], Any] | None) -> Callable[[bytes], Any] | None:
    """gRPC would answer UNKNOWN to bytes that are no message, and log a traceback for each."""
    if deserializer is None:
        return None

    def deserialize(data: bytes) -> Any:
        try:
            return deserializer(data)
        except Exception as error:  # whatever the library of the messages raises
            return _Undecodable(str(error))

    return deserialize


def _guarded(method: str, behaviour: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    async def call(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        try:
            if isinstance(request, _Undecodable):
                raise InvalidRequestError(f"the request cannot be read: {request.reason}")
            return await behaviour(request, context)
        except OutriderError as error:
            await context.abort(status_of(error), str(error))
        except grpc.aio.AbortError:
            raise
        except grpc.aio.InternalError as error:  # an operation on the call failed: its caller has left
            logger.debug("a caller left", method=method, reason=str(error))
            raise asyncio.CancelledError from error  # what gRPC ends a call with when it sees the caller leave first
        except Exception as error:
            logger.exception("a call failed", method=method)
            await context.abort(grpc.StatusCode.INTERNAL, f"internal error: {type(error).__name__}")

    return call


def _guard_stream(method: str, behaviour: Callable[..., Any]) -> Callable[..., Any]:
    if not inspect.isasyncgenfunction(behaviour):
        return _guarded(method, behaviour)

    async def write_all(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        async for response in behaviour(request, context):
            await context.write(response)

    return _guarded(method, write_all)


def _is_asynchronous(handler: _Handler) -> bool:
    behaviour = handler.unary_unary or handler.unary_stream or handler.stream_unary or handler.stream_stream
    return inspect.iscoroutinefunction(behaviour) or inspect.isasyncgenfunction(behaviour)


def _kind_of(handler: _Handler) -> Callable[..., _MethodHandler]:
    return {
        (False, False): grpc.unary_unary_rpc_method_handler,
        (False, True): grpc.unary_stream_rpc_method_handler,
        (True, False): grpc.stream_unary_rpc_method_handler,
        (True, True): grpc.stream_stream_rpc_method_handler,
    }[handler.request_streaming, handler.response_streaming]


def _rebuilt(kind: Callable[..., _MethodHandler], handler: _Handler, behaviour: Callable[..., Any]) -> _MethodHandler:
    deserializer = handler.request_deserializer
    if not handler.request_streaming:
        deserializer = _lenient(deserializer)
    return kind(behaviour, deserializer, handler.response_serializer)
