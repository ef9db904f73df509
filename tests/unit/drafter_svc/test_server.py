"""The process that speaks gRPC stays light: what it imports it pays for at every start."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def test_the_rpc_process_loads_no_torch() -> None:
    code = (
        "import sys, outrider.commands.drafter, drafter_svc.server; print({'torch', 'transformers'} & set(sys.modules))"
    )
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout.strip() == "set()"
