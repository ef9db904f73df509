"""Structured logging, set up once per process: readable lines on a terminal, one JSON object per line elsewhere.

Records of the standard library, ours and those of dependencies, pass through the same renderer, so that a log has one
format. An event is a short constant sentence; whatever varies is a keyword:

    logger = get_logger(__name__)
    logger.info("request finished", request_id=request_id, num_tokens=num_tokens)
"""

import json
import logging
import os
import sys
from collections.abc import Callable
from typing import TextIO

import structlog
from structlog.typing import EventDict, Processor

from common.errors import InvalidArgumentError

Logger = structlog.stdlib.BoundLogger

_LEVELS: dict[str, int] = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
    "critical": logging.CRITICAL,
}
_STDERR = 2
_FORMATS = ("auto", "console", "json")

# Loggers of dependencies whose debug records say nothing about us.
_NOISY = ("asyncio", "grpc")

# Applied to every record, whether it began in structlog or in the standard library.
_ENRICH: tuple[Processor, ...] = (
    structlog.contextvars.merge_contextvars,
    structlog.stdlib.add_logger_name,
    structlog.stdlib.add_log_level,
    structlog.stdlib.PositionalArgumentsFormatter(),
    structlog.processors.TimeStamper(fmt="iso", utc=True),
    structlog.processors.StackInfoRenderer(),
)


class _OutriderHandler(logging.StreamHandler[TextIO]):
    """Writes records, and drops what cannot be written: a full disk costs records and nothing else.

    Each record is one write to the file descriptor, where the stream is standard error: records of several processes do
    not mix, and nothing is left in a buffer for the end of the process to fail on.
    """

    num_dropped = 0
    """Records that could not be written since one could."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            text = self.format(record)
            if self.num_dropped:
                text = f"{_lost(self.num_dropped, self.format)}\n{text}"
            self._write(text + "\n")
            self.num_dropped = 0
        except OSError:
            self.num_dropped += 1
        except Exception:
            self.handleError(record)

    def _write(self, text: str) -> None:
        if self.stream is not sys.__stderr__:
            self.stream.write(text)
            self.stream.flush()
            return
        data = memoryview(text.encode(errors="backslashreplace"))
        while data:
            data = data[os.write(_STDERR, data) :]


def _lost(count: int, render: Callable[[logging.LogRecord], str]) -> str:
    text = "%d records before this one could not be written"
    return render(logging.LogRecord(__name__, logging.WARNING, __file__, 0, text, (count,), None))


def configure_logging(level: str = "info", fmt: str = "auto", stream: TextIO | None = None) -> None:
    """Send all log records of this process to `stream`, by default standard error.

    `level` is debug, info, warning, error or critical; records below it are dropped. `fmt` is auto, console or json:
    auto takes console if the stream is a terminal and json if not; colours appear on a terminal only. May be called
    again, also after loggers have been used. Raises InvalidArgumentError for an unknown level or format.
    """
    if level not in _LEVELS:
        raise InvalidArgumentError("log_level", level, f"one of {', '.join(_LEVELS)}")
    if fmt not in _FORMATS:
        raise InvalidArgumentError("log_format", fmt, f"one of {', '.join(_FORMATS)}")
    output = sys.stderr if stream is None else stream
    is_terminal = output.isatty()
    renderers = _console(is_terminal) if fmt == "console" or (fmt == "auto" and is_terminal) else _json()

    handler = _OutriderHandler(output)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[*_ENRICH, structlog.stdlib.ExtraAdder(), _drop_formatted],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *renderers],
        )
    )
    root = logging.getLogger()
    for old in root.handlers[:]:
        if isinstance(old, _OutriderHandler):
            root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(_LEVELS[level])
    for name in _NOISY:
        logging.getLogger(name).setLevel(max(_LEVELS[level], logging.INFO))

    _route_to_standard_library()


def get_logger(name: str) -> Logger:
    """A logger that names its module in every record; it may be made before logging is configured.

    Without `configure_logging` records go where the application sends those of the standard library: Outrider as a
    library prints nothing of its own accord.
    """
    if not structlog.is_configured():
        _route_to_standard_library()
    return structlog.stdlib.get_logger(name)


def _route_to_standard_library() -> None:
    structlog.configure(
        # A record below the level costs one comparison: nothing is formatted before `filter_by_level`.
        processors=[
            structlog.stdlib.filter_by_level,
            *_ENRICH,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        # What a later call changes is the root logger's level and handler, so a cached logger follows.
        cache_logger_on_first_use=True,
    )


def _drop_formatted(_: object, __: str, event_dict: EventDict) -> EventDict:
    # Handlers of others leave what they formatted on the record, and it would pass for an extra field of the caller's.
    event_dict.pop("message", None)
    event_dict.pop("asctime", None)
    return event_dict


def _console(colours: bool) -> list[Processor]:
    # The plain traceback, not the rich one: that prints local variables, and those hold prompts.
    return [structlog.dev.ConsoleRenderer(colors=colours, exception_formatter=structlog.dev.plain_traceback)]


def _json() -> list[Processor]:
    # Locals are left out for the same reason. A value that JSON cannot express is written as its repr.
    transformer = structlog.tracebacks.ExceptionDictTransformer(show_locals=False)
    return [
        structlog.processors.ExceptionRenderer(transformer),
        structlog.processors.JSONRenderer(serializer=json.dumps, default=repr),
    ]
