"""Drafters as processes, for tests."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from tests.service_process import OUTRIDER, ServiceProcess, running


@dataclass(frozen=True, slots=True)
class DrafterProcess:
    """`outrider drafter`: the process that speaks gRPC, with the one that drafts as its child."""

    process: ServiceProcess
    address: str


@contextlib.contextmanager
def running_drafter(*arguments: str) -> Iterator[DrafterProcess]:
    """A drafter that is gone at the end, whatever happens to it."""
    port = () if "--port" in arguments else ("--port", "0")
    with running([*OUTRIDER, "--log-level", "info", "drafter", *port, *arguments]) as process:
        yield DrafterProcess(process, process.wait_ready())


def wait_until(condition: Callable[[], bool], what: str, timeout_s: float = 20.0) -> None:
    """Poll until it holds."""
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, f"{what}: not within {timeout_s:g} s"
        time.sleep(0.01)
