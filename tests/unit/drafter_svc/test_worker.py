"""The worker's loop: sockets and shared memory together, and a peer that never stops."""

from __future__ import annotations

import socket
import threading
from pathlib import Path

import pytest

from common.draft_exchange import ModelIdentity, VerifierHello
from common.shm.channel import open_channel
from common.shm.host import boot_id
from drafter_svc import worker
from drafter_svc.shared_memory import SharedMemoryLinks
from drafter_svc.worker_link import Kind, pack

HELLO = VerifierHello("test", ModelIdentity(vocab_size=100), 1024, 4, 4, 8, shared_memory_host=boot_id())


@pytest.mark.parametrize("frame", [b"frame", None])
def test_a_peer_that_never_stops_holds_nobody_up(tmp_path: Path, frame: bytes | None) -> None:
    """Frames without end, or a bell without frames: what others have sent is answered all the same."""
    links = SharedMemoryLinks(tmp_path)
    channel = open_channel(tmp_path / links.offer(7, HELLO))
    ours, theirs = socket.socketpair()
    is_over = threading.Event()
    channel.send(channel.secret)

    def flood() -> None:
        while not is_over.is_set():
            if frame is None:
                channel._other_bell.ring()
            else:
                channel.send(frame)

    thread = threading.Thread(target=flood)
    thread.start()
    try:
        theirs.sendall(pack(Kind.INFO, 9))
        buffer = bytearray()
        for _ in range(100):
            messages = worker._receive(ours, buffer, links)
            assert messages is not None
            if any(message.kind == Kind.INFO and message.stream == 9 for message in messages):
                break
        else:
            raise AssertionError("the other stream was not heard")
        theirs.close()
        for _ in range(100):
            if worker._receive(ours, buffer, links) is None:
                break
        else:
            raise AssertionError("the end was not heard")
    finally:
        is_over.set()
        thread.join()
        channel.close()
        links.close()
        ours.close()


def test_a_bell_that_is_rung_faster_than_it_is_silenced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    links = SharedMemoryLinks(tmp_path)
    channel = open_channel(tmp_path / links.offer(7, HELLO))
    ours, theirs = socket.socketpair()
    for frame in (channel.secret, b"one"):
        assert channel.send(frame)
    num_looks = 0

    def ready(fds: list[int], wait: bool) -> set[int]:
        nonlocal num_looks
        num_looks += 1
        assert num_looks < 1000, "nobody is answered"
        return {fd for fd in fds if fd != ours.fileno()}

    monkeypatch.setattr(worker, "_ready", ready)
    messages = worker._receive(ours, bytearray(), links)
    assert messages is not None
    assert [message.payload for message in messages] == [b"one"]
    channel.close()
    links.close()
    ours.close()
    theirs.close()


def test_one_call_takes_what_is_there(tmp_path: Path) -> None:
    links = SharedMemoryLinks(tmp_path)
    channel = open_channel(tmp_path / links.offer(7, HELLO))
    ours, theirs = socket.socketpair()
    for frame in (channel.secret, b"one", b"two"):
        assert channel.send(frame)
    theirs.sendall(pack(Kind.FRAME, 3, b"three") + pack(Kind.FRAME, 4, b"half of it")[:-3])
    buffer = bytearray()
    messages = worker._receive(ours, buffer, links)
    assert messages is not None
    assert [(message.stream, message.payload) for message in messages] == [(7, b"one"), (7, b"two"), (3, b"three")]
    theirs.sendall(b" it")
    messages = worker._receive(ours, buffer, links)
    assert messages is not None
    assert [(message.stream, message.payload) for message in messages] == [(4, b"half of it")]
    channel.close()
    links.close()
    ours.close()
    theirs.close()
