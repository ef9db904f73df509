"""One error tree for every process of Outrider.

Each class names the gRPC status it becomes on the wire (`status`, a name of `grpc.StatusCode`), so that a front maps
errors in one place and host-only code needs no gRPC. A message says what was wrong, what was expected, and the value.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import ClassVar


class OutriderError(Exception):
    """Base of all errors that Outrider raises on purpose."""

    status: ClassVar[str] = "INTERNAL"


class InvalidArgumentError(OutriderError, ValueError):
    """A value of a request or of the configuration is outside what is allowed.

    `field` is the name the caller used, `value` what was given, `expected` the limit in words.
    """

    status: ClassVar[str] = "INVALID_ARGUMENT"

    def __init__(self, field: str, value: object, expected: str) -> None:
        self.field = field
        self.value = value
        self.expected = expected
        super().__init__(f"{field} = {_shorten(value)}: expected {expected}")


class InvalidRequestError(OutriderError, ValueError):
    """A request is wrong in a way that the message says and no single field names."""

    status: ClassVar[str] = "INVALID_ARGUMENT"


class UnknownOptionError(OutriderError, TypeError):
    """An option that does not exist; the message names the nearest one that does."""

    status: ClassVar[str] = "INVALID_ARGUMENT"

    def __init__(self, name: str, known: Iterable[str]) -> None:
        self.name = name
        options = sorted(known)
        nearest = difflib.get_close_matches(name, options, n=1, cutoff=0.4)
        hint = f"did you mean {nearest[0]!r}?" if nearest else f"known options: {', '.join(options)}"
        super().__init__(f"unknown option {name!r}; {hint}")


class ModelLoadError(OutriderError):
    """A model directory cannot be served: a file is missing or broken, or the architecture is not supported."""

    status: ClassVar[str] = "FAILED_PRECONDITION"


class ResourceExhaustedError(OutriderError):
    """A bounded queue or pool is full; the caller may try again later."""

    status: ClassVar[str] = "RESOURCE_EXHAUSTED"


class EngineClosedError(OutriderError):
    """The engine has been closed, or its device worker has failed; no request can be served any more."""

    status: ClassVar[str] = "UNAVAILABLE"


class UnavailableError(OutriderError):
    """The service cannot take the request now: it loads, drains or has lost its engine. Another one may take it."""

    status: ClassVar[str] = "UNAVAILABLE"


class RequestTimeoutError(OutriderError):
    """A request took longer than the service allows, or than the caller was willing to wait."""

    status: ClassVar[str] = "DEADLINE_EXCEEDED"


class UnsupportedError(OutriderError):
    """A part of the interface that is not built."""

    status: ClassVar[str] = "UNIMPLEMENTED"


class UnauthenticatedError(OutriderError):
    """A call without a valid key."""

    status: ClassVar[str] = "UNAUTHENTICATED"


def _shorten(value: object, limit: int = 120) -> str:
    if isinstance(value, str) and len(value) > limit:  # the repr of a long text is not made to be thrown away
        return f"{value[:limit]!r}... ({len(value)} characters)"
    text = repr(value)
    return text if len(text) <= limit else f"{text[:limit]}... ({len(text)} characters)"
