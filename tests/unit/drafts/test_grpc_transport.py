"""The gRPC transport against a drafter that is scripted: what it survives, and when it starts anew."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest

from common.draft_codec import decode_verifier_frame, encode_drafter_hello, encode_reply
from common.draft_exchange import (
    Branch,
    BranchBatch,
    DrafterHello,
    DrafterLimits,
    DraftReply,
    ModelIdentity,
    RowOpened,
    SessionUpdate,
    VerifierHello,
)
from common.protos.outrider.v1 import drafter_pb2 as pb
from verifier_svc.drafts import grpc_transport
from verifier_svc.drafts.grpc_transport import GrpcTransport
from verifier_svc.drafts.transport import Arrival

HELLO = VerifierHello("test", ModelIdentity(vocab_size=100), 64, 4, 1, 8)
LIMITS = DrafterLimits(4, 64, 100, 16)
UPDATE = SessionUpdate(opened=[RowOpened(0, 1, "r", [1, 2, 3], 3, 64, 3, 0, 0.0, 1.0, 0, 0.0)])

Script = Callable[[Iterator[bytes], "ScriptedDrafter"], Iterator[bytes]]


def ack(incarnation: str = "one", **changes: Any) -> bytes:
    return encode_drafter_hello(DrafterHello(incarnation, ModelIdentity(), "fake", LIMITS, **changes))


def reply(sequence: int, *tokens: int) -> bytes:
    branches = BranchBatch.of([Branch(0, 1, 3, list(tokens))])
    return encode_reply(DraftReply(sequence, branches, []))


class ScriptedDrafter:
    """A gRPC server whose session is what the test says."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.received: list[bytes] = []
        self.num_sessions = 0
        self.ended = threading.Event()
        self._server = grpc.server(ThreadPoolExecutor(4), options=[("grpc.so_reuseport", 0)])
        handler = grpc.stream_stream_rpc_method_handler(self._session)
        self._server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler("outrider.v1.Drafter", {"Session": handler}),)
        )
        self.port = self._server.add_insecure_port("127.0.0.1:0")
        self._server.start()

    def _session(self, frames: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        self.num_sessions += 1
        context.add_callback(self.ended.set)
        self.received.append(next(frames))
        yield from self.script(frames, self)

    def stop(self) -> None:
        self._server.stop(0).wait(5)


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Script], tuple[ScriptedDrafter, GrpcTransport]]]:
    monkeypatch.setattr(grpc_transport, "MIN_BACKOFF_S", 0.01)
    made: list[ScriptedDrafter | GrpcTransport] = []

    def make_both(script: Script) -> tuple[ScriptedDrafter, GrpcTransport]:
        drafter = ScriptedDrafter(script)
        transport = GrpcTransport(f"127.0.0.1:{drafter.port}", HELLO)
        made.extend((transport, drafter))
        return drafter, transport

    yield make_both
    for one in made:
        one.close() if isinstance(one, GrpcTransport) else one.stop()


def wait_for(condition: Callable[[], object], timeout_s: float = 10.0) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "not in time"
        time.sleep(0.005)


def poll(transport: GrpcTransport, count: int) -> list[Arrival]:
    arrivals: list[Arrival] = []
    end = time.monotonic() + 10.0
    while len(arrivals) < count:
        assert time.monotonic() < end, f"{len(arrivals)} of {count} arrived"
        arrivals += transport.poll(0.5)
    return arrivals


def answering(frames: Iterator[bytes], drafter: ScriptedDrafter) -> Iterator[bytes]:
    yield ack()
    for frame in frames:
        drafter.received.append(frame)
        sequence, _ = decode_verifier_frame(frame, 100)
        yield reply(sequence, 4, 5)


def test_hello_updates_and_replies(make: Any) -> None:
    drafter, transport = make(answering)
    wait_for(lambda: transport.session)
    assert transport.session.drafter.method == "fake"
    assert decode_verifier_frame(drafter.received[0], 0)[1] == HELLO
    sequence = transport.send(UPDATE)
    (arrival,) = poll(transport, 1)
    assert (arrival.session, arrival.reply.answered_sequence) == (1, sequence)
    assert arrival.reply.branches.to_list() == [Branch(0, 1, 3, [4, 5])]
    assert decode_verifier_frame(drafter.received[1], 100) == (sequence, UPDATE)
    start = time.monotonic()
    transport.close()
    assert time.monotonic() - start < 3.0
    assert drafter.ended.wait(5)
    assert (transport.session, transport.send(UPDATE), transport.poll(0)) == (None, None, [])


def test_a_long_prompt_is_cut_between_rows(make: Any) -> None:
    _, transport = make(answering)
    wait_for(lambda: transport.session)
    opened = [RowOpened(row, 1, "r", [1] * 40, 40, 64, 3, 0, 0.0, 1.0, 0, 0.0) for row in range(4)]
    assert transport.send(SessionUpdate(opened=opened)) == 2
    assert [arrival.reply.answered_sequence for arrival in poll(transport, 2)] == [1, 2]


def test_frames_that_cannot_be_read_are_skipped_and_counted(make: Any) -> None:
    def script(frames: Iterator[bytes], drafter: ScriptedDrafter) -> Iterator[bytes]:
        yield ack()
        next(frames)
        yield b"\xff" * 20
        yield pb.DrafterFrame(branches=pb.BranchBatch(row=b"abc")).SerializeToString()
        yield encode_reply(DraftReply(1, BranchBatch.of([Branch(0, 1, 3, [1] * 100)]), []))  # more than was asked for
        yield ack()
        yield reply(1, 7)
        yield reply(1, 7)
        next(frames, None)

    _, transport = make(script)
    wait_for(lambda: transport.session)
    transport.send(UPDATE)
    arrivals = poll(transport, 2)
    assert [arrival.reply.branches.to_list() for arrival in arrivals] == [[Branch(0, 1, 3, [7])]] * 2
    assert transport.num_malformed_frames == 4
    assert transport.session.number == 1


def test_an_oversized_frame_ends_the_session_and_the_next_begins(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def script(frames: Iterator[bytes], drafter: ScriptedDrafter) -> Iterator[bytes]:
        yield ack(str(drafter.num_sessions))
        if drafter.num_sessions == 1:
            yield b"\0" * (65 << 20)
        yield from (reply(1, 7) for _ in frames)

    _, transport = make(script)
    wait_for(lambda: transport.session is not None and transport.session.number == 2)
    assert transport.session.drafter.incarnation_id == "2"
    transport.send(UPDATE)
    assert poll(transport, 1)[0].session == 2


@pytest.mark.parametrize(
    ("first", "reason"),
    [
        (b"\xff" * 20, "expected a DrafterFrame"),
        (reply(1, 4), "hello_ack: expected it in the first frame"),
        (ack(protocol_version=9), "protocol version: the verifier speaks 1, the drafter 9"),
        (None, "the drafter ended the stream"),
    ],
    ids=["garbage", "a reply", "another version", "nothing"],
)
def test_a_drafter_that_does_not_say_hello_is_tried_again(make: Any, first: bytes | None, reason: str) -> None:
    def script(frames: Iterator[bytes], drafter: ScriptedDrafter) -> Iterator[bytes]:
        if drafter.num_sessions > 2:
            yield from answering(frames, drafter)
        elif first is not None:
            yield first

    _, transport = make(script)
    wait_for(lambda: reason in transport.last_error)
    wait_for(lambda: transport.session)
    assert transport.session.number == 1


def test_a_drafter_that_does_not_read_costs_a_bounded_queue(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc_transport, "MAX_WAITING_BYTES", 1 << 20)
    release = threading.Event()

    def script(frames: Iterator[bytes], drafter: ScriptedDrafter) -> Iterator[bytes]:
        yield ack()
        if drafter.num_sessions == 1:
            release.wait(10)
        else:
            yield from (reply(1, 7) for _ in frames)

    _, transport = make(script)
    wait_for(lambda: transport.session)
    opened = [RowOpened(0, 1, "r" * 200, [1] * 60, 40, 64, 3, 0, 0.0, 1.0, 0, 0.0)] * 100
    start = time.monotonic()
    num_sent = 0
    while transport.send(SessionUpdate(opened=opened)) is not None:
        num_sent += 1
        assert num_sent < 100_000
    assert time.monotonic() - start < 5.0
    assert transport.session is None or transport.session.number == 2
    release.set()
    wait_for(lambda: transport.session is not None and transport.session.number == 2)


def test_a_drafter_that_never_answers_the_hello(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc_transport, "HELLO_TIMEOUT_S", 0.2)

    def script(frames: Iterator[bytes], drafter: ScriptedDrafter) -> Iterator[bytes]:
        if drafter.num_sessions == 1:
            drafter.ended.wait(10)
        yield from answering(frames, drafter)

    drafter, transport = make(script)
    wait_for(lambda: transport.session)
    assert drafter.num_sessions == 2
