"""The step counts that chunks carry for clients of ours."""

from __future__ import annotations

import pytest
from google.protobuf.unknown_fields import UnknownFieldSet
from hypothesis import given
from hypothesis import strategies as st
from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from common.engine_extensions import STEP_COUNTS_FIELD, StepCounts, decode_step_counts, encode_step_counts

_STEPS = st.lists(
    st.builds(
        lambda tokens, extra, accepted: StepCounts(tokens, accepted + extra, min(accepted, tokens)),
        st.integers(0, 300),
        st.integers(0, 300),
        st.integers(0, 300),
    )
)


@given(_STEPS)
def test_what_a_chunk_carries_comes_out_again(steps: list[StepCounts]) -> None:
    chunk = pb.GenerateStreamChunk(token_ids=[1, 2], index=3)
    chunk.MergeFromString(encode_step_counts(steps))
    received = pb.GenerateStreamChunk.FromString(chunk.SerializeToString())
    assert list(received.token_ids) == [1, 2]
    assert received.index == 3
    (field,) = UnknownFieldSet(received)
    assert field.field_number == STEP_COUNTS_FIELD
    assert decode_step_counts(field.data, sum(step.num_tokens for step in steps)) == steps


@given(st.binary(max_size=64), st.integers(0, 64))
def test_garbage_is_no_count(payload: bytes, num_tokens: int) -> None:
    steps = decode_step_counts(payload, num_tokens)
    assert steps is None or sum(step.num_tokens for step in steps) == num_tokens


@pytest.mark.parametrize(
    ("counts", "num_tokens"),
    [
        ([(2, 3, 1)], 3),  # another number of tokens than the chunk has
        ([(1, 3, 2)], 1),  # more accepted than there are
        ([(3, 1, 2)], 3),  # more accepted than drafted
        ([(1, 1)], 1),
    ],
)
def test_counts_that_cannot_be_are_refused(counts: list[tuple[int, ...]], num_tokens: int) -> None:
    chunk = pb.GenerateStreamChunk()
    chunk.MergeFromString(encode_step_counts(counts))
    (field,) = UnknownFieldSet(chunk)
    assert decode_step_counts(field.data, num_tokens) is None
