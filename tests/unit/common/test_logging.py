"""`common.logging`: both formats, levels, the standard library's records, exceptions."""

import errno
import io
import json
import logging
import subprocess
import sys
from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path

import pytest
import structlog

from common.errors import InvalidArgumentError
from common.logging import configure_logging, get_logger

ROOT = Path(__file__).resolve().parents[3]


class Terminal(io.StringIO):
    """A stream that says that it is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def _restore_logging() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    structlog.reset_defaults()


def json_records(stream: io.StringIO) -> list[dict[str, object]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_json_record_has_event_level_logger_time_and_fields() -> None:
    stream = io.StringIO()
    configure_logging(fmt="json", stream=stream)
    get_logger("verifier").info("request finished", request_id="r1", num_tokens=7)
    [record] = json_records(stream)
    timestamp = datetime.fromisoformat(str(record.pop("timestamp")))
    assert timestamp.utcoffset() == timedelta(0)
    assert record == {
        "event": "request finished",
        "level": "info",
        "logger": "verifier",
        "request_id": "r1",
        "num_tokens": 7,
    }


def test_value_that_json_cannot_express_becomes_its_repr() -> None:
    stream = io.StringIO()
    configure_logging(fmt="json", stream=stream)
    get_logger("x").info("odd", value={1, 2}, data=b"\x00")
    [record] = json_records(stream)
    assert (record["value"], record["data"]) == ("{1, 2}", "b'\\x00'")


def test_auto_is_coloured_console_on_a_terminal_and_json_elsewhere() -> None:
    terminal, pipe = Terminal(), io.StringIO()
    configure_logging(stream=terminal)
    get_logger("x").info("hello", num_rows=3)
    assert "\x1b[" in terminal.getvalue()
    assert "hello" in terminal.getvalue()
    configure_logging(stream=pipe)
    get_logger("x").info("hello", num_rows=3)
    assert json_records(pipe)[0]["num_rows"] == 3
    assert terminal.getvalue().count("hello") == 1


def test_console_has_no_colours_on_a_pipe() -> None:
    stream = io.StringIO()
    configure_logging(fmt="console", stream=stream)
    get_logger("x").warning("hello", num_rows=3)
    assert "\x1b[" not in stream.getvalue()
    assert "num_rows=3" in stream.getvalue()


def test_standard_error_is_the_default(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging()
    get_logger("x").info("hello")
    captured = capsys.readouterr()
    assert captured.out == ""
    assert json.loads(captured.err)["event"] == "hello"


@pytest.mark.parametrize(
    ("level", "expected"),
    [
        ("debug", ["debug", "info", "warning", "error", "critical"]),
        ("warning", ["warning", "error", "critical"]),
        ("critical", ["critical"]),
    ],
)
def test_records_below_the_level_are_dropped(level: str, expected: list[str]) -> None:
    stream = io.StringIO()
    configure_logging(level=level, fmt="json", stream=stream)
    for name in ("debug", "info", "warning", "error", "critical"):
        getattr(get_logger("x"), name)("ours")
        getattr(logging.getLogger("theirs"), name)("theirs")
    records = json_records(stream)
    for event in ("ours", "theirs"):
        assert [record["level"] for record in records if record["event"] == event] == expected


def test_logger_in_use_follows_a_later_configuration() -> None:
    logger, first, second = get_logger("x"), io.StringIO(), io.StringIO()
    configure_logging(level="error", fmt="json", stream=first)
    logger.info("one")
    configure_logging(level="info", fmt="json", stream=second)
    logger.info("two")
    assert first.getvalue() == ""
    assert [record["event"] for record in json_records(second)] == ["two"]


def test_standard_library_record_has_the_same_shape() -> None:
    stream = io.StringIO()
    configure_logging(fmt="json", stream=stream)
    logging.getLogger("theirs").warning("%d of %d", 1, 2, extra={"port": 9})
    [record] = json_records(stream)
    assert datetime.fromisoformat(str(record.pop("timestamp"))).utcoffset() == timedelta(0)
    assert record == {"event": "1 of 2", "level": "warning", "logger": "theirs", "port": 9}


def test_what_another_handler_formats_is_no_field() -> None:
    stream, other = io.StringIO(), logging.StreamHandler(io.StringIO())
    other.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    logging.getLogger().addHandler(other)
    configure_logging(fmt="json", stream=stream)
    logging.getLogger("theirs").warning("hello")
    assert json_records(stream)[0].keys() == {"event", "level", "logger", "timestamp"}


def test_bound_context_reaches_records_of_both_kinds() -> None:
    stream = io.StringIO()
    configure_logging(fmt="json", stream=stream)
    with structlog.contextvars.bound_contextvars(request_id="r1"):
        get_logger("ours").info("one")
        logging.getLogger("theirs").info("two")
    get_logger("ours").info("three")
    assert [record.get("request_id") for record in json_records(stream)] == ["r1", "r1", None]


@pytest.mark.parametrize("logger", [get_logger("ours"), logging.getLogger("theirs")], ids=["ours", "theirs"])
def test_json_exception_is_a_structured_field_without_locals(logger: logging.Logger) -> None:
    stream = io.StringIO()
    configure_logging(fmt="json", stream=stream)
    secret_prompt = "do not log me"
    try:
        try:
            raise KeyError("cause")
        except KeyError as cause:
            raise RuntimeError(f"{len(secret_prompt)} tokens") from cause
    except RuntimeError:
        logger.exception("step failed")
    assert stream.getvalue().count("\n") == 1
    assert secret_prompt not in stream.getvalue()
    [record] = json_records(stream)
    assert (record["event"], record["level"]) == ("step failed", "error")
    exception = record["exception"]
    assert isinstance(exception, list)
    assert [(part["exc_type"], part["is_cause"]) for part in exception] == [("RuntimeError", False), ("KeyError", True)]
    assert exception[0]["exc_value"] == "13 tokens"
    assert exception[0]["frames"][-1]["name"] == "test_json_exception_is_a_structured_field_without_locals"


def test_console_exception_is_a_plain_traceback_without_locals() -> None:
    stream = io.StringIO()
    configure_logging(fmt="console", stream=stream)
    secret_prompt = "do not log me"
    try:
        raise RuntimeError(f"{len(secret_prompt)} tokens")
    except RuntimeError:
        get_logger("x").exception("step failed")
    assert "Traceback (most recent call last)" in stream.getvalue()
    assert "RuntimeError: 13 tokens" in stream.getvalue()
    assert "secret_prompt = 'do not log me'" not in stream.getvalue()


def test_handlers_of_others_stay() -> None:
    root, other = logging.getLogger(), logging.StreamHandler(io.StringIO())
    root.addHandler(other)
    configure_logging(stream=io.StringIO())
    num_handlers = len(root.handlers)
    configure_logging(stream=io.StringIO())
    assert other in root.handlers
    assert len(root.handlers) == num_handlers


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("level", "verbose", "log_level = 'verbose': expected one of debug, info, warning"),
        ("fmt", "xml", "log_format = 'xml': expected one of auto, console, json"),
    ],
)
def test_unknown_option_is_refused(option: str, value: str, message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        configure_logging(**{option: value}, stream=sys.stderr)


class FullDisk(io.StringIO):
    """A stream that can be made to fail as on a full disk."""

    is_full = True

    def write(self, text: str, /) -> int:
        if self.is_full:
            raise OSError(errno.ENOSPC, "No space left on device")
        return super().write(text)


def test_full_disk_costs_records_and_says_so_when_there_is_room() -> None:
    stream = FullDisk()
    configure_logging(fmt="json", stream=stream)
    for number in range(3):
        get_logger("x").info("lost", number=number)
    stream.is_full = False
    get_logger("x").info("kept")
    get_logger("x").info("kept too")
    lost, *kept = json_records(stream)
    assert lost["event"] == "3 records before this one could not be written"
    assert lost["level"] == "warning"
    assert [record["event"] for record in kept] == ["kept", "kept too"]


def test_full_disk_under_standard_error_neither_ends_nor_marks_a_process() -> None:
    code = "from common.logging import *; configure_logging(); [get_logger('x').info('hello') for _ in range(2000)]"
    with open("/dev/full", "w", encoding="utf-8") as full:
        status = subprocess.run([sys.executable, "-c", code], stderr=full, cwd=ROOT, timeout=60, check=False).returncode
    assert status == 0
