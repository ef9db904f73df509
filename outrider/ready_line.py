"""The one line that a service writes on standard output."""

from __future__ import annotations

import os
import sys

from common.logging import get_logger


def print_ready(service: str, url: str) -> None:
    """Say that `service` listens at `url`.

    A full disk, or a reader that has left, costs this line and nothing else: the service listens all the same, and its
    log says where.
    """
    try:
        sys.stdout.write(f"outrider {service} ready on {url}\n")
        sys.stdout.flush()
    except OSError as error:
        get_logger(__name__).warning("the ready line cannot be written", url=url, reason=str(error))
        # The line is still in the buffer, and the interpreter would fail on it when it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
