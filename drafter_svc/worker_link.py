"""Messages between the process that speaks gRPC and the one that drafts: a few bytes in front of a frame, on a socket.

The RPC side passes frames on as they are; only the worker reads them. So the RPC loop costs the same whatever a frame
holds, and no bad frame can end it.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import NamedTuple

HEADER = struct.Struct("<BQII")


class Kind(IntEnum):
    """What a message is."""

    READY = 0
    """From the worker, once: it is ready; the payload is its incarnation id."""
    FAILED = 1
    """From the worker, once: it cannot start; the payload is the error's status and message, a line each."""
    FRAME = 2
    """A frame of a stream, either way. From the worker, `num_frames` frames of the verifier are answered by it."""
    END = 3
    """The stream has ended. From the worker, the payload is a status and a message, a line each."""
    INFO = 4
    """A request for an InfoResponse, and the answer, under the same stream number."""
    COUNTS = 6
    """A request for `drafter_svc.metrics.WorkerCounts`, and the answer, under the same stream number."""
    BROKEN = 5
    """Within the worker: the stream's shared memory is damaged; the payload says how."""


class Message(NamedTuple):
    kind: int
    stream: int
    num_frames: int
    payload: bytes


def pack(kind: int, stream: int = 0, payload: bytes = b"", num_frames: int = 0) -> bytes:
    return HEADER.pack(kind, stream, num_frames, len(payload)) + payload


def unpack_all(buffer: bytearray) -> list[Message]:
    """Take the complete messages from the front of `buffer`."""
    messages: list[Message] = []
    position = 0
    while len(buffer) - position >= HEADER.size:
        kind, stream, num_frames, length = HEADER.unpack_from(buffer, position)
        end = position + HEADER.size + length
        if end > len(buffer):
            break
        messages.append(Message(kind, stream, num_frames, bytes(buffer[position + HEADER.size : end])))
        position = end
    del buffer[:position]
    return messages
