"""A verifier in processes of its own, for benchmarks, and what it has cost."""

from __future__ import annotations

import os
import selectors
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

START_LIMIT_S = 120.0
STOP_LIMIT_S = 30.0
_READY = "outrider verifier ready on grpc://"
_COMMAND = (sys.executable, "-c", "import sys; from outrider.cli import main; sys.exit(main())")
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class CpuTime:
    """Processor seconds since the processes began."""

    front_s: float
    engine_s: float


@dataclass(frozen=True, slots=True)
class RunningVerifier:
    """One that serves.

    Args:
        address: HOST:PORT.
        metrics_address: HOST:PORT of its metrics.
        front_pid: of the process that speaks gRPC.
        engine_pid: of the process that runs the model.
    """

    address: str
    metrics_address: str
    front_pid: int
    engine_pid: int

    def metric(self, name: str) -> float:
        """The sum of the samples of a metric."""
        with urllib.request.urlopen(f"http://{self.metrics_address}/metrics", timeout=10) as response:
            lines = response.read().decode().splitlines()
        samples = [line for line in lines if line.startswith((f"{name}{{", f"{name} "))]
        return sum(float(line.rpartition(" ")[2]) for line in samples)

    def cpu_time(self) -> CpuTime:
        return CpuTime(_cpu_time(self.front_pid), _cpu_time(self.engine_pid))


@contextmanager
def running_verifier(model: str, flags: Sequence[str]) -> Iterator[RunningVerifier]:
    """Start `outrider verifier MODEL FLAGS` on free ports, wait for its ready line, and end it with the block."""
    metrics_port = _free_port()
    command = [*_COMMAND, "--log-level", "warning", "verifier", model, "--port", "0"]
    command += ["--metrics-port", str(metrics_port), *flags]
    process = subprocess.Popen(
        command, cwd=Path(__file__).parent.parent, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        assert process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            line = process.stdout.readline() if selector.select(START_LIMIT_S) else ""
        if not line.startswith(_READY):
            raise RuntimeError(f"the verifier did not start: {line!r}")
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        address = line.removeprefix(_READY).strip()
        yield RunningVerifier(address, f"127.0.0.1:{metrics_port}", process.pid, int(children[0]))
    finally:
        process.terminate()
        try:
            process.wait(STOP_LIMIT_S)
        except subprocess.TimeoutExpired:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        if process.stdout is not None:
            process.stdout.close()


def machine_cpu_time() -> float:
    """Processor seconds that all processes of the machine have used since it started."""
    user, nice, system, _idle, _iowait, irq, softirq, *_ = map(int, _first_line("/proc/stat").split()[1:])
    return (user + nice + system + irq + softirq) / _TICKS


def _first_line(path: str) -> str:
    with open(path, encoding="ascii") as file:
        return file.readline()


def _cpu_time(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])
