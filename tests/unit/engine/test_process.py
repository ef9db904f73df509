"""The loop of the engine process: one bad request is the answer to that request, and to no other."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from common.sampling_params import SamplingParams
from common.types import FinishReason, Request
from tests.fake_engine import build, fake_output
from verifier_svc.engine.link import EngineLink
from verifier_svc.engine.process import EngineProcess
from verifier_svc.messages import (
    AbortRequest,
    AddRequest,
    FlushCache,
    FlushResult,
    FrameReader,
    FromEngine,
    Rejected,
    Report,
    Stop,
    frame,
)


class Front:
    """Talks to an `EngineProcess` in a thread."""

    def __init__(self, **options: Any) -> None:
        ours, theirs = socket.socketpair()
        self.sock = theirs
        self.sock.settimeout(10)
        self.reader = FrameReader()
        self.decoder = msgspec.msgpack.Decoder(FromEngine)
        self.engine = build({"model": "none", "max_num_seqs": 2} | options).engine
        self.link = EngineLink(ours)
        self.thread = threading.Thread(target=EngineProcess(self.engine, self.link).run, daemon=True)
        self.thread.start()
        self.tokens: dict[int, list[int]] = {}
        self.ended: dict[int, FinishReason] = {}
        self.rejected: list[Rejected] = []
        self.flushed: list[FlushResult] = []
        self.last: Report | None = None

    def send(self, *messages: object) -> None:
        self.sock.sendall(frame(msgspec.msgpack.encode(messages)))

    def take(self) -> None:
        """The next bytes."""
        for payload in self.reader.feed(self.sock.recv(1 << 20)):
            report = self.decoder.decode(payload)
            assert isinstance(report, Report)
            self.last = report
            self.rejected += report.rejected
            self.flushed += report.flushed
            for update in report.updates:
                self.tokens.setdefault(update.key, []).extend(update.token_ids)
                if update.finish_reason is not None:
                    self.ended[update.key] = update.finish_reason

    def close(self) -> None:
        self.send(Stop())
        self.thread.join(10)
        assert not self.thread.is_alive()
        self.link.close()
        self.sock.close()
        self.engine.close()


@pytest.fixture
def front() -> Iterator[Front]:
    front = Front()
    yield front
    front.close()


def add(key: int, max_tokens: int = 5, **changes: Any) -> AddRequest:
    request = Request(f"request-{key}", [1, 2, key], SamplingParams(), seed=key, max_len=3 + max_tokens)
    message = AddRequest.of(key, request)
    for name, value in changes.items():
        setattr(message, name, value)
    return message


def test_requests_of_one_frame_run_together(front: Front) -> None:
    front.send(add(1), add(2, 9), add(3, 2))
    while len(front.ended) < 3:
        front.take()
    assert front.tokens == {
        1: fake_output([1, 2, 1], 5, 1),
        2: fake_output([1, 2, 2], 9, 2),
        3: fake_output([1, 2, 3], 2, 3),
    }


def test_a_bad_request_is_answered_alone(front: Front) -> None:
    bad = add(2, params={"temperature": -1.0})
    worse = add(3, params={"no_such_parameter": 1})
    broken = add(4, request_id="request-1")
    front.send(add(1), bad, worse, broken, add(5))
    while len(front.ended) < 2 or len(front.rejected) < 3:
        front.take()
    assert front.tokens == {1: fake_output([1, 2, 1], 5, 1), 5: fake_output([1, 2, 5], 5, 5)}
    assert [(rejected.key, rejected.status) for rejected in front.rejected] == [
        (2, "INVALID_ARGUMENT"),
        (3, "INVALID_ARGUMENT"),
        (4, "INVALID_ARGUMENT"),
    ]


def test_an_error_of_ours_is_answered_alone(front: Front, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: AddRequest) -> Request:
        raise KeyError("a bug")

    with monkeypatch.context() as patch:
        patch.setattr(AddRequest, "to_request", fail)
        front.send(add(1))
        while not front.rejected:
            front.take()
    assert front.rejected == [Rejected(1, "INTERNAL", "internal error: KeyError")]
    front.send(add(2))
    while not front.ended:
        front.take()


def test_a_full_queue() -> None:
    front = Front(max_num_seqs=1, max_num_waiting=2)
    front.send(*(add(key) for key in range(1, 6)))
    while len(front.ended) < 2 or len(front.rejected) < 3:
        front.take()
    assert {rejected.status for rejected in front.rejected} == {"RESOURCE_EXHAUSTED"}
    front.close()


def test_abort_frees_everything(front: Front) -> None:
    front.send(add(1, 2000), add(2, 2000))
    while len(front.tokens) < 2:
        front.take()
    front.send(AbortRequest(1), AbortRequest(2), AbortRequest(77))
    while front.last is None or front.last.load.num_running or front.last.load.kv_cache_usage:
        front.take()
    assert front.ended == {}
    front.send(add(1, 3, request_id="request-1"))  # the id is free again
    while not front.ended:
        front.take()


def test_the_cache_is_flushed_only_when_nothing_runs(front: Front) -> None:
    front.send(FlushCache(1))
    while not front.flushed:
        front.take()
    front.send(add(1, 2000), FlushCache(2))
    while len(front.flushed) < 2:
        front.take()
    assert front.flushed == [FlushResult(1, True), FlushResult(2, False)]
