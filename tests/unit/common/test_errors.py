"""The error tree: a status for the wire, and messages with the name, the value and the limit."""

from __future__ import annotations

import pytest

from common import errors
from common.errors import InvalidArgumentError, OutriderError, UnknownOptionError

# Names of grpc.StatusCode; gRPC itself is no dependency of what runs without a server.
STATUS_CODES = {
    "INVALID_ARGUMENT": {"InvalidArgumentError", "UnknownOptionError"},
    "FAILED_PRECONDITION": {"ModelLoadError"},
    "RESOURCE_EXHAUSTED": {"ResourceExhaustedError"},
    "UNAVAILABLE": {"EngineClosedError"},
    "INTERNAL": {"OutriderError"},
}


def error_classes() -> list[type[OutriderError]]:
    found = (value for value in vars(errors).values() if isinstance(value, type))
    return [value for value in found if issubclass(value, OutriderError)]


@pytest.mark.parametrize("error_class", error_classes())
def test_every_error_has_a_status(error_class: type[OutriderError]) -> None:
    assert error_class.__name__ in STATUS_CODES[error_class.status]


def test_every_error_is_exported() -> None:
    import outrider

    for error_class in error_classes():
        assert getattr(outrider, error_class.__name__) is error_class


def test_invalid_argument() -> None:
    error = InvalidArgumentError("top_p", 2.0, "at most 1")
    assert str(error) == "top_p = 2.0: expected at most 1"
    assert (error.field, error.value, error.expected) == ("top_p", 2.0, "at most 1")
    assert isinstance(error, ValueError)


def test_long_values_are_cut() -> None:
    message = str(InvalidArgumentError("prompt", "x" * 100_000, "less"))
    assert len(message) < 250
    assert "(100002 characters)" in message
    assert message.endswith("expected less")


def test_unknown_option() -> None:
    assert str(UnknownOptionError("tmperature", ["top_p", "temperature"])).endswith("did you mean 'temperature'?")
    assert str(UnknownOptionError("zzz", ["top_p", "n"])) == "unknown option 'zzz'; known options: n, top_p"
    assert isinstance(UnknownOptionError("x", []), TypeError)
