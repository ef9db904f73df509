"""Services as real processes, for tests: start, wait for the ready line, and leave none behind."""

from __future__ import annotations

import atexit
import functools
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

ROOT = Path(__file__).resolve().parents[1]
START_LIMIT_S = 90.0
_REAPER_LOCK = threading.Lock()

OUTRIDER = (sys.executable, "-c", "import sys; from outrider.cli import main; sys.exit(main())")
FAKE_VERIFIER = (sys.executable, "-m", "tests.fake_verifier")


class ServiceProcess:
    """A service and its children, in a process group of their own."""

    def __init__(self, command: Sequence[str], environment: dict[str, str] | None = None) -> None:
        settings = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        self.popen = subprocess.Popen(
            command,
            cwd=ROOT,
            env=os.environ | settings | (environment or {}),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.pid = self.popen.pid
        _tell_reaper(f"+{self.pid}\n")
        self._lines: queue.Queue[str | None] = queue.Queue()
        self.errors: list[str] = []
        self._readers = [
            threading.Thread(target=self._read_output, daemon=True),
            threading.Thread(target=self._read_errors, daemon=True),
        ]
        for reader in self._readers:
            reader.start()

    def wait_ready(self, limit_s: float = START_LIMIT_S) -> str:
        """The address of the ready line, without its scheme."""
        deadline = time.monotonic() + limit_s
        while True:
            try:
                line = self._lines.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise AssertionError(f"not ready after {limit_s} s: {self.error_text}") from None
            if line is None:
                self.popen.wait(5)
                raise AssertionError(f"ended with {self.popen.returncode} before it was ready: {self.error_text}")
            match = re.search(r" ready on \w+://(\S+)", line)
            if match:
                return match[1]

    @property
    def error_text(self) -> str:
        return "".join(self.errors)

    def children(self) -> list[int]:
        """Process ids of its children."""
        found: list[int] = []
        for entry in Path("/proc").glob("[0-9]*/stat"):
            with suppress(OSError, IndexError, ValueError):
                fields = entry.read_text().rpartition(")")[2].split()
                if int(fields[1]) == self.pid:
                    found.append(int(entry.parent.name))
        return found

    def terminate(self) -> None:
        self.popen.send_signal(signal.SIGTERM)

    def wait(self, limit_s: float) -> int:
        """The exit status."""
        return self.popen.wait(limit_s)

    def kill_group(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self.popen.wait(10)
        _tell_reaper(f"-{self.pid}\n")
        for reader in self._readers:
            reader.join(10)
        for pipe in (self.popen.stdout, self.popen.stderr):
            if pipe is not None:
                pipe.close()

    def _read_output(self) -> None:
        assert self.popen.stdout is not None
        for line in self.popen.stdout:
            self._lines.put(line)
        self._lines.put(None)

    def _read_errors(self) -> None:
        assert self.popen.stderr is not None
        self.errors.extend(self.popen.stderr)


@functools.cache
def _reaper() -> IO[str]:
    """What a killed test run would leave behind ends with it: `tests/reaper.py`, one for all services."""
    command = [sys.executable, "-S", "-E", str(ROOT / "tests" / "reaper.py")]
    popen = subprocess.Popen(command, stdin=subprocess.PIPE, text=True, bufsize=1, start_new_session=True)
    assert popen.stdin is not None

    def end() -> None:
        assert popen.stdin is not None
        popen.stdin.close()
        popen.wait(10)

    atexit.register(end)
    return popen.stdin


def _tell_reaper(line: str) -> None:
    with _REAPER_LOCK:
        _reaper().write(line)


@contextmanager
def running(command: Sequence[str], environment: dict[str, str] | None = None) -> Iterator[ServiceProcess]:
    """A service that is gone at the end of the block, whatever happens in it."""
    process = ServiceProcess(command, environment)
    try:
        yield process
    finally:
        process.kill_group()


def is_alive(pid: int) -> bool:
    """Of a process that may have become a zombie of another parent's."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


def wait_gone(pid: int, limit_s: float) -> float:
    """Seconds until a process was gone."""
    start = time.monotonic()
    while is_alive(pid):
        assert time.monotonic() - start < limit_s, f"process {pid} is there after {limit_s} s"
        time.sleep(0.01)
    return time.monotonic() - start
