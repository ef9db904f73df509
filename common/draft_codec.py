"""Frames of the draft protocol: values of common/draft_exchange.py to bytes and back.

Whatever comes from a peer is checked here once, and a frame that is wrong raises `DraftCodecError`: the lengths of all
columns, the counts, and the limits on rows and tokens of a frame. Whether a row, a generation or a token id makes sense
is for the one who knows: the sessions of the drafter, the landing buffer of the verifier.

Columns that stand in Python lists pass through `struct`, which needs 1.5 us for 64 numbers where numpy needs 4;
branches stay numpy arrays on both sides.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from itertools import accumulate, chain
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError

from common.draft_exchange import (
    NO_BRANCHES,
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
from common.errors import OutriderError
from common.protos.outrider.v1 import drafter_pb2 as pb

MAX_FRAME_ROWS = 1 << 16
"""Entries of one batch at most, whatever a hello has said."""
MAX_NAME_LENGTH = 256
"""Characters of an id or a reason; longer ones are cut when sent and refused when received."""

_SIZES = {"i": 4, "q": 8, "Q": 8, "d": 8}
_I4 = np.dtype("<i4")
_I8 = np.dtype("<i8")


class DraftCodecError(OutriderError):
    """A frame that cannot be read; the message names the field, what was expected and what was found."""

    status = "INVALID_ARGUMENT"


def encode_update(update: SessionUpdate, sequence: int, max_frame_tokens: int) -> list[bytes]:
    """Frames `sequence`, `sequence` + 1, ... that carry an update: more than one if long prompts do not fit in one.

    No row that is opened may be longer than `max_frame_tokens`.
    """
    if not update.opened:
        return [_update_frame(sequence, update.closed, [], update.committed)]
    groups: list[list[RowOpened]] = [[]]
    room = max_frame_tokens
    for opened in update.opened:
        if len(opened.token_ids) > room and groups[-1]:
            groups.append([])
            room = max_frame_tokens
        groups[-1].append(opened)
        room -= len(opened.token_ids)
    num_committed = sum(len(committed.token_ids) for committed in update.committed)
    if num_committed > room:
        groups.append([])
    last = len(groups) - 1
    return [
        _update_frame(
            sequence + index, update.closed if index == 0 else [], group, update.committed if index == last else []
        )
        for index, group in enumerate(groups)
    ]


def decode_verifier_frame(data: bytes, max_frame_tokens: int) -> tuple[int, VerifierHello | SessionUpdate]:
    """The sequence number and the content of a VerifierFrame.

    Raises:
        DraftCodecError: the frame cannot be read, or breaks a limit.
    """
    frame = pb.VerifierFrame()
    _parse(frame, data)
    if frame.HasField("hello"):
        if frame.HasField("closed") or frame.HasField("opened") or frame.HasField("committed"):
            raise DraftCodecError("hello: expected a frame of its own, found row changes in it")
        return frame.sequence, _decode_hello(frame.hello)
    closed: list[RowClosed] = []
    opened: list[RowOpened] = []
    committed: list[RowCommitted] = []
    if frame.HasField("closed"):
        rows = _numbers("closed.row", frame.closed.row, "i", None)
        closed = list(map(RowClosed, rows, _numbers("closed.generation", frame.closed.generation, "q", len(rows))))
    room = max_frame_tokens
    if frame.HasField("opened"):
        opened, room = _decode_opened(frame.opened, room)
    if frame.HasField("committed"):
        committed = _decode_committed(frame.committed, room)
    return frame.sequence, SessionUpdate(closed, opened, committed)


def encode_verifier_hello(hello: VerifierHello) -> bytes:
    return pb.VerifierFrame(
        hello=pb.VerifierHello(
            protocol_version=hello.protocol_version,
            verifier_id=hello.verifier_id[:MAX_NAME_LENGTH],
            model=_identity(hello.model),
            max_model_len=hello.max_model_len,
            max_rows=hello.max_rows,
            branch_budget=hello.branch_budget,
            branch_len=hello.branch_len,
            shared_memory_host=hello.shared_memory_host[:MAX_NAME_LENGTH],
        )
    ).SerializeToString()


def encode_reply(reply: DraftReply, load: DrafterLoad | None = None) -> bytes:
    """A DrafterFrame with branches, row errors and how busy the drafter is."""
    branches = reply.branches
    frame = pb.DrafterFrame(answered_sequence=reply.answered_sequence)
    if len(branches):
        frame.branches.row = branches.row.astype("<i4", copy=False).tobytes()
        frame.branches.generation = branches.generation.astype("<i8", copy=False).tobytes()
        frame.branches.base_len = branches.base_len.astype("<i4", copy=False).tobytes()
        frame.branches.num_tokens = branches.num_tokens.astype("<i4", copy=False).tobytes()
        frame.branches.token_ids = branches.token_ids.astype("<i4", copy=False).tobytes()
    for error in reply.row_errors:
        frame.row_errors.add(row=error.row, generation=error.generation, reason=error.reason[:MAX_NAME_LENGTH])
    if load is not None:
        frame.load.CopyFrom(encode_load(load))
    return frame.SerializeToString()


def encode_drafter_hello(hello: DrafterHello) -> bytes:
    """The first DrafterFrame of a stream."""
    return pb.DrafterFrame(
        hello_ack=pb.DrafterHello(
            protocol_version=hello.protocol_version,
            incarnation_id=hello.incarnation_id,
            model=_identity(hello.model),
            method=hello.method,
            limits=_limits(hello.limits),
            shared_memory_name=hello.shared_memory_name,
        )
    ).SerializeToString()


def encode_info(hello: DrafterHello, load: DrafterLoad, host_id: str) -> bytes:
    """An InfoResponse."""
    return pb.InfoResponse(
        protocol_version=hello.protocol_version,
        min_protocol_version=hello.protocol_version,
        incarnation_id=hello.incarnation_id,
        model=_identity(hello.model),
        method=hello.method,
        limits=_limits(hello.limits),
        load=encode_load(load),
        host_id=host_id,
    ).SerializeToString()


def encode_load(load: DrafterLoad) -> pb.Load:
    return pb.Load(
        num_rows=load.num_rows,
        max_rows=load.max_rows,
        num_streams=load.num_streams,
        num_waiting_frames=load.num_waiting_frames,
    )


def decode_drafter_frame(data: bytes, max_frame_tokens: int) -> DrafterHello | DraftReply:
    """The content of a DrafterFrame; its load is for those who watch, not for the exchange.

    Raises:
        DraftCodecError: the frame cannot be read, or breaks a limit.
    """
    frame = pb.DrafterFrame()
    _parse(frame, data)
    if frame.HasField("hello_ack"):
        ack = frame.hello_ack
        _check_name("hello_ack.incarnation_id", ack.incarnation_id)
        _check_name("hello_ack.method", ack.method)
        _check_name("hello_ack.shared_memory_name", ack.shared_memory_name)
        if not ack.incarnation_id:
            raise DraftCodecError("hello_ack.incarnation_id: expected an id, found none")
        limits = ack.limits
        return DrafterHello(
            incarnation_id=ack.incarnation_id,
            model=_decode_identity(ack.model),
            method=ack.method,
            limits=DrafterLimits(limits.max_rows, limits.max_model_len, limits.max_frame_tokens, limits.max_branch_len),
            protocol_version=ack.protocol_version,
            shared_memory_name=ack.shared_memory_name,
        )
    errors = frame.row_errors
    if len(errors) > MAX_FRAME_ROWS:
        raise DraftCodecError(f"row_errors: expected at most {MAX_FRAME_ROWS} entries, found {len(errors)}")
    row_errors = [RowError(error.row, error.generation, error.reason[:MAX_NAME_LENGTH]) for error in errors]
    branches = _decode_branches(frame.branches, max_frame_tokens) if frame.HasField("branches") else NO_BRANCHES
    return DraftReply(frame.answered_sequence, branches, row_errors)


def _update_frame(
    sequence: int, closed: Sequence[RowClosed], opened: Sequence[RowOpened], committed: Sequence[RowCommitted]
) -> bytes:
    frame = pb.VerifierFrame(sequence=sequence)
    if committed:
        rows, generations, base_lens, tokens = zip(*committed, strict=True)
        count = len(rows)
        flat = list(chain.from_iterable(tokens))
        i4 = f"<{count}i"
        frame.committed.row = struct.pack(i4, *rows)
        frame.committed.generation = struct.pack(f"<{count}q", *generations)
        frame.committed.base_len = struct.pack(i4, *base_lens)
        frame.committed.num_tokens = struct.pack(i4, *map(len, tokens))
        frame.committed.token_ids = struct.pack(f"<{len(flat)}i", *flat)
    if closed:
        frame.closed.row = _i4([entry.row for entry in closed])
        frame.closed.generation = _i8([entry.generation for entry in closed])
    if opened:
        frame.opened.CopyFrom(_open_batch(opened))
    return frame.SerializeToString()


def _open_batch(opened: Sequence[RowOpened]) -> pb.OpenBatch:
    return pb.OpenBatch(
        row=_i4([entry.row for entry in opened]),
        generation=_i8([entry.generation for entry in opened]),
        num_tokens=_i4([len(entry.token_ids) for entry in opened]),
        token_ids=_i4(list(chain.from_iterable(entry.token_ids for entry in opened))),
        prompt_len=_i4([entry.prompt_len for entry in opened]),
        max_len=_i4([entry.max_len for entry in opened]),
        num_speculative_tokens=_i4([entry.num_speculative_tokens for entry in opened]),
        seed=struct.pack(f"<{len(opened)}Q", *(entry.seed & 0xFFFFFFFFFFFFFFFF for entry in opened)),
        temperature=_f8([entry.temperature for entry in opened]),
        top_p=_f8([entry.top_p for entry in opened]),
        top_k=_i4([entry.top_k for entry in opened]),
        min_p=_f8([entry.min_p for entry in opened]),
        request_id=[entry.request_id[:MAX_NAME_LENGTH] for entry in opened],
    )


def _i4(values: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(values)}i", *values)


def _i8(values: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(values)}q", *values)


def _f8(values: Sequence[float]) -> bytes:
    return struct.pack(f"<{len(values)}d", *values)


def _parse(frame: Any, data: bytes) -> None:
    try:
        frame.ParseFromString(data)
    except DecodeError as error:
        raise DraftCodecError(f"frame of {len(data)} bytes: expected a {type(frame).__name__} ({error})") from None


def _column(name: str, data: bytes, dtype: Any, size: int, count: int) -> Any:
    """A column as a read-only array of `count` entries."""
    if len(data) != size * count:
        raise DraftCodecError(f"{name}: expected {count} entries of {size} bytes, found {len(data)} bytes")
    return np.frombuffer(data, dtype)


def _decode_committed(batch: pb.CommitBatch, room: int) -> list[RowCommitted]:
    data = batch.row
    count = len(data) // 4
    rows = _numbers("committed.row", data, "i", None)
    generations = _numbers("committed.generation", batch.generation, "q", count)
    base_lens = _numbers("committed.base_len", batch.base_len, "i", count)
    num_tokens = _numbers("committed.num_tokens", batch.num_tokens, "i", count)
    split = _split("committed", num_tokens, batch.token_ids, room)
    return list(map(RowCommitted._make, zip(rows, generations, base_lens, split, strict=True)))


def _decode_opened(batch: pb.OpenBatch, room: int) -> tuple[list[RowOpened], int]:
    rows = _numbers("opened.row", batch.row, "i", None)
    count = len(rows)
    num_tokens = _numbers("opened.num_tokens", batch.num_tokens, "i", count)
    split = _split("opened", num_tokens, batch.token_ids, room)
    columns = (
        _numbers("opened.generation", batch.generation, "q", count),
        _numbers("opened.prompt_len", batch.prompt_len, "i", count),
        _numbers("opened.max_len", batch.max_len, "i", count),
        _numbers("opened.num_speculative_tokens", batch.num_speculative_tokens, "i", count),
        _numbers("opened.seed", batch.seed, "Q", count),
        _numbers("opened.temperature", batch.temperature, "d", count),
        _numbers("opened.top_p", batch.top_p, "d", count),
        _numbers("opened.top_k", batch.top_k, "i", count),
        _numbers("opened.min_p", batch.min_p, "d", count),
    )
    request_ids = list(batch.request_id)
    if len(request_ids) != count:
        raise DraftCodecError(f"opened.request_id: expected {count} entries, found {len(request_ids)}")
    opened: list[RowOpened] = []
    for row, request_id, token_ids, generation, *rest in zip(rows, request_ids, split, *columns, strict=True):
        _check_name("opened.request_id", request_id)
        opened.append(RowOpened(row, generation, request_id, token_ids, *rest))
    return opened, room - sum(num_tokens)


def _decode_branches(batch: pb.BranchBatch, room: int) -> BranchBatch:
    data = batch.row
    count = len(data) // 4
    if count > MAX_FRAME_ROWS:
        raise DraftCodecError(f"branches.row: expected at most {MAX_FRAME_ROWS} entries, found {count}")
    num_tokens = _column("branches.num_tokens", batch.num_tokens, _I4, 4, count)
    tokens = batch.token_ids
    least = int(num_tokens.min()) if count else 1
    _check_counts("branches", least, int(num_tokens.sum(dtype=np.int64)), len(tokens), room)
    return BranchBatch(
        _column("branches.row", data, _I4, 4, count),
        _column("branches.generation", batch.generation, _I8, 8, count),
        _column("branches.base_len", batch.base_len, _I4, 4, count),
        num_tokens,
        np.frombuffer(tokens, _I4),
    )


def _numbers(name: str, data: bytes, code: str, count: int | None) -> tuple[Any, ...]:
    """A column as Python numbers; `count` entries, or any number up to MAX_FRAME_ROWS if None."""
    found, rest = divmod(len(data), _SIZES[code])
    if count is None:
        if rest or found > MAX_FRAME_ROWS:
            expected = f"at most {MAX_FRAME_ROWS} entries of {_SIZES[code]} bytes"
            raise DraftCodecError(f"{name}: expected {expected}, found {len(data)} bytes")
    elif rest or found != count:
        expected = f"{count} entries of {_SIZES[code]} bytes as in the first column"
        raise DraftCodecError(f"{name}: expected {expected}, found {len(data)} bytes")
    return struct.unpack(f"<{found}{code}", data)


def _split(name: str, num_tokens: tuple[int, ...], data: bytes, room: int) -> list[list[int]]:
    """The tokens of each entry, once the counts have been checked against the bytes that are there."""
    _check_counts(name, min(num_tokens, default=1), sum(num_tokens), len(data), room)
    tokens: list[int] = np.frombuffer(data, _I4).tolist()
    ends = list(accumulate(num_tokens))
    return [tokens[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def _check_counts(name: str, least: int, total: int, num_bytes: int, room: int) -> None:
    if least < 1:
        raise DraftCodecError(f"{name}.num_tokens: expected at least 1, found {least}")
    if total > room:
        raise DraftCodecError(f"{name}.num_tokens: expected at most {room} tokens left in this frame, found {total}")
    if num_bytes != 4 * total:
        raise DraftCodecError(f"{name}.token_ids: expected {4 * total} bytes for {total} tokens, found {num_bytes}")


def _decode_hello(hello: pb.VerifierHello) -> VerifierHello:
    _check_name("hello.verifier_id", hello.verifier_id)
    _check_name("hello.shared_memory_host", hello.shared_memory_host)
    return VerifierHello(
        verifier_id=hello.verifier_id,
        model=_decode_identity(hello.model),
        max_model_len=hello.max_model_len,
        max_rows=hello.max_rows,
        branch_budget=hello.branch_budget,
        branch_len=hello.branch_len,
        protocol_version=hello.protocol_version,
        shared_memory_host=hello.shared_memory_host,
    )


def _decode_identity(model: pb.ModelIdentity) -> ModelIdentity:
    _check_name("model.model_fingerprint", model.model_fingerprint)
    _check_name("model.vocabulary_fingerprint", model.vocabulary_fingerprint)
    return ModelIdentity(model.model_fingerprint, model.vocabulary_fingerprint, model.vocab_size)


def _check_name(field: str, value: str) -> None:
    if len(value) > MAX_NAME_LENGTH:
        raise DraftCodecError(f"{field}: expected at most {MAX_NAME_LENGTH} characters, found {len(value)}")


def _identity(model: ModelIdentity) -> pb.ModelIdentity:
    return pb.ModelIdentity(
        model_fingerprint=model.model_fingerprint,
        vocabulary_fingerprint=model.vocabulary_fingerprint,
        vocab_size=model.vocab_size,
    )


def _limits(limits: DrafterLimits) -> pb.Limits:
    return pb.Limits(
        max_rows=limits.max_rows,
        max_model_len=limits.max_model_len,
        max_frame_tokens=limits.max_frame_tokens,
        max_branch_len=limits.max_branch_len,
    )
