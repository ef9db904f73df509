"""Channels: what is opened, what is refused, who is waited for, and what is left behind."""

from __future__ import annotations

import contextlib
import errno
import multiprocessing
import os
import stat
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from common.shm import channel as channel_module
from common.shm.channel import SharedMemoryError, ShmChannel, create_channel, open_channel
from common.shm.ring import RingCorruptError

NAME = "outrider-0123456789abcdef-1"
_SPAWN = multiprocessing.get_context("spawn")


def make(directory: Path, num_bytes: int = 4096) -> tuple[ShmChannel, ShmChannel]:
    creator = create_channel(directory / NAME, num_bytes, num_bytes)
    return creator, open_channel(directory / NAME)


def num_open(directory: Path) -> int:
    """Descriptors of files in it: those of this process that other tests have left may go at any time."""
    links: list[str] = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            links.append(os.readlink(f"/proc/self/fd/{fd}"))
    return sum(link.startswith(str(directory)) for link in links)


def payloads(channel: ShmChannel, timeout_s: float = 0.0) -> list[bytes]:
    return [frame.payload for frame in channel.receive(timeout_s)]


def test_frames_both_ways_and_nothing_left(tmp_path: Path) -> None:
    creator, opener = make(tmp_path)
    assert creator.secret == opener.secret != bytes(16)
    assert stat.S_IMODE((tmp_path / NAME).stat().st_mode) == 0o600
    creator.unlink()
    creator.unlink()
    assert list(tmp_path.iterdir()) == []
    for index in range(1000):  # many times around the rings
        frame = bytes([index % 251]) * (index % 300)
        assert opener.send(frame)
        assert creator.send(frame + b"!")
        assert payloads(creator) == [frame]
        assert payloads(opener) == [frame + b"!"]
    assert num_open(tmp_path) == 4 + 2  # two bells at each end, and the memory of each
    for channel in (creator, opener):
        channel.close()
        channel.close()
    assert num_open(tmp_path) == 0


def test_a_full_ring_never_waits(tmp_path: Path) -> None:
    creator, opener = make(tmp_path)
    sent = 0
    start = time.monotonic()
    while opener.send(b"x" * 100):
        sent += 1
    assert time.monotonic() - start < 1
    assert sent == 4096 // 120
    assert not opener.send(b"x" * 5000)
    assert payloads(creator) == [b"x" * 100] * sent
    assert opener.send(b"room")
    for _ in range(70_000):  # the bell is rung, and not heard, more often than its pipe is long
        assert opener.send(b"")
        creator.receive()
    for channel in (creator, opener):
        channel.close()


def test_a_wait_ends_with_a_frame_or_with_the_time(tmp_path: Path) -> None:
    creator, opener = make(tmp_path)
    start = time.monotonic()
    assert payloads(creator, 0.05) == []
    assert 0.04 < time.monotonic() - start < 1
    timer = threading.Timer(0.1, lambda: opener.send(b"late"))
    timer.start()
    start = time.monotonic()
    assert payloads(creator, 10.0) == [b"late"]
    assert time.monotonic() - start < 5
    timer.join()
    for channel in (creator, opener):
        channel.close()


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:100])


def _scribble(path: Path) -> None:
    path.write_bytes(b"\xff" * path.stat().st_size)


def _grow_a_ring(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[8:16] = (1 << 40).to_bytes(8, "little")
    path.write_bytes(data)


def _empty(path: Path) -> None:
    path.write_bytes(b"")


def _replace_by_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _replace_by_link(path: Path) -> None:
    path.rename(path.with_suffix(".moved"))
    path.symlink_to(path.with_suffix(".moved"))


def _replace_bell(path: Path) -> None:
    path.with_name(NAME + ".up").unlink()
    path.with_name(NAME + ".up").write_bytes(b"")


def _remove_bell(path: Path) -> None:
    path.with_name(NAME + ".down").unlink()


@pytest.mark.parametrize(
    "damage",
    [_cut, _scribble, _grow_a_ring, _empty, _replace_by_directory, _replace_by_link, _replace_bell, _remove_bell],
)
def test_what_is_no_channel_is_not_opened(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    creator = create_channel(tmp_path / NAME, 4096, 4096)
    damage(tmp_path / NAME)
    num_fds = num_open(tmp_path)
    with pytest.raises(SharedMemoryError, match="outrider-0123456789abcdef-1"):
        open_channel(tmp_path / NAME)
    assert num_open(tmp_path) == num_fds
    creator.close()


def test_a_file_of_another_user_is_not_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    creator = create_channel(tmp_path / NAME, 4096, 4096)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(SharedMemoryError, match="expected a file of user 12345"):
        open_channel(tmp_path / NAME)
    creator.close()


def test_a_full_disk_or_no_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SharedMemoryError, match="No such file"):
        create_channel(tmp_path / "missing" / NAME, 4096, 4096)

    def refuse(fd: int, offset: int, length: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(channel_module.os, "posix_fallocate", refuse)
    with pytest.raises(SharedMemoryError, match="No space left"):
        create_channel(tmp_path / NAME, 4096, 4096)
    assert list(tmp_path.iterdir()) == []


def test_damage_in_use_is_one_error(tmp_path: Path) -> None:
    creator, opener = make(tmp_path)
    assert opener.send(b"frame")
    data = bytearray((tmp_path / NAME).read_bytes())
    data[64:] = b"\xa5" * (len(data) - 64)
    with open(tmp_path / NAME, "r+b") as file:
        file.write(data)
    with pytest.raises(RingCorruptError):
        creator.receive()
    with pytest.raises(RingCorruptError):
        opener.send(b"frame")
    for channel in (creator, opener):
        channel.close()


def _echo(path: Path) -> None:
    channel = open_channel(path)
    while True:
        for frame in channel.receive(10.0):
            channel.send(frame.payload[::-1])


def test_two_processes_and_one_is_killed(tmp_path: Path) -> None:
    creator = create_channel(tmp_path / NAME, 1 << 16, 1 << 16)
    process = _SPAWN.Process(target=_echo, args=(tmp_path / NAME,), daemon=True)
    process.start()
    try:
        for index in range(500):
            frame = os.urandom(1 + 7 * index % 4000)
            assert creator.send(frame)
            assert payloads(creator, 30.0) == [frame[::-1]]
    finally:
        process.kill()
        process.join(10)
    # A dead reader is a full ring in the end, and a dead writer is silence: nothing waits and nothing fails.
    while creator.send(b"x" * 1000):
        pass
    start = time.monotonic()
    assert payloads(creator, 0.02) == []
    assert time.monotonic() - start < 1
    creator.unlink()
    creator.close()
    assert list(tmp_path.iterdir()) == []
