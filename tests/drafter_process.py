"""Drafters as processes, for tests: every wait has a limit, and nothing outlives the test."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

START_TIMEOUT_S = 60.0
READY = "outrider drafter ready on grpc://"

_COMMAND = (sys.executable, "-c", "import sys; from outrider.cli import main; sys.exit(main())")
_ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True, slots=True)
class DrafterProcess:
    """`outrider drafter` and its worker, in a process group of their own."""

    process: subprocess.Popen[str]
    address: str

    def signal_group(self, number: signal.Signals) -> None:
        """Send a signal to both processes."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def kill(self) -> None:
        self.signal_group(signal.SIGKILL)
        self.process.wait(timeout=10)


def start_drafter(*arguments: str, port: int = 0, log: Path | None = None) -> DrafterProcess:
    """Start one and wait until it says that it is ready."""
    with open(log or os.devnull, "ab") as errors:
        process = subprocess.Popen(
            [*_COMMAND, "--log-level", "info", "drafter", "--port", str(port), *arguments],
            cwd=_ROOT,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            start_new_session=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
    assert process.stdout is not None
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        is_ready = selector.select(START_TIMEOUT_S)
    line = process.stdout.readline() if is_ready else ""
    if not line.startswith(READY):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(timeout=10)
        raise AssertionError(f"the drafter did not start: {line!r}")
    return DrafterProcess(process, line.removeprefix(READY).strip())


@contextlib.contextmanager
def running_drafter(*arguments: str, port: int = 0, log: Path | None = None) -> Iterator[DrafterProcess]:
    """A drafter that is killed at the end."""
    drafter = start_drafter(*arguments, port=port, log=log)
    try:
        yield drafter
    finally:
        drafter.signal_group(signal.SIGCONT)
        drafter.kill()
        if drafter.process.stdout is not None:
            drafter.process.stdout.close()


def wait_until(condition: Callable[[], bool], what: str, timeout_s: float = 20.0) -> None:
    """Poll until `condition` holds."""
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, f"{what}: not within {timeout_s:g} s"
        time.sleep(0.01)
