"""Ends the process groups that a test run leaves behind: `python tests/reaper.py`, with +PGID and -PGID on its input.

Its input ends with the process that writes it, however that ends, and so do the groups that are still on its list.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys


def main() -> None:
    groups: set[int] = set()
    for line in sys.stdin:
        group = int(line[1:])
        if line[0] == "+":
            groups.add(group)
        else:
            groups.discard(group)
    for group in groups:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    main()
