"""The line every ten seconds: what it says, and when it says nothing."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator

import pytest
import structlog

from common.logging import configure_logging, get_logger
from verifier_svc.front.metrics import FrontMetrics
from verifier_svc.front.stats_log import StatsLog
from verifier_svc.messages import EngineLoad, Report


@pytest.fixture
def stream() -> Iterator[io.StringIO]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    stream = io.StringIO()
    configure_logging(fmt="json", stream=stream)
    yield stream
    root.handlers[:] = handlers
    root.setLevel(level)
    structlog.reset_defaults()


def records(stream: io.StringIO) -> list[dict[str, object]]:
    found = [json.loads(line) for line in stream.getvalue().splitlines()]
    stream.truncate(0)
    stream.seek(0)
    return found


def test_rates_are_of_the_time_since_the_last_line(stream: io.StringIO) -> None:
    metrics = FrontMetrics()
    now = [50.0]
    metrics.clock = lambda: now[0]  # type: ignore[method-assign]
    log = StatsLog(metrics, get_logger("front"))
    now[0] += 10
    metrics.num_prompt_tokens, metrics.num_generation_tokens = 100, 50
    metrics.report(Report(EngineLoad(3, 1, 0.5, 9, 0, 100, 25, 10, 30, 12, [8, 3, 1]), []))
    log.log()
    (record,) = records(stream)
    assert record | {"timestamp": ""} == {
        "event": "throughput",
        "level": "info",
        "logger": "front",
        "timestamp": "",
        "prompt_tokens_per_s": 10.0,
        "generation_tokens_per_s": 5.0,
        "num_running": 3,
        "num_waiting": 1,
        "kv_cache_usage": 0.5,
        "prefix_cache_hit_rate": 0.25,
        "acceptance_length": 2.2,
        "acceptance_rate": 0.4,
        "acceptance_per_pos": [0.8, 0.3, 0.1],
        "num_draft_tokens": 30,
        "num_accepted_tokens": 12,
    }
    now[0] += 20
    metrics.num_generation_tokens += 40
    metrics.report(Report(EngineLoad(1, 0, 0.1, 12, 0, 100, 25, 14, 42, 22, [12, 6, 4]), []))
    log.log()
    (record,) = records(stream)
    assert record["generation_tokens_per_s"] == 2.0
    assert record["acceptance_length"] == 3.5
    assert record["acceptance_per_pos"] == [1.0, 0.75, 0.75]
    assert "prefix_cache_hit_rate" not in record


def test_an_idle_server_says_so_once(stream: io.StringIO) -> None:
    metrics = FrontMetrics()
    log = StatsLog(metrics, get_logger("front"))
    log.log()
    assert records(stream) == []
    metrics.report(Report(EngineLoad(num_running=1), []))
    log.log()
    metrics.report(Report(EngineLoad(), []))
    log.log()
    assert [record["num_running"] for record in records(stream)] == [1, 0]
    log.log()
    assert records(stream) == []
