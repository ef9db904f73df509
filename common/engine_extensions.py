"""What Outrider adds to the VllmEngine protocol, for clients of its own: all of it optional, unseen by other clients.

Metadata of a Generate call, read by the verifier's front:

- `NUM_SPECULATIVE_TOKENS`: at most this many draft tokens a step; 0 turns speculation off.
- `NUM_OUTPUT_TOKENS`: N. The last N token ids of the prompt are output that the request got from another verifier
  before that failed. All other fields are those that the request had then: penalties, max_tokens, min_tokens and stop
  strings count the N tokens as output. The front repeats it in the initial metadata of its answer; a client that does
  not find it there knows that the tokens may be other ones.
- `SEED`: the seed where it does not fit the protocol's field, an unsigned number of 64 bits. Comes before the field
  `seed`, in which a negative number stands for its unsigned value. Repeated in the initial metadata too.
- `STEP_COUNTS`: "1" asks for the field below in each chunk.

`STEP_COUNTS_FIELD`, a field of `GenerateStreamChunk` that the protocol does not have, so that others skip it: a packed
list of varints, three for each step that the chunk covers: num_tokens, num_draft_tokens, num_accepted_tokens. The first
num_accepted_tokens of the step's tokens were draft tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

NUM_SPECULATIVE_TOKENS = "x-outrider-num-speculative-tokens"
NUM_OUTPUT_TOKENS = "x-outrider-num-output-tokens"
SEED = "x-outrider-seed"
STEP_COUNTS = "x-outrider-step-counts"

STEP_COUNTS_FIELD = 1001
_LENGTH_DELIMITED = 2
_MAX_VARINT_BYTES = 5  # of a count below 2**35


class StepCounts(NamedTuple):
    """One step of one output."""

    num_tokens: int
    num_draft_tokens: int
    num_accepted_tokens: int


def encode_step_counts(steps: Iterable[Sequence[int]]) -> bytes:
    """The field as bytes: `chunk.MergeFromString(encode_step_counts(steps))` puts it into a chunk."""
    payload = b"".join(_varint(count) for step in steps for count in step)
    return _varint(STEP_COUNTS_FIELD << 3 | _LENGTH_DELIMITED) + _varint(len(payload)) + payload


def decode_step_counts(payload: bytes, num_tokens: int) -> list[StepCounts] | None:
    """The steps of a chunk of `num_tokens` tokens; None where the payload does not say so of exactly that many."""
    counts: list[int] = []
    value = shift = 0
    for byte in payload:
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            counts.append(value)
            value = shift = 0
        elif shift >= 7 * _MAX_VARINT_BYTES:
            return None
    if shift or len(counts) % 3:
        return None
    steps = [StepCounts(*counts[start : start + 3]) for start in range(0, len(counts), 3)]
    if sum(step.num_tokens for step in steps) != num_tokens:
        return None
    if any(step.num_accepted_tokens > min(step.num_tokens, step.num_draft_tokens) for step in steps):
        return None
    return steps


def _varint(value: int) -> bytes:
    parts = bytearray()
    while value >= 0x80:
        parts.append(value & 0x7F | 0x80)
        value >>= 7
    parts.append(value)
    return bytes(parts)
