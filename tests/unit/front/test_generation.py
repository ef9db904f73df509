"""What of a call can be sent, whenever its reader asks: any pieces make up the same output."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from common.engine_extensions import STEP_COUNTS_FIELD, StepCounts
from common.errors import UnavailableError
from common.sampling_params import SamplingParams
from common.types import FinishReason, Request, TokenLogprobs
from tests.byte_tokenizer import END, byte_tokenizer
from verifier_svc.front.generation import Generation, Output
from verifier_svc.messages import OutputUpdate


class FakeEngine:
    """Takes requests and remembers what was aborted."""

    def __init__(self) -> None:
        self.num_added = 0
        self.aborted: list[int] = []

    def check_room(self, count: int) -> None:
        pass

    def add(self, *_: Any) -> int:
        self.num_added += 1
        return self.num_added

    def abort(self, key: int, *_: Any) -> None:
        self.aborted.append(key)


def make_generation(count: int = 1, *, has_step_counts: bool = False, **params: Any) -> tuple[Generation, FakeEngine]:
    checked = SamplingParams(max_tokens=1000, **params)
    requests = [
        Request(f"r-{index}", list(b"ab"), checked, index, 1000, stop_token_ids=(END,)) for index in range(count)
    ]
    generation, engine = Generation(requests, byte_tokenizer(), has_step_counts), FakeEngine()
    generation.submit(engine)  # type: ignore[arg-type]
    return generation, engine


def make_update(*steps: bytes, reason: FinishReason | None = None) -> OutputUpdate:
    """Each step with all but its last token drafted and accepted."""
    tokens = list(b"".join(steps))
    counts = [StepCounts(len(step), len(step), len(step) - 1) for step in steps]
    return OutputUpdate(1, tokens, counts, reason, [TokenLogprobs([token], [-1.0], 1) for token in tokens])


def chunk_of(output: Output) -> bytes:
    response = output.take_chunk()
    return b"" if response is None else bytes(response.chunk.token_ids)


def responses(generation: Generation, *, stream: bool = True) -> list[pb.GenerateResponse]:
    async def take() -> list[pb.GenerateResponse]:
        async with asyncio.timeout(1):
            return await generation.next_responses(stream)

    return asyncio.run(take())


def test_a_reader_that_comes_late_gets_one_larger_chunk() -> None:
    generation, _ = make_generation(logprobs=0)
    (output,) = generation.outputs
    output.update(make_update(b"abc"))
    output.update(make_update(b"de"))
    (response,) = responses(generation)
    assert bytes(response.chunk.token_ids) == b"abcde"
    assert response.chunk.completion_tokens == 5
    assert len(response.chunk.output_logprobs.token_logprobs) == 5
    output.update(make_update(b"f", reason=FinishReason.LENGTH))
    chunk, complete = responses(generation)
    assert bytes(chunk.chunk.token_ids) == b"f"
    assert bytes(complete.complete.output_ids) == b"abcdef"
    assert (complete.complete.spec_draft_tokens, complete.complete.spec_accepted_tokens) == (6, 3)
    assert not complete.complete.HasField("output_logprobs")  # the chunks had them
    assert responses(generation) == []


def test_without_streaming_all_comes_at_the_end() -> None:
    generation, _ = make_generation(2, logprobs=0)
    first, second = generation.outputs
    first.update(make_update(b"abc"))
    second.update(make_update(b"x", reason=FinishReason.LENGTH))
    (response,) = responses(generation, stream=False)
    assert (response.complete.index, bytes(response.complete.output_ids)) == (1, b"x")
    first.update(make_update(b"d", reason=FinishReason.LENGTH))
    (response,) = responses(generation, stream=False)
    assert (response.complete.index, bytes(response.complete.output_ids)) == (0, b"abcd")
    assert len(response.complete.output_logprobs.token_logprobs) == 4
    assert responses(generation, stream=False) == []


def test_a_stop_string_is_held_back_and_then_the_engine_is_told() -> None:
    generation, engine = make_generation(stop=["XYZ"])
    (output,) = generation.outputs
    output.update(make_update(b"ab", b"cX"))
    assert chunk_of(output) == b"ab"  # whole steps: the c waits with the X
    output.update(make_update(b"Y"))
    assert chunk_of(output) == b""
    output.update(make_update(b"!"))
    assert chunk_of(output) == b"cXY!"
    output.update(make_update(b"dXYZef"))
    assert chunk_of(output) == b"dXYZ"
    assert engine.aborted == [1]
    complete = output.take_complete(True)
    assert complete is not None
    assert complete.complete.matched_stop_str == "XYZ"
    assert bytes(complete.complete.output_ids) == b"abcXY!dXYZ"


def test_a_stop_token() -> None:
    generation, engine = make_generation(2, stop_token_ids=[98])
    for output, last in zip(generation.outputs, (98, END), strict=True):
        output.update(OutputUpdate(1, [97, last], [StepCounts(2, 0, 0)], FinishReason.STOP))
    _, stopped, _, ended = responses(generation)
    assert (stopped.complete.finish_reason, stopped.complete.matched_token_id) == ("stop", 98)
    assert (ended.complete.finish_reason, ended.complete.WhichOneof("matched_stop")) == ("stop", None)
    assert engine.aborted == []


def test_abort_sends_what_there_is() -> None:
    generation, engine = make_generation(2, stop=["zz"])
    generation.outputs[0].update(make_update(b"az"))
    generation.abort()
    generation.abort()
    assert engine.aborted == [1, 2]
    chunk, complete, other = responses(generation)
    assert bytes(chunk.chunk.token_ids) == b"az"  # nothing is held back any more
    assert (complete.complete.finish_reason, other.complete.finish_reason) == ("abort", "abort")
    assert list(other.complete.output_ids) == []


def test_a_failure_ends_the_call() -> None:
    generation, _ = make_generation(2)
    generation.outputs[1].fail(UnavailableError("gone"))
    with pytest.raises(UnavailableError, match="gone"):
        responses(generation)
    generation, engine = make_generation(2)
    generation.fail(UnavailableError("shutting down"))
    with pytest.raises(UnavailableError, match="shutting down"):
        responses(generation)
    generation.drop()
    assert engine.aborted == [1, 2]


def _step_counts(chunk: pb.GenerateStreamChunk) -> list[int]:
    """The extension's field, read as a client without it would not."""
    data = chunk.SerializeToString()
    tag = STEP_COUNTS_FIELD << 3 | 2
    key = bytes([tag & 0x7F | 0x80, tag >> 7])
    begin = data.index(key) + 2
    return list(data[begin + 1 : begin + 1 + data[begin]])


@given(st.lists(st.tuples(st.sampled_from(["ab", "X", "aXY", "Zb", "XYZ", "abcd"]), st.booleans()), max_size=12))
def test_in_whatever_pieces_it_is_read(steps: list[tuple[str, bool]]) -> None:
    text = "".join(step for step, _ in steps)
    expected = text[: text.index("XYZ") + 3] if "XYZ" in text else text
    generation, engine = make_generation(stop=["XYZ"], has_step_counts=True)
    (output,) = generation.outputs
    got = b""
    counts: list[int] = []
    for step, is_read in steps:
        if output.stream.finish_reason is None:  # the engine is told in time, or it is not
            output.update(make_update(step.encode()))
        response = output.take_chunk() if is_read else None
        if response is not None:
            got += bytes(response.chunk.token_ids)
            counts += _step_counts(response.chunk)
    if output.stream.finish_reason is None:
        output.update(make_update(b"!", reason=FinishReason.LENGTH))
        expected += "!"
    response = output.take_chunk()
    if response is not None:
        got += bytes(response.chunk.token_ids)
        counts += _step_counts(response.chunk)
    assert got.decode() == expected
    assert sum(counts[::3]) == len(got)
    assert bool(engine.aborted) == ("XYZ" in text)
