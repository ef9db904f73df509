"""Whatever a drafter says, a verifier goes on: drafts are tokens of the vocabulary, few enough, or none."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from common.draft_codec import DraftCodecError, decode_drafter_frame
from common.draft_exchange import DraftReply, RowClosed, SessionUpdate
from common.protos.outrider.v1 import drafter_pb2 as pb
from tests.proto_strategies import damaged, messages, signed, texts, unsigned
from tests.unit.drafts.test_exchange import NUM_ROWS, VOCAB_SIZE, Clock, K, ScriptedTransport, Verifier
from verifier_svc.drafts.exchange import _OPENS_BITS
from verifier_svc.drafts.transport import Arrival

MAX_FRAME_TOKENS = 1000
OPENED = (0, 1, NUM_ROWS - 1)
TEXT = [1, 2, 3, 4, 5, 6]


@st.composite
def replies(draw: st.DrawFn) -> bytes:
    """Columns that fit together; what stands in them is true, nearly true or nonsense."""
    count = draw(st.integers(0, 5))

    def column(code: str, numbers: st.SearchStrategy[int]) -> bytes:
        return _pack(code, draw(st.lists(numbers, min_size=count, max_size=count)))

    tokens = draw(st.lists(st.lists(_TOKENS, min_size=1, max_size=20), min_size=count, max_size=count))
    branches = pb.BranchBatch(
        row=column("i", st.integers(-1, NUM_ROWS) | signed(31)),
        # A row's generation on the wire counts how often it was opened, too.
        generation=column("q", st.integers(1, 3).map(lambda opens: (1 << _OPENS_BITS) + opens) | signed(63)),
        base_len=column("i", st.integers(0, 20) | signed(31)),
        num_tokens=_pack("i", list(map(len, tokens))),
        token_ids=_pack("i", [token for entry in tokens for token in entry]),
    )
    frame = pb.DrafterFrame(answered_sequence=draw(unsigned(64)), branches=branches)
    for _ in range(draw(st.integers(0, 3))):
        row, generation = draw(st.integers(-1, NUM_ROWS) | signed(31)), draw(st.integers(0, 3) | signed(63))
        frame.row_errors.add(row=row, generation=generation, reason=draw(texts()))
    return frame.SerializeToString()


_TOKENS = st.integers(0, VOCAB_SIZE - 1) | st.sampled_from([-1, VOCAB_SIZE, 2**31 - 1, -(2**31)])
FRAMES = st.one_of(
    replies(),
    replies(),
    damaged(replies()),
    messages(pb.DrafterFrame.DESCRIPTOR).map(lambda message: message.SerializeToString()),
)


def _pack(code: str, numbers: Sequence[Any]) -> bytes:
    return struct.pack(f"<{len(numbers)}{code}", *numbers)


@settings(max_examples=200)
@given(frames=st.lists(FRAMES, max_size=12))
def test_any_replies(frames: list[bytes]) -> None:
    transport = ScriptedTransport("drafter", Clock(), latency_s=None)
    verifier = Verifier(transport)
    for row in OPENED:
        verifier.open(row, TEXT, generation=1)
    for number, frame in enumerate(frames):
        try:
            reply = decode_drafter_frame(frame, MAX_FRAME_TOKENS)
        except DraftCodecError:
            continue
        if isinstance(reply, DraftReply):
            assert transport.session is not None
            transport._replies.append((0.0, Arrival(transport.session.number, 0.0, reply)))
        draft = verifier.step(OPENED[number % len(OPENED)], [7 + number], generation=1)
        assert len(draft) <= K
        assert all(0 <= token < VOCAB_SIZE for token in draft)
    verifier.drafts.observe(SessionUpdate(closed=[RowClosed(row, 1) for row in OPENED]))
    assert [len(link.rows) for link in verifier.drafts.links] == [0]
