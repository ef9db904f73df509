"""Which machine this is."""

from __future__ import annotations

import socket
from pathlib import Path


def boot_id() -> str:
    """The same for all containers of a machine, and another one after a restart; empty where there is none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


def host_id() -> str:
    """Name and boot id of this machine."""
    return f"{socket.gethostname()}/{boot_id()}"
