"""Both ends of shared memory in one process: who may attach, what waits for room, and what is dropped."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from common.draft_exchange import DrafterHello, DrafterLimits, ModelIdentity, VerifierHello
from common.shm.channel import SharedMemoryError, open_channel
from common.shm.host import boot_id
from drafter_svc.shared_memory import SharedMemoryLinks
from drafter_svc.worker_link import Kind
from verifier_svc.drafts import shared_memory
from verifier_svc.drafts.shared_memory import SharedMemoryFrames, SharedMemoryOptions, attach

STREAM = 7
HELLO = VerifierHello("test", ModelIdentity(vocab_size=100), 1024, 4, 4, 8, shared_memory_host=boot_id())
DRAFTER = DrafterHello("one", ModelIdentity(), "ngram", DrafterLimits(4, 1024, 1 << 19, 64))


@pytest.fixture
def links(tmp_path: Path) -> Iterator[SharedMemoryLinks]:
    links = SharedMemoryLinks(tmp_path)
    yield links
    links.close()
    assert list(tmp_path.iterdir()) == []


def attached(links: SharedMemoryLinks, directory: Path) -> SharedMemoryFrames:
    """What a drafter does at once when the bell rings is done by a thread here."""
    hello = replace(DRAFTER, shared_memory_name=links.offer(STREAM, HELLO))
    is_over = threading.Event()

    def answer() -> None:
        while not is_over.wait(0.001):
            assert links.receive() == []

    thread = threading.Thread(target=answer)
    thread.start()
    try:
        return attach(SharedMemoryOptions(directory), hello)
    finally:
        is_over.set()
        thread.join()


def payloads(frames: SharedMemoryFrames) -> list[bytes]:
    return [frame.payload for frame in frames.receive(0.0)]


def test_frames_go_through_memory_once_it_was_proved(links: SharedMemoryLinks, tmp_path: Path) -> None:
    assert not links.send(STREAM, b"over gRPC: there are no files yet")
    frames = attached(links, tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert frames.send([b"one", b"two"])
    assert [(m.kind, m.stream, m.payload) for m in links.receive()] == [
        (Kind.FRAME, STREAM, b"one"),
        (Kind.FRAME, STREAM, b"two"),
    ]
    assert links.send(STREAM, b"answer")
    assert payloads(frames) == [b"answer"]
    frames.close()
    frames.close()
    assert not frames.send([b"late"])
    assert payloads(frames) == []
    links.close_stream(STREAM)
    links.close_stream(STREAM)


@pytest.mark.parametrize("host", ["", "another"])
def test_no_offer_for_another_host(links: SharedMemoryLinks, tmp_path: Path, host: str) -> None:
    assert links.offer(STREAM, replace(HELLO, shared_memory_host=host)) == ""
    assert list(tmp_path.iterdir()) == []


def test_no_offer_for_rows_that_do_not_fit(links: SharedMemoryLinks, tmp_path: Path) -> None:
    assert links.offer(STREAM, replace(HELLO, max_model_len=1 << 24)) == ""
    assert links.offer(STREAM, replace(HELLO, branch_budget=1 << 19)) == ""
    assert list(tmp_path.iterdir()) == []


def test_a_wrong_secret_ends_the_stream(links: SharedMemoryLinks, tmp_path: Path) -> None:
    channel = open_channel(tmp_path / links.offer(STREAM, HELLO))
    assert channel.send(b"guessed secret!!")
    (message,) = links.receive()
    assert (message.kind, message.stream) == (Kind.BROKEN, STREAM)
    assert b"secret" in message.payload
    assert list(tmp_path.iterdir()) == []
    assert not links.send(STREAM, b"frame")
    channel.close()


def test_a_drafter_that_does_not_answer(
    links: SharedMemoryLinks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_memory, "PROBE_TIMEOUT_S", 0.05)
    hello = replace(DRAFTER, shared_memory_name=links.offer(STREAM, HELLO))
    with pytest.raises(SharedMemoryError, match=r"has not answered .* within 0.05 s"):
        attach(SharedMemoryOptions(tmp_path), hello)


@pytest.mark.parametrize("name", ["../outrider-0123456789abcdef-1", "passwd", "outrider-0123456789abcdef-1/."])
def test_names_of_other_files_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(SharedMemoryError, match="expected the name of a file"):
        attach(SharedMemoryOptions(tmp_path), replace(DRAFTER, shared_memory_name=name))


def test_a_drafter_that_does_not_read_ends_the_session(links: SharedMemoryLinks, tmp_path: Path) -> None:
    frames = attached(links, tmp_path)
    frame = bytes(300_000)
    num_sent = 0
    while frames.send([frame]):  # what does not fit into the ring waits, up to a limit
        num_sent += 1
        assert num_sent < 1000
    assert num_sent >= 200
    assert not frames.send([bytes(3 << 20)]), "a frame that can never fit"
    got = 0
    while messages := links.receive():
        got += len(messages)
        frames.receive(0.0)  # writes what there is room for now
    assert got >= num_sent
    frames.close()


def test_a_verifier_that_does_not_read_loses_replies(links: SharedMemoryLinks, tmp_path: Path) -> None:
    frames = attached(links, tmp_path)
    for _ in range(2000):
        assert links.send(STREAM, bytes(1000))
    assert 0 < links.num_dropped_frames < 2000
    assert len(payloads(frames)) == 2000 - links.num_dropped_frames
    frames.close()
