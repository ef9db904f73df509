"""From a gRPC status to Outrider's errors, and which of them another attempt can cure."""

from __future__ import annotations

from typing import ClassVar

import grpc
import grpc.aio

from common.errors import (
    InvalidArgumentError,
    OutriderError,
    RequestTimeoutError,
    ResourceExhaustedError,
    UnauthenticatedError,
    UnavailableError,
    UnsupportedError,
)


class ServiceError(OutriderError):
    """The service failed with a status that no other class stands for; the message begins with its name."""


class RefusedRequestError(InvalidArgumentError):
    """The service refused a request as wrong; the message is the service's."""

    def __init__(self, message: str) -> None:
        self.field = "request"
        self.value = None
        self.expected = message
        Exception.__init__(self, message)


class ResumeError(OutriderError):
    """An output was cut off and cannot be continued exactly; what was delivered before is right."""

    status: ClassVar[str] = "DATA_LOSS"


class BrokenStreamError(Exception):
    """A service sent what the protocol does not allow, or ended a stream too early. Never reaches a caller."""


_PLAIN: dict[grpc.StatusCode, type[OutriderError]] = {
    grpc.StatusCode.UNAVAILABLE: UnavailableError,
    grpc.StatusCode.RESOURCE_EXHAUSTED: ResourceExhaustedError,
    grpc.StatusCode.DEADLINE_EXCEEDED: RequestTimeoutError,
    grpc.StatusCode.UNIMPLEMENTED: UnsupportedError,
    grpc.StatusCode.UNAUTHENTICATED: UnauthenticatedError,
    grpc.StatusCode.PERMISSION_DENIED: UnauthenticatedError,
    grpc.StatusCode.INVALID_ARGUMENT: RefusedRequestError,
    grpc.StatusCode.OUT_OF_RANGE: RefusedRequestError,
}


def to_error(address: str, failure: grpc.aio.AioRpcError | BrokenStreamError) -> OutriderError:
    """What a caller sees of a failed call."""
    if isinstance(failure, BrokenStreamError):
        return UnavailableError(f"{address}: {failure}")
    code = failure.code()
    details = failure.details() or "no details"
    kind = _PLAIN.get(code)
    return ServiceError(f"{address}: {code.name}: {details}") if kind is None else kind(f"{address}: {details}")


def is_transient(failure: grpc.aio.AioRpcError | BrokenStreamError) -> bool:
    """Whether the same call may succeed elsewhere, or here a little later."""
    return is_connection_failure(failure) or (
        isinstance(failure, grpc.aio.AioRpcError) and failure.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    )


def is_connection_failure(failure: grpc.aio.AioRpcError | BrokenStreamError) -> bool:
    """Whether it speaks against the address, rather than against the request or the load."""
    if isinstance(failure, BrokenStreamError):
        return True
    code = failure.code()
    # A stream that the other end resets shows as CANCELLED, UNKNOWN or INTERNAL, by the code of the reset. A call that
    # this end has cancelled never comes here.
    if code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED):
        return True
    details = failure.details() or ""
    is_reset = "RST_STREAM" in details or "Stream removed" in details
    return is_reset and code in (grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL)
