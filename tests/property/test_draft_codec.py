"""The codec gives back what it was given, and refuses everything else with one kind of error."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.draft_codec import (
    DraftCodecError,
    decode_drafter_frame,
    decode_verifier_frame,
    encode_drafter_hello,
    encode_reply,
    encode_update,
    encode_verifier_hello,
)
from common.draft_exchange import (
    Branch,
    BranchBatch,
    DrafterHello,
    DrafterLimits,
    DrafterLoad,
    DraftReply,
    ModelIdentity,
    RowClosed,
    RowCommitted,
    RowError,
    RowOpened,
    SessionUpdate,
    VerifierHello,
)
from common.protos.outrider.v1 import drafter_pb2 as pb

MAX_TOKENS = 64

i32 = st.integers(-(1 << 31), (1 << 31) - 1)
i64 = st.integers(-(1 << 63), (1 << 63) - 1)
number = st.floats(allow_nan=False)
name = st.text(max_size=20)
tokens = st.lists(i32, min_size=1, max_size=6)

opened = st.builds(
    RowOpened,
    row=i32,
    generation=i64,
    request_id=name,
    token_ids=st.lists(i32, min_size=1, max_size=20),
    prompt_len=i32,
    max_len=i32,
    num_speculative_tokens=i32,
    seed=st.integers(0, (1 << 64) - 1),
    temperature=number,
    top_p=number,
    top_k=i32,
    min_p=number,
)
updates = st.builds(
    SessionUpdate,
    closed=st.lists(st.builds(RowClosed, i32, i64), max_size=5),
    opened=st.lists(opened, max_size=8),
    committed=st.lists(st.builds(RowCommitted, i32, i64, i32, tokens), max_size=8),
)
branches = st.lists(st.builds(Branch, i32, i64, i32, tokens), max_size=8)
row_errors = st.lists(st.builds(RowError, i32, i64, name), max_size=4)
identity = st.builds(ModelIdentity, name, name, st.integers(0, (1 << 32) - 1))
u32 = st.integers(0, (1 << 32) - 1)


@settings(max_examples=200)
@given(update=updates, sequence=st.integers(1, 1 << 40))
def test_updates_come_back(update: SessionUpdate, sequence: int) -> None:
    frames = encode_update(update, sequence, MAX_TOKENS)
    closed: list[RowClosed] = []
    opened: list[RowOpened] = []
    committed: list[RowCommitted] = []
    for index, frame in enumerate(frames):
        number, content = decode_verifier_frame(frame, MAX_TOKENS)
        assert number == sequence + index
        assert isinstance(content, SessionUpdate)
        # What belongs to later frames must not be applied before it.
        assert not (content.closed and (opened or committed))
        assert not (content.opened and committed)
        closed += content.closed
        opened += content.opened
        committed += content.committed
    assert SessionUpdate(closed, opened, committed) == update


@settings(max_examples=100)
@given(branches=branches, errors=row_errors, sequence=st.integers(0, 1 << 40))
def test_replies_come_back(branches: list[Branch], errors: list[RowError], sequence: int) -> None:
    reply = DraftReply(sequence, BranchBatch.of(branches), errors)
    found = decode_drafter_frame(encode_reply(reply, DrafterLoad(1, 2, 3, 4)), MAX_TOKENS)
    assert isinstance(found, DraftReply)
    assert found.answered_sequence == sequence
    assert found.branches.to_list() == branches
    assert found.row_errors == errors


@given(hello=st.builds(VerifierHello, name, identity, u32, u32, u32, u32, u32))
def test_a_hello_comes_back(hello: VerifierHello) -> None:
    assert decode_verifier_frame(encode_verifier_hello(hello), 0) == (0, hello)


@given(
    ack=st.builds(DrafterHello, st.text("ab", min_size=1), identity, name, st.builds(DrafterLimits, u32, u32, u32, u32))
)
def test_the_answer_to_a_hello_comes_back(ack: DrafterHello) -> None:
    assert decode_drafter_frame(encode_drafter_hello(ack), 0) == ack


@settings(max_examples=500)
@given(data=st.binary(max_size=200))
def test_garbage_is_refused_or_means_nothing(data: bytes) -> None:
    for decode in (decode_verifier_frame, decode_drafter_frame):
        with contextlib.suppress(DraftCodecError):
            decode(data, MAX_TOKENS)


column = st.binary(max_size=24)


@settings(max_examples=500)
@given(columns=st.lists(column, min_size=18, max_size=18), ids=st.lists(name, max_size=3))
def test_columns_of_any_length_are_refused_or_fit(columns: list[bytes], ids: list[str]) -> None:
    take = iter(columns)
    frame = pb.VerifierFrame(
        sequence=1,
        committed=pb.CommitBatch(**{field: next(take) for field in pb.CommitBatch.DESCRIPTOR.fields_by_name}),
        opened=pb.OpenBatch(
            request_id=ids,
            **{field: next(take) for field in pb.OpenBatch.DESCRIPTOR.fields_by_name if field != "request_id"},
        ),
    )
    try:
        _, update = decode_verifier_frame(frame.SerializeToString(), MAX_TOKENS)
    except DraftCodecError:
        return
    assert isinstance(update, SessionUpdate)
    assert all(entry.token_ids for entry in (*update.opened, *update.committed))


@settings(max_examples=300)
@given(columns=st.lists(column, min_size=5, max_size=5))
def test_branch_columns_of_any_length_are_refused_or_fit(columns: list[bytes]) -> None:
    fields = dict(zip(pb.BranchBatch.DESCRIPTOR.fields_by_name, columns, strict=True))
    frame = pb.DrafterFrame(branches=pb.BranchBatch(**fields)).SerializeToString()
    try:
        reply = decode_drafter_frame(frame, MAX_TOKENS)
    except DraftCodecError:
        return
    assert isinstance(reply, DraftReply)
    assert sum(len(branch.token_ids) for branch in reply.branches.to_list()) == len(reply.branches.token_ids)


def _i4(*values: int) -> bytes:
    return b"".join(value.to_bytes(4, "little", signed=True) for value in values)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"generation": b"\0" * 7}, r"committed.generation: expected 1 entries of 8 bytes"),
        ({"row": b"\0" * 5}, r"committed.row: expected at most 65536 entries of 4 bytes, found 5 bytes"),
        ({"num_tokens": _i4(-1)}, r"committed.num_tokens: expected at least 1, found -1"),
        ({"num_tokens": _i4(0), "token_ids": b""}, r"committed.num_tokens: expected at least 1, found 0"),
        ({"num_tokens": _i4(1 << 30)}, r"committed.num_tokens: expected at most 64 tokens left .* found 1073741824"),
        ({"token_ids": _i4(1)}, r"committed.token_ids: expected 8 bytes for 2 tokens, found 4"),
    ],
)
def test_the_error_names_what_was_wrong(changes: dict[str, bytes], message: str) -> None:
    good = {"row": _i4(0), "generation": b"\0" * 8, "base_len": _i4(5), "num_tokens": _i4(2), "token_ids": _i4(1, 2)}
    frame = pb.VerifierFrame(sequence=1, committed=pb.CommitBatch(**(good | changes)))
    with pytest.raises(DraftCodecError, match=message):
        decode_verifier_frame(frame.SerializeToString(), MAX_TOKENS)


def test_a_batch_of_too_many_rows_is_refused() -> None:
    frame = pb.VerifierFrame(closed=pb.CloseBatch(row=b"\0" * (4 << 17), generation=b"\0" * (8 << 17)))
    with pytest.raises(DraftCodecError, match=r"closed.row: expected at most 65536 entries"):
        decode_verifier_frame(frame.SerializeToString(), MAX_TOKENS)


def test_a_hello_stands_alone() -> None:
    frame = pb.VerifierFrame(hello=pb.VerifierHello(), closed=pb.CloseBatch())
    with pytest.raises(DraftCodecError, match="hello: expected a frame of its own"):
        decode_verifier_frame(frame.SerializeToString(), MAX_TOKENS)
