"""Frames of many verifiers: one that sends nonsense loses its stream, and nobody else loses anything."""

from __future__ import annotations

import pytest
import torch

from common.draft_codec import decode_drafter_frame, encode_update, encode_verifier_hello
from common.draft_exchange import DrafterHello, DraftReply, ModelIdentity, RowCommitted, SessionUpdate
from common.protos.outrider.v1 import drafter_pb2 as pb
from drafter_svc.core import DrafterCore
from drafter_svc.frame_service import FrameService
from drafter_svc.sessions import RowPool
from drafter_svc.worker_link import Kind, Message, pack, unpack_all
from model_executor.row_state import RowState
from tests.unit.drafter_svc.test_sessions import LIMITS, make_core, make_hello, open_rows, opened

HELLO = encode_verifier_hello(make_hello())


def frame(update: SessionUpdate, sequence: int) -> bytes:
    (data,) = encode_update(update, sequence, LIMITS.max_frame_tokens)
    return data


def answers(service: FrameService, *messages: tuple[int, bytes]) -> list[Message]:
    out = service.handle([Message(Kind.FRAME, stream, 0, data) for stream, data in messages])
    return unpack_all(bytearray(b"".join(out)))


def reply(message: Message) -> DraftReply:
    assert message.kind == Kind.FRAME
    content = decode_drafter_frame(message.payload, 1000)
    assert isinstance(content, DraftReply)
    return content


@pytest.fixture
def core() -> DrafterCore:
    return make_core()


@pytest.fixture
def service(core: DrafterCore) -> FrameService:
    return FrameService(core)


def test_hello_then_one_answer_for_all_frames_at_hand(service: FrameService) -> None:
    (ack,) = answers(service, (1, HELLO))
    assert isinstance(decode_drafter_frame(ack.payload, 0), DrafterHello)
    answers(service, (2, HELLO))
    first, second = answers(
        service,
        (1, frame(open_rows(opened(0)), 1)),
        (2, frame(open_rows(opened(3)), 1)),
        (1, frame(SessionUpdate(committed=[RowCommitted(0, 1, 13, [6])]), 2)),
    )
    assert (first.stream, first.num_frames, reply(first).answered_sequence) == (1, 2, 2)
    assert [(b.row, b.base_len) for b in reply(first).branches.to_list()] == [(0, 14)]
    assert (second.stream, second.num_frames) == (2, 1)
    assert [(b.row, b.base_len) for b in reply(second).branches.to_list()] == [(3, 13)]


def test_repeated_frames_change_nothing_and_are_answered(service: FrameService, core: DrafterCore) -> None:
    answers(service, (1, HELLO))
    frames = [
        frame(open_rows(opened(0)), 1),
        frame(SessionUpdate(committed=[RowCommitted(0, 1, 13, [6])]), 2),
        frame(SessionUpdate(committed=[RowCommitted(0, 1, 14, [7])]), 3),
    ]
    for data in frames:
        answers(service, (1, data))
    for data in (*frames, *reversed(frames)):
        (message,) = answers(service, (1, data))
        assert message.num_frames == 1
        assert reply(message).row_errors == []
    assert service.num_repeated_frames == 6
    assert core.load().num_rows == 1


def test_a_frame_that_was_overtaken_still_counts(service: FrameService, core: DrafterCore) -> None:
    answers(service, (1, HELLO), (1, frame(open_rows(opened(0)), 1)), (1, frame(open_rows(opened(1)), 3)))
    answers(service, (1, frame(open_rows(opened(2)), 2)))
    assert core.load().num_rows == 3
    answers(service, (1, frame(open_rows(opened(3)), (1 << 64) - 1)))  # a jump of any size
    answers(service, (1, frame(open_rows(opened(3, generation=2)), 4)))
    assert service.num_repeated_frames == 1
    assert core.load().num_rows == 4


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"\xff\xff\xff", "INVALID_ARGUMENT"),
        (HELLO, "INVALID_ARGUMENT"),
        (pb.VerifierFrame(committed=pb.CommitBatch(row=b"123")).SerializeToString(), "INVALID_ARGUMENT"),
        (frame(open_rows(opened(0)), 1)[:-3], "INVALID_ARGUMENT"),
    ],
)
def test_a_malformed_frame_ends_its_stream_alone(
    service: FrameService, core: DrafterCore, data: bytes, status: str
) -> None:
    answers(service, (1, HELLO), (2, HELLO))
    answers(service, (1, frame(open_rows(opened(0)), 1)), (2, frame(open_rows(opened(0)), 1)))
    messages = answers(service, (1, data), (1, frame(open_rows(opened(1)), 2)), (2, frame(open_rows(opened(1)), 2)))
    assert [(message.kind, message.stream) for message in messages] == [(Kind.END, 1), (Kind.FRAME, 2)]
    assert messages[0].payload.startswith(f"{status}\n".encode())
    assert service.num_malformed_frames == 1
    assert core.load().num_rows == 2
    service.handle([Message(Kind.END, 1, 0, b""), Message(Kind.END, 2, 0, b"")])
    assert (core.load().num_rows, core.load().num_streams) == (0, 0)


def test_rows_before_a_hello_and_a_hello_that_does_not_fit(service: FrameService) -> None:
    (first,) = answers(service, (1, frame(open_rows(opened(0)), 1)))
    assert first.payload.startswith(b"INVALID_ARGUMENT\nhello: expected it in the first frame")
    (second,) = answers(service, (2, encode_verifier_hello(make_hello(protocol_version=7))))
    assert second.payload == b"FAILED_PRECONDITION\nprotocol version: the drafter speaks 1, the verifier 7"
    (third,) = answers(service, (3, encode_verifier_hello(make_hello(model=ModelIdentity()))))
    assert third.payload.startswith(b"INVALID_ARGUMENT\nhello.model.vocab_size")


class _Broken:
    """A method with a bug."""

    def propose(self, rows: RowState, idx_mapping: torch.Tensor, max_draft_tokens: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("a bug")

    def observe(self, update: SessionUpdate) -> None: ...

    def close(self) -> None: ...


def test_a_method_with_a_bug_costs_drafts_and_nothing_else() -> None:
    pool = RowPool(RowState(4, 32, 16, torch.device("cpu")))
    service = FrameService(DrafterCore(_Broken(), "broken", pool, LIMITS, ModelIdentity()))
    answers(service, (1, HELLO))
    (message,) = answers(service, (1, frame(open_rows(opened(0)), 1)))
    assert reply(message).answered_sequence == 1
    assert len(reply(message).branches) == 0


def test_info_says_how_busy_it_is(service: FrameService) -> None:
    answers(service, (1, HELLO), (1, frame(open_rows(opened(0), opened(1)), 1)))
    (message,) = unpack_all(bytearray(b"".join(service.handle([Message(Kind.INFO, 77, 0, b"")]))))
    info = pb.InfoResponse.FromString(message.payload)
    assert message.stream == 77
    assert (info.load.num_rows, info.load.max_rows, info.load.num_streams) == (2, 4, 1)
    assert (info.method, info.protocol_version, info.limits.max_model_len) == ("ngram", 1, 32)
    assert info.incarnation_id
    assert info.host_id


def test_messages_survive_any_cut() -> None:
    data = pack(Kind.FRAME, 1 << 40, b"abc", 3) + pack(Kind.END, 2) + pack(Kind.INFO, 3, b"x" * 5000)
    whole = unpack_all(bytearray(data))
    assert [message.payload for message in whole] == [b"abc", b"", b"x" * 5000]
    buffer, found = bytearray(), []
    for start in range(0, len(data), 7):
        buffer += data[start : start + 7]
        found += unpack_all(buffer)
    assert found == whole
    assert not buffer
