"""A test run that is killed leaves no service behind."""

from __future__ import annotations

import subprocess
import sys

from tests.service_process import FAKE_VERIFIER, ROOT, wait_gone

RUN = """
import os, signal, sys
from tests.service_process import ServiceProcess
ended, left = (ServiceProcess(sys.argv[1:]) for _ in range(2))
left.wait_ready()
ended.kill_group()
print(left.pid, *left.children(), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_services_end_with_a_killed_test_run() -> None:
    command = [sys.executable, "-c", RUN, *FAKE_VERIFIER, "--", "--port", "0"]
    killed = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, timeout=60, check=False)
    assert killed.returncode == -9
    front, engine = map(int, killed.stdout.split())
    for pid in (front, engine):
        wait_gone(pid, 5)
