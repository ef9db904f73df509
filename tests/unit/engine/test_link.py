"""The engine's end of the link: batches, a front that is slow, a front that is gone."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.engine_extensions import StepCounts
from common.errors import UnavailableError
from common.sampling_params import SamplingParams
from common.types import FinishReason, Request, TokenLogprobs
from verifier_svc.engine.link import EngineLink, FrontGoneError
from verifier_svc.messages import (
    MAX_FRAME_BYTES,
    AbortRequest,
    AddRequest,
    EngineLoad,
    FrameReader,
    FromEngine,
    OutputUpdate,
    Rejected,
    Report,
    frame,
)

LOAD = EngineLoad(num_running=1)


class Front:
    """The other end, in plain sockets."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.reader = FrameReader()
        self.decoder = msgspec.msgpack.Decoder(FromEngine)
        sock.settimeout(5)

    def send(self, *messages: object) -> None:
        self.sock.sendall(frame(msgspec.msgpack.encode(messages)))

    def reports(self) -> list[Report]:
        """All that is there now."""
        found: list[Report] = []
        self.sock.setblocking(False)
        try:
            while data := self.sock.recv(1 << 20):
                for payload in self.reader.feed(data):
                    message = self.decoder.decode(payload)
                    assert isinstance(message, Report)
                    found.append(message)
        except BlockingIOError:
            pass
        return found


@pytest.fixture
def ends() -> Iterator[tuple[EngineLink, Front]]:
    ours, theirs = socket.socketpair()
    for sock in (ours, theirs):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    with ours, theirs:
        yield EngineLink(ours, max_waiting_updates=8), Front(theirs)


def make_update(key: int, *tokens: int, reason: FinishReason | None = None) -> OutputUpdate:
    logprobs = [TokenLogprobs([token], [-1.0], 1) for token in tokens]
    return OutputUpdate(key, list(tokens), [StepCounts(len(tokens), 1, 0)], reason, logprobs)


def test_a_request_crosses_unchanged(ends: tuple[EngineLink, Front]) -> None:
    link, front = ends
    params = SamplingParams(
        temperature=0.5, stop=("a", "b"), logit_bias={3: 1.5}, logprobs=2, seed=2**64 - 1, bad_words_token_ids=((1, 2),)
    )
    request = Request("id", [1, 2, 3], params, 2**64 - 1, 40, (5, 6), ((1, 2), (3,)), 4, 1)
    front.send(AddRequest.of(7, request), AbortRequest(9))
    add, abort = link.receive(1.0)
    assert isinstance(add, AddRequest)
    assert (add.key, add.to_request()) == (7, request)
    assert abort == AbortRequest(9)
    assert link.receive(0) == []


def test_a_step_is_one_message(ends: tuple[EngineLink, Front]) -> None:
    link, front = ends
    updates = [make_update(1, 5, 6), make_update(2, 7, reason=FinishReason.LENGTH)]
    link.report(LOAD, updates, [Rejected(3, "RESOURCE_EXHAUSTED", "full")])
    (report,) = front.reports()
    assert report == Report(LOAD, updates, [Rejected(3, "RESOURCE_EXHAUSTED", "full")])


def test_a_front_that_does_not_read_never_blocks_and_loses_nothing(ends: tuple[EngineLink, Front]) -> None:
    """What waits joins into one update an output: as large as the outputs, however many steps there were."""
    link, front = ends
    num_steps = 3000
    start = time.monotonic()
    for step in range(num_steps):
        link.report(LOAD, [make_update(key, step) for key in range(4)])
    assert time.monotonic() - start < 5
    assert link.num_merged > 3 * num_steps
    assert link.num_waiting_updates == 4
    got: dict[int, list[int]] = {key: [] for key in range(4)}
    num_reports = 0
    while len(got[3]) < num_steps:
        link.flush()
        reports = front.reports()
        num_reports += len(reports)
        for report in reports:
            for update in report.updates:
                assert sum(step.num_tokens for step in update.steps) == len(update.token_ids)
                assert [entry.token_ids[0] for entry in update.logprobs or []] == update.token_ids
                got[update.key] += update.token_ids
    assert all(tokens == list(range(num_steps)) for tokens in got.values())
    assert num_reports < num_steps / 4


def test_at_the_bound_the_inbox_waits(ends: tuple[EngineLink, Front]) -> None:
    link, front = ends
    link.report(LOAD, [make_update(100, *range(20_000))])  # more than the socket holds
    link.report(LOAD, [make_update(key, 1, reason=FinishReason.LENGTH) for key in range(8)])
    front.send(AbortRequest(1))
    assert link.receive(0.05) == []
    reader = threading.Thread(target=lambda: [front.reports() or time.sleep(0.001) for _ in range(200)])
    reader.start()
    deadline = time.monotonic() + 5
    messages = link.receive(0.05)
    while not messages:
        assert time.monotonic() < deadline
        messages = link.receive(0.05)
    assert messages == [AbortRequest(1)]
    reader.join()


def test_what_waits_of_an_aborted_output_is_dropped(ends: tuple[EngineLink, Front]) -> None:
    link, _ = ends
    link.report(LOAD, [make_update(100, *range(20_000))])
    link.report(LOAD, [make_update(1, 1), make_update(2, 2)])
    link.forget(1)
    link.forget(1)
    assert link.num_waiting_updates == 1


def test_waiting_for_work_sends_what_is_left(ends: tuple[EngineLink, Front]) -> None:
    link, front = ends
    link.report(LOAD, [make_update(1, *range(20_000))])
    link.report(LOAD, [make_update(1, 7)])
    received: list[int] = []

    def read() -> None:
        while len(received) < 20_001:
            for report in front.reports():
                received.extend(token for update in report.updates for token in update.token_ids)
            time.sleep(0.001)
        front.send(AbortRequest(1))

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    messages = link.receive(10)
    while not messages:
        messages = link.receive(10)
    assert messages == [AbortRequest(1)]
    reader.join(5)
    assert len(received) == 20_001


@pytest.mark.parametrize("is_waiting", [True, False])
def test_a_front_that_is_gone(ends: tuple[EngineLink, Front], is_waiting: bool) -> None:
    link, front = ends
    if is_waiting:
        threading.Timer(0.1, front.sock.shutdown, [socket.SHUT_RDWR]).start()
    else:
        front.sock.close()
    with pytest.raises(FrontGoneError):
        link.receive(10 if is_waiting else 0)
    if not is_waiting:
        with pytest.raises(FrontGoneError):
            link.report(LOAD, [make_update(1, 1)])


@given(st.lists(st.binary(max_size=40), max_size=8), st.lists(st.integers(1, 30), min_size=1))
def test_frames_come_out_whole_in_whatever_pieces_they_come_in(payloads: list[bytes], sizes: list[int]) -> None:
    data = b"".join(frame(payload) for payload in payloads)
    reader = FrameReader()
    found: list[bytes] = []
    start = index = 0
    while start < len(data):
        size = sizes[index % len(sizes)]
        found += reader.feed(data[start : start + size])
        start += size
        index += 1
    assert found == payloads


def test_a_frame_that_is_none() -> None:
    with pytest.raises(UnavailableError, match="expected at most"):
        list(FrameReader().feed((MAX_FRAME_BYTES + 1).to_bytes(4, "little")))
