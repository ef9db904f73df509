"""Files of runs: the dead ones' are removed, the living ones' are not, and nobody waits."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from common.shm.run_files import RunFiles, is_run_file, remove_stale_files

_SPAWN = multiprocessing.get_context("spawn")


def _hold(directory: Path, ready: Connection) -> None:
    files = RunFiles(directory)
    for suffix in ("", ".up", ".down"):
        path = files.new_path()
        path.with_name(path.name + suffix).write_bytes(b"")
    ready.send(None)
    time.sleep(60)


@pytest.mark.parametrize("is_hung", [False, True])
def test_files_go_when_their_run_is_dead_and_not_before(tmp_path: Path, is_hung: bool) -> None:
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
        assert len(list(tmp_path.iterdir())) == 5
    finally:
        process.kill()
        process.join(10)
    files = RunFiles(tmp_path)
    assert files.num_removed == 4
    assert len(list(tmp_path.iterdir())) == 2
    files.close()
    files.close()
    assert list(tmp_path.iterdir()) == [other]


def test_files_without_a_lock_file_are_stale(tmp_path: Path) -> None:
    (tmp_path / "outrider-0123456789abcdef-7").write_bytes(b"")
    (tmp_path / "outrider-0123456789abcdef-7.up").write_bytes(b"")
    assert remove_stale_files(tmp_path) == 2


def test_many_runs_start_at_once(tmp_path: Path) -> None:
    runs = [RunFiles(tmp_path) for _ in range(20)]
    paths = [run.new_path() for run in runs for _ in range(3)]
    assert len(set(paths)) == 60
    assert remove_stale_files(tmp_path) == 0
    for run in runs:
        run.close()
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        RunFiles(tmp_path / "missing")


@pytest.mark.parametrize(
    "name", ["", ".", "..", "../outrider-0123456789abcdef-1", "outrider-0123456789abcdef-1/x", "/etc/passwd", "a\x00b"]
)
def test_names_stay_in_their_directory(name: str) -> None:
    assert not is_run_file(name)
    assert is_run_file("outrider-0123456789abcdef-1")
