"""Files of one run in a shared directory: named after it, and removed by another run if this one is killed.

Whoever makes a file holds a lock on it for as long as it has a name; the kernel lets go of the lock whatever ends the
process. So a file whose lock is free is nobody's. Nothing here waits for a lock: a run that hangs keeps its files, and
holds up no one.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
from pathlib import Path

UP = ".up"
DOWN = ".down"
_BELLS = (UP, DOWN)
_FILE = re.compile(r"outrider-[0-9a-f]{16}-\d{1,12}")


def is_run_file(name: str) -> bool:
    """Could this be the name of a file of a run? Such a name stays within its directory."""
    return _FILE.fullmatch(name) is not None


class RunFiles:
    """Names of the files of this run. Making one removes what dead runs have left in the directory.

    Args:
        directory: where; it must exist.

    Raises:
        OSError: the directory cannot be read.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._run_id = secrets.token_hex(8)
        self._next_number = 0
        self.num_removed = remove_stale_files(directory)

    def new_path(self) -> Path:
        """A path that no other file has."""
        self._next_number += 1
        return self._directory / f"outrider-{self._run_id}-{self._next_number}"


def create_locked(path: Path) -> int:
    """Make a file that is not there yet, and lock it; returns its descriptor.

    Raises:
        OSError: it cannot be made.
    """
    for _ in range(8):  # a run that cleans up at this moment takes a file for a dead one's until it is locked
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        if _try_lock(fd) and _is_at(fd, path):
            return fd
        os.close(fd)
        path.unlink(missing_ok=True)
    raise OSError(f"{path}: somebody else removes it again and again")


def remove_stale_files(directory: Path) -> int:
    """Remove the files of runs that are dead; returns how many. What cannot be removed stays.

    Raises:
        OSError: the directory cannot be read.
    """
    names = os.listdir(directory)
    num_removed = 0
    for name in names:
        path = directory / name
        if is_run_file(name) and _is_stale(path):
            num_removed += sum(_remove(path.with_name(name + suffix)) for suffix in (*_BELLS, ""))
    for name in names:
        path = directory / name
        # Bells are made after their file, and removed before it.
        if path.suffix in _BELLS and is_run_file(path.stem) and not path.with_name(path.stem).exists():
            num_removed += _remove(path)
    return num_removed


def _is_stale(path: Path) -> bool:
    """Nobody holds the lock. A file of another user, or one that is gone, is left to others."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        return _try_lock(fd)
    finally:
        os.close(fd)


def _try_lock(fd: int) -> bool:
    import fcntl  # not on Windows, where there is no boot id, and so nobody gets here

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
