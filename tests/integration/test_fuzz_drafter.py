"""Streams of frames that no verifier would send: each ends with a status, and the other verifiers go on.

A stream is a list of frames, of which the first is a hello or not, and a way to end. Several run at the same time.
"""

from __future__ import annotations

import contextlib
import queue
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from common.draft_codec import decode_drafter_frame, encode_update, encode_verifier_hello
from common.draft_exchange import (
    DrafterHello,
    DraftReply,
    ModelIdentity,
    RowCommitted,
    RowError,
    RowOpened,
    SessionUpdate,
    VerifierHello,
)
from common.protos.outrider.v1 import drafter_pb2 as pb
from common.shm.host import boot_id
from tests.drafter_process import DrafterProcess, running_drafter, wait_until
from tests.proto_strategies import columns, damaged, floats, messages, signed, texts, unsigned
from tests.remote_llm import info

VOCAB_SIZE, MAX_ROWS, MAX_MODEL_LEN = 320, 16, 256
CALL_LIMIT_S = 20.0
STREAMS_AT_ONCE = 4
REFUSALS = {
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
}
ENDINGS: dict[str, set[grpc.StatusCode]] = {
    "refused": set(),
    "closed": {grpc.StatusCode.OK},
    "cancelled": {grpc.StatusCode.CANCELLED},
}
NO_FRAME = b"\xff"
HELLO = VerifierHello("fuzz", ModelIdentity(vocab_size=VOCAB_SIZE), MAX_MODEL_LEN, 8, 4, 8)


@dataclass(frozen=True)
class Script:
    frames: list[bytes]
    ending: str
    """`refused`: with bytes that are no frame; `closed`: by the verifier; `cancelled`."""


# -- strategies --------------------------------------------------------------------------------------------------------

ROWS = st.integers(-1, 9) | signed(31)
GENERATIONS = st.integers(-1, 3) | signed(63)
TOKENS = st.integers(0, 5) | st.integers(0, VOCAB_SIZE - 1)
ANY_TOKENS = TOKENS | signed(31)


@st.composite
def hellos(draw: st.DrawFn) -> bytes:
    values: dict[str, Any] = {
        "protocol_version": 1,
        "verifier_id": "fuzz",
        "model": pb.ModelIdentity(vocab_size=VOCAB_SIZE),
        "max_model_len": MAX_MODEL_LEN,
        "max_rows": 8,
        "branch_budget": 4,
        "branch_len": 8,
    }
    numbers = sorted(name for name, value in values.items() if isinstance(value, int))
    change = draw(st.sampled_from(["nothing", "nothing", "nothing", "number", "model", "shared memory", "any"]))
    if change == "number":
        values[draw(st.sampled_from(numbers))] = draw(unsigned(32))
    elif change == "model":
        values["model"] = draw(messages(pb.ModelIdentity.DESCRIPTOR))
    elif change == "shared memory":
        values["shared_memory_host"] = draw(texts() | st.just(boot_id()))
    elif change == "any":
        return draw(messages(pb.VerifierFrame.DESCRIPTOR)).SerializeToString()
    return pb.VerifierFrame(hello=pb.VerifierHello(**values)).SerializeToString()


@st.composite
def row_changes(draw: st.DrawFn) -> tuple[list[int], list[int], list[list[int]]]:
    """Rows, generations and tokens, as many of each; most of them make sense."""
    makes_sense = draw(st.booleans())
    count = draw(st.integers(0, 4))
    rows = draw(st.lists(st.integers(0, 7) if makes_sense else ROWS, min_size=count, max_size=count))
    generations = draw(st.lists(st.integers(0, 3) if makes_sense else GENERATIONS, min_size=count, max_size=count))
    entry = st.lists(TOKENS if makes_sense else ANY_TOKENS, min_size=1, max_size=20)
    return rows, generations, draw(st.lists(entry, min_size=count, max_size=count))


@st.composite
def updates(draw: st.DrawFn) -> bytes:
    """A frame whose columns fit together, whatever stands in them."""
    closed = pb.CloseBatch()
    rows, generations, _ = draw(row_changes())
    if draw(st.integers(0, 3)) == 0:
        closed = pb.CloseBatch(row=_pack("i", rows), generation=_pack("q", generations))
    rows, generations, tokens = draw(row_changes())
    count = len(rows)

    def some(numbers: st.SearchStrategy[Any]) -> list[Any]:
        return draw(st.lists(numbers, min_size=count, max_size=count))

    opened = pb.OpenBatch(
        row=_pack("i", rows),
        generation=_pack("q", generations),
        num_tokens=_pack("i", list(map(len, tokens))),
        token_ids=_pack("i", [token for entry in tokens for token in entry]),
        prompt_len=_pack("i", some(signed(31))),
        max_len=_pack("i", some(st.just(MAX_MODEL_LEN) | signed(31))),
        num_speculative_tokens=_pack("i", some(signed(31))),
        seed=_pack("Q", some(unsigned(64))),
        temperature=_pack("d", some(floats())),
        top_p=_pack("d", some(floats())),
        top_k=_pack("i", some(signed(31))),
        min_p=_pack("d", some(floats())),
        request_id=some(texts()),
    )
    rows, generations, tokens = draw(row_changes())
    base_lens = draw(st.lists(st.integers(0, 40) | signed(31), min_size=len(rows), max_size=len(rows)))
    committed = pb.CommitBatch(
        row=_pack("i", rows),
        generation=_pack("q", generations),
        base_len=_pack("i", base_lens),
        num_tokens=_pack("i", list(map(len, tokens))),
        token_ids=_pack("i", [token for entry in tokens for token in entry]),
    )
    sequence = draw(st.integers(0, 9) | unsigned(64))
    frame = pb.VerifierFrame(sequence=sequence, closed=closed, opened=opened, committed=committed)
    return frame.SerializeToString()


@st.composite
def loose_columns(draw: st.DrawFn) -> bytes:
    """Columns that fit by chance."""
    committed = pb.CommitBatch(
        row=draw(columns("i", ROWS)),
        generation=draw(columns("q", GENERATIONS)),
        base_len=draw(columns("i", signed(31))),
        num_tokens=draw(columns("i", signed(31))),
        token_ids=draw(columns("i", ANY_TOKENS, 20)),
    )
    opened = pb.OpenBatch(row=draw(columns("i", ROWS)), num_tokens=draw(columns("i", signed(31))))
    frame = pb.VerifierFrame(sequence=draw(unsigned(64)), committed=committed)
    if draw(st.booleans()):
        frame.opened.CopyFrom(opened)
    return frame.SerializeToString()


def _pack(code: str, numbers: Sequence[Any]) -> bytes:
    return struct.pack(f"<{len(numbers)}{code}", *numbers)


WRONG_FRAMES = st.one_of(
    st.binary(max_size=60),
    hellos(),
    damaged(updates()),
    loose_columns(),
    messages(pb.VerifierFrame.DESCRIPTOR).map(lambda message: message.SerializeToString()),
)


@st.composite
def scripts(draw: st.DrawFn) -> Script:
    frames = [draw(hellos())] if draw(st.integers(0, 9)) else []
    frames += draw(st.lists(updates(), max_size=10))
    if draw(st.booleans()):
        frames += draw(st.lists(WRONG_FRAMES, min_size=1, max_size=3))
    return Script(frames, draw(st.sampled_from(["refused", "closed", "cancelled"])))


# -- peers -------------------------------------------------------------------------------------------------------------


class Peer:
    """A stream to the drafter."""

    def __init__(self, channel: grpc.Channel, timeout: float = CALL_LIMIT_S) -> None:
        self._frames: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        call: Any = channel.stream_stream("/outrider.v1.Drafter/Session")
        self.call = call(iter(self._frames.get, None), timeout=timeout)

    def send(self, frame: bytes) -> None:
        self._frames.put(frame)

    def close(self) -> None:
        """Nothing more is sent."""
        self._frames.put(None)

    def read_all(self) -> list[DrafterHello | DraftReply]:
        frames: list[bytes] = []
        with contextlib.suppress(grpc.RpcError):
            frames.extend(self.call)
        return [decode_drafter_frame(frame, 1 << 19) for frame in frames]


def run_together(channel: grpc.Channel, some: Sequence[Script]) -> None:
    peers = [Peer(channel) for _ in some]
    for index in range(max(len(script.frames) for script in some)):
        for peer, script in zip(peers, some, strict=True):
            if index < len(script.frames):
                peer.send(script.frames[index])
    for peer, script in zip(peers, some, strict=True):
        if script.ending == "refused":
            peer.send(NO_FRAME)
        elif script.ending == "cancelled":
            peer.call.cancel()
        else:
            peer.close()
    for peer, script in zip(peers, some, strict=True):
        replies = peer.read_all()
        peer.close()
        code, details = peer.call.code(), str(peer.call.details())
        allowed = REFUSALS | ENDINGS[script.ending]
        assert code in allowed, (code, details, script)
        assert len(details) < 2000
        check_replies(replies)


def check_replies(replies: list[DrafterHello | DraftReply]) -> None:
    """The drafter itself keeps to the protocol, whoever it talks to."""
    for number, reply in enumerate(replies):
        assert isinstance(reply, DrafterHello) == (number == 0)
        if isinstance(reply, DraftReply):
            for row, base_len, count in zip(
                reply.branches.row, reply.branches.base_len, reply.branches.num_tokens, strict=True
            ):
                assert row >= 0
                assert base_len >= 1
                assert base_len + count <= MAX_MODEL_LEN
            tokens = reply.branches.token_ids
            assert len(tokens) == 0 or (tokens.min() >= 0 and tokens.max() < 2**31)


@dataclass
class Witness:
    """A verifier like any other, beside them all: one row, whose text grows with each question."""

    peer: Peer
    _length: int = 6
    _sequence: int = 1
    _answers: Any = field(init=False)

    def __post_init__(self) -> None:
        self._answers = iter(self.peer.call)
        self.peer.send(encode_verifier_hello(HELLO))
        hello = decode_drafter_frame(next(self._answers), 1 << 19)
        assert isinstance(hello, DrafterHello)
        opened = RowOpened(0, 1, "witness", [1, 2, 3] * 2, 6, MAX_MODEL_LEN, 3, 0, 0.0, 1.0, 0, 0.0)
        self._ask(SessionUpdate(opened=[opened]))

    def check(self) -> None:
        """One more token, and the branch that must follow."""
        committed = RowCommitted(0, 1, self._length, [1 + self._length % 3])
        self._length += 1
        self._ask(SessionUpdate(committed=[committed]))

    def _ask(self, update: SessionUpdate) -> None:
        (frame,) = encode_update(update, self._sequence, 1000)
        self.peer.send(frame)
        reply = decode_drafter_frame(next(self._answers), 1 << 19)
        assert isinstance(reply, DraftReply)
        assert reply.answered_sequence == self._sequence
        assert reply.row_errors == list[RowError]()
        tokens = reply.branches.token_ids.tolist()
        assert tokens == [1 + (self._length + index) % 3 for index in range(len(tokens))]
        assert len(tokens) >= 3
        self._sequence += 1


@pytest.fixture(scope="module")
def shm_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("shm")


@pytest.fixture(scope="module")
def drafter(shm_dir: Path) -> Iterator[DrafterProcess]:
    limits = ["--max-rows", str(MAX_ROWS), "--max-model-len", str(MAX_MODEL_LEN), "--max-verifiers", "6"]
    with running_drafter(*limits, "--shm-dir", str(shm_dir)) as process:
        yield process


def is_idle(address: str) -> bool:
    load = info(address).load
    return (load.num_rows, load.num_streams) == (1, 1)


def test_any_frames(drafter: DrafterProcess, shm_dir: Path) -> None:
    count = 0
    options = [("grpc.use_local_subchannel_pool", 1)]
    with grpc.insecure_channel(drafter.address, options) as channel:
        witness = Witness(Peer(channel, timeout=300.0))

        @settings(max_examples=150, phases=[Phase.generate], suppress_health_check=[HealthCheck.too_slow])
        @given(st.lists(scripts(), min_size=1, max_size=STREAMS_AT_ONCE))
        def run(some: list[Script]) -> None:
            nonlocal count
            count += sum(len(script.frames) + 1 for script in some)
            run_together(channel, some)
            if witness._length < MAX_MODEL_LEN - 8:
                witness.check()
            wait_until(lambda: is_idle(drafter.address), "all rows but the witness's are back")

        run()
        assert count >= 1000
    wait_until(lambda: info(drafter.address).load.num_streams == 0, "the last stream is gone")
    assert [path for path in shm_dir.iterdir() if path.suffix != ".lock"] == []
    assert drafter.process.popen.poll() is None
    assert "Traceback" not in drafter.process.error_text
    assert "exception" not in drafter.process.error_text
