"""Files of runs: the dead ones' are removed, the living ones' are not, and nobody waits."""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import signal
import time
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from common.shm.channel import create_channel
from common.shm.run_files import RunFiles, create_locked, is_run_file, remove_stale_files

_SPAWN = multiprocessing.get_context("spawn")


def _hold(directory: Path, ready: Connection) -> None:
    channel = create_channel(RunFiles(directory).new_path(), 4096, 4096)
    ready.send(channel.secret)
    time.sleep(60)


@pytest.mark.parametrize("is_hung", [False, True])
def test_files_go_when_their_maker_is_dead_and_not_before(tmp_path: Path, is_hung: bool) -> None:
    other = tmp_path / "outrider-notes.txt"
    other.write_text("of somebody else")
    ours, theirs = _SPAWN.Pipe()
    process = _SPAWN.Process(target=_hold, args=(tmp_path, theirs), daemon=True)
    process.start()
    assert process.pid is not None
    try:
        assert ours.poll(30)
        if is_hung:
            os.kill(process.pid, signal.SIGSTOP)
        start = time.monotonic()
        assert remove_stale_files(tmp_path) == 0
        assert time.monotonic() - start < 1
        assert len(list(tmp_path.iterdir())) == 4
    finally:
        process.kill()
        process.join(10)
    assert RunFiles(tmp_path).num_removed == 3
    assert list(tmp_path.iterdir()) == [other]


def test_bells_without_their_file_are_stale(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "outrider-0123456789abcdef-7.up")
    (tmp_path / "outrider-0123456789abcdef-7.down").write_bytes(b"")
    assert remove_stale_files(tmp_path) == 2


def test_files_of_the_living_stay(tmp_path: Path) -> None:
    runs = [RunFiles(tmp_path) for _ in range(5)]
    channels = [create_channel(run.new_path(), 64, 64) for run in runs for _ in range(3)]
    assert remove_stale_files(tmp_path) == 0
    assert len(list(tmp_path.iterdir())) == 3 * len(channels)
    for channel in channels:
        channel.close()
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_is_removed_before_it_is_locked_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_flock, path = fcntl.flock, tmp_path / "outrider-0123456789abcdef-1"
    num_removed = 0

    def flock(fd: int, operation: int) -> None:
        nonlocal num_removed
        if num_removed < 2:
            num_removed += 1
            path.unlink()
        real_flock(fd, operation)

    monkeypatch.setattr(fcntl, "flock", flock)
    fd = create_locked(path)
    assert path.exists()
    os.close(fd)


def test_a_directory_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        RunFiles(tmp_path / "missing")


@pytest.mark.parametrize(
    "name", ["", ".", "..", "../outrider-0123456789abcdef-1", "outrider-0123456789abcdef-1/x", "/etc/passwd", "a\x00b"]
)
def test_names_stay_in_their_directory(name: str) -> None:
    assert not is_run_file(name)
    assert is_run_file("outrider-0123456789abcdef-1")
