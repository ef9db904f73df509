"""The error tree: a status for the wire, and messages with the name, the value and the limit."""

from __future__ import annotations

import pytest

from common import errors
from common.errors import InvalidArgumentError, OutriderError, UnknownOptionError

STATUS_OF = {
    "OutriderError": "INTERNAL",
    "InvalidArgumentError": "INVALID_ARGUMENT",
    "UnknownOptionError": "INVALID_ARGUMENT",
    "ModelLoadError": "FAILED_PRECONDITION",
    "ResourceExhaustedError": "RESOURCE_EXHAUSTED",
    "EngineClosedError": "UNAVAILABLE",
}
"""Of the errors that callers of the offline API meet."""

# Names of grpc.StatusCode; gRPC itself is not needed where no server runs.
STATUS_CODES = [
    "CANCELLED",
    "UNKNOWN",
    "INVALID_ARGUMENT",
    "DEADLINE_EXCEEDED",
    "NOT_FOUND",
    "ALREADY_EXISTS",
    "PERMISSION_DENIED",
    "RESOURCE_EXHAUSTED",
    "FAILED_PRECONDITION",
    "ABORTED",
    "OUT_OF_RANGE",
    "UNIMPLEMENTED",
    "INTERNAL",
    "UNAVAILABLE",
    "DATA_LOSS",
    "UNAUTHENTICATED",
]


def test_every_error_names_a_status_of_grpc() -> None:
    found = [value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, OutriderError)]
    assert len(found) >= len(STATUS_OF)
    for error_class in found:
        assert error_class.status in STATUS_CODES


@pytest.mark.parametrize("name", STATUS_OF)
def test_errors_of_the_offline_api(name: str) -> None:
    import outrider

    error_class = getattr(outrider, name)
    assert error_class is getattr(errors, name)
    assert error_class.status == STATUS_OF[name]


def test_invalid_argument() -> None:
    error = InvalidArgumentError("top_p", 2.0, "at most 1")
    assert str(error) == "top_p = 2.0: expected at most 1"
    assert (error.field, error.value, error.expected) == ("top_p", 2.0, "at most 1")
    assert isinstance(error, ValueError)


def test_long_values_are_cut() -> None:
    message = str(InvalidArgumentError("prompt", "x" * 100_000, "less"))
    assert len(message) < 250
    assert "(100000 characters)" in message
    assert message.endswith("expected less")


def test_unknown_option() -> None:
    assert str(UnknownOptionError("tmperature", ["top_p", "temperature"])).endswith("did you mean 'temperature'?")
    assert str(UnknownOptionError("zzz", ["top_p", "n"])) == "unknown option 'zzz'; known options: n, top_p"
    assert isinstance(UnknownOptionError("x", []), TypeError)
