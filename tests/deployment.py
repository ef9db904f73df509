"""The services of docker-compose.yml as processes of this machine, for tests.

Every command and every probe is the compose file's own, and only what containers have for themselves is exchanged: the
programs for those of this environment, ports for free ones, names of services for 127.0.0.1, volumes for folders.
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tests.deployment_files import ROOT, ServiceSpec, read_compose, words
from tests.service_process import OUTRIDER, ServiceProcess

_PROGRAMS = {
    "outrider": OUTRIDER,
    "smg": (sys.executable, "-m", "smg"),
    "python": (sys.executable,),
}
_PORT_FLAGS = ("--port", "--health-check-port", "--prometheus-port", "--metrics-port")
_HOST_FLAGS = ("--host", "--prometheus-host", "--metrics-host")
_PROBE_LIMIT_S = 10.0
_PROBE_PAUSE_S = 0.2
START_LIMIT_S = 90.0


@dataclass
class Container:
    """A service that runs, as a process."""

    spec: ServiceSpec
    process: ServiceProcess
    ports: Mapping[int, int]
    """Port of the container -> port of this machine."""

    def address(self, port: int) -> str:
        return f"127.0.0.1:{self.ports[port]}"

    def probe(self) -> int:
        """Exit status of the healthcheck."""
        command = _on_this_machine(self.spec.probe, self.ports, {}, {})
        return subprocess.run(command, cwd=ROOT, capture_output=True, timeout=_PROBE_LIMIT_S, check=False).returncode

    def wait_healthy(self, limit_s: float = START_LIMIT_S) -> float:
        """Seconds until the healthcheck passed."""
        start = time.monotonic()
        while self.probe() != 0:
            ended = self.process.popen.poll()
            assert ended is None, f"{self.spec.name} ended with {ended}: {self.process.error_text}"
            assert time.monotonic() - start < limit_s, f"{self.spec.name}: not healthy after {limit_s} s"
            time.sleep(_PROBE_PAUSE_S)
        return time.monotonic() - start


@dataclass
class Deployment:
    """Some services of the compose file.

    Args:
        variables: of the compose file.
        names: `name:port` of a service -> address on this machine.
        volumes: folder of a container -> folder of this machine.
    """

    variables: dict[str, str]
    volumes: dict[str, Path]
    names: dict[str, str] = field(default_factory=dict[str, str])
    _stack: ExitStack = field(default_factory=ExitStack)

    def start(
        self,
        service: str,
        ports: Mapping[int, int] | None = None,
        entrypoint: tuple[str, ...] | None = None,
        **variables: str,
    ) -> Container:
        """Start one more container of a service; does not wait.

        Args:
            service: of the compose file.
            ports: ports of the container -> ports of this machine; None: free ones.
            entrypoint: instead of the image's.
            variables: of the compose file, for this container.
        """
        spec = read_compose(self.variables | variables)[service]
        command = spec.command if entrypoint is None else [*entrypoint, *words(spec.values["command"])]
        taken = {int(command[index + 1]) for index, flag in enumerate(command) if flag in _PORT_FLAGS}
        if ports is None:
            ports = dict(zip(sorted(taken), _free_ports(len(taken)), strict=True))
        local = _on_this_machine(command, ports, self.names, self.volumes)
        process = ServiceProcess(local, dict(spec.values.get("environment", {})))
        self._stack.callback(process.kill_group)
        return Container(spec, process, ports)

    def close(self) -> None:
        self._stack.close()


@contextmanager
def deployment(volumes: dict[str, Path], **variables: str) -> Iterator[Deployment]:
    """None of its processes is there after the block."""
    deployed = Deployment(variables, volumes)
    try:
        yield deployed
    finally:
        deployed.close()


def _on_this_machine(
    command: list[str], ports: Mapping[int, int], names: Mapping[str, str], volumes: Mapping[str, Path]
) -> list[str]:
    program, *arguments = command
    local = list(_PROGRAMS[program])
    flag = ""
    for argument in arguments:
        replaced = argument
        if flag in _PORT_FLAGS:
            replaced = str(ports[int(argument)])
        elif flag in _HOST_FLAGS:
            replaced = "127.0.0.1"
        else:
            for name, address in names.items():
                replaced = re.sub(rf"\b{re.escape(name)}\b", address, replaced)
            for port, free in ports.items():
                replaced = replaced.replace(f"127.0.0.1:{port}", f"127.0.0.1:{free}")
            for folder, path in volumes.items():
                if replaced.startswith(f"{folder}/"):
                    replaced = os.fspath(path) + replaced.removeprefix(folder)
        local.append(replaced)
        flag = argument
    return local


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    try:
        return [found.getsockname()[1] for found in sockets]
    finally:
        for found in sockets:
            found.close()
