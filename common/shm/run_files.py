"""Files of one run in a shared directory: named after it, and removed by the next run if this one is killed.

A run holds a lock on its lock file for as long as its process lives; the kernel lets go of it whatever ends the
process. So files whose lock is free are nobody's. Nothing here waits for a lock: a run that hangs keeps its files, and
holds up no one.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
from pathlib import Path

_PREFIX = "outrider-"
_LOCK = re.compile(r"outrider-([0-9a-f]{16})\.lock")
_FILE = re.compile(r"outrider-([0-9a-f]{16})-\d{1,12}(?:\.(?:up|down))?")


def is_run_file(name: str) -> bool:
    """Could this be the name of a file of a run? Such a name stays within its directory."""
    return _FILE.fullmatch(name) is not None


class RunFiles:
    """The files of this run. Making one removes what dead runs have left in the directory.

    Args:
        directory: where; it must exist.

    Raises:
        OSError: the directory cannot be written to.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._next_number = 0
        self._lock_fd = -1
        for _ in range(8):  # a run that starts at the same time may take our lock file for a dead one's
            self._run_id = secrets.token_hex(8)
            self._lock_path = directory / f"{_PREFIX}{self._run_id}.lock"
            fd = os.open(self._lock_path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            if _try_lock(fd) and _is_at(fd, self._lock_path):
                self._lock_fd = fd
                break
            os.close(fd)
        else:
            raise OSError(f"no lock file could be kept in {directory}")
        self.num_removed = remove_stale_files(directory)

    def new_path(self) -> Path:
        """A path that no other file has."""
        self._next_number += 1
        return self.directory / f"{_PREFIX}{self._run_id}-{self._next_number}"

    def close(self) -> None:
        """Remove the lock file; the files have been removed by whoever made them. A second call changes nothing."""
        if self._lock_fd >= 0:
            self._lock_path.unlink(missing_ok=True)
            os.close(self._lock_fd)
            self._lock_fd = -1


def remove_stale_files(directory: Path) -> int:
    """Remove the files of runs that are dead; returns how many. What cannot be removed stays."""
    names = os.listdir(directory)
    living: set[str] = set()
    num_removed = 0
    for name in names:
        match = _LOCK.fullmatch(name)
        if match is None:
            continue
        if _is_stale(directory / name):
            num_removed += _remove(directory / name)
        else:
            living.add(match[1])
    for name in names:
        match = _FILE.fullmatch(name)
        if match is not None and match[1] not in living:
            num_removed += _remove(directory / name)
    return num_removed


def _is_stale(lock_path: Path) -> bool:
    """Nobody holds the lock. A lock file of another user, or one that is gone, is left to others."""
    try:
        fd = os.open(lock_path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        return _try_lock(fd)
    finally:
        os.close(fd)


def _try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _is_at(fd: int, path: Path) -> bool:
    """Is the open file still the one at `path`?"""
    with contextlib.suppress(OSError):
        ours, there = os.fstat(fd), path.lstat()
        return (ours.st_dev, ours.st_ino) == (there.st_dev, there.st_ino)
    return False


def _remove(path: Path) -> bool:
    with contextlib.suppress(OSError):
        path.unlink()
        return True
    return False
