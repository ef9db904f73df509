"""Requests as messages of VllmEngine, and its messages as what an output stream takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from google.protobuf.unknown_fields import UnknownFieldSet
from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from common.engine_extensions import STEP_COUNTS_FIELD, StepCounts, decode_step_counts
from common.sampling_params import SamplingParams
from common.types import TokenLogprobs
from outrider.client.errors import BrokenStreamError

MAX_FIELD_SEED = 2**32 - 1
"""The largest seed that the protocol's `int32` carries: a negative number there stands for its unsigned value."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens that one message brought."""

    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None
    steps: list[StepCounts] | None
    """None: the service does not say."""

    def without(self, count: int) -> Piece:
        """The same less its first `count` tokens."""
        steps: list[StepCounts] | None = None
        if self.steps is not None:
            steps = []
            left = count
            for step in self.steps:
                cut = min(left, step.num_tokens)
                left -= cut
                num_accepted = max(0, step.num_accepted_tokens - cut)
                if step.num_tokens > cut:
                    steps.append(StepCounts(step.num_tokens - cut, step.num_draft_tokens, num_accepted))
        logprobs = None if self.logprobs is None else self.logprobs[count:]
        return Piece(self.token_ids[count:], logprobs, steps)

    def joined(self, later: Piece) -> Piece:
        steps = None if self.steps is None or later.steps is None else self.steps + later.steps
        logprobs = None if self.logprobs is None else self.logprobs + (later.logprobs or [])
        return Piece(self.token_ids + later.token_ids, logprobs, steps)


def generate_request(
    request_id: str, token_ids: Sequence[int], params: SamplingParams, seed: int, wants_prompt_logprobs: bool
) -> pb.GenerateRequest:
    """A streaming request for one output. A seed that the field cannot carry goes as metadata."""
    values: dict[str, Any] = {
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": max(0, params.top_k),
        "min_p": params.min_p,
        "frequency_penalty": params.frequency_penalty,
        "presence_penalty": params.presence_penalty,
        "repetition_penalty": params.repetition_penalty,
        "max_tokens": params.max_tokens,
        "min_tokens": params.min_tokens,
        "stop": params.stop,
        "stop_token_ids": params.stop_token_ids,
        "skip_special_tokens": params.skip_special_tokens,
        "spaces_between_special_tokens": True,
        "ignore_eos": params.ignore_eos,
        "n": 1,
        "logprobs": params.logprobs,
        "prompt_logprobs": params.prompt_logprobs if wants_prompt_logprobs else None,
        "seed": _int32(seed) if seed <= MAX_FIELD_SEED else None,
        "include_stop_str_in_output": params.include_stop_str_in_output,
        "logit_bias": params.logit_bias,
    }
    return pb.GenerateRequest(
        request_id=request_id,
        tokenized=pb.TokenizedInput(input_ids=token_ids),
        sampling_params=pb.SamplingParams(**values),
        stream=True,
    )


def _int32(value: int) -> int:
    return value - 2**32 if value >= 2**31 else value


def read_chunk(chunk: pb.GenerateStreamChunk, wants_logprobs: bool) -> Piece:
    """Raises BrokenStreamError if the parts of the chunk do not fit together."""
    token_ids = list(chunk.token_ids)
    logprobs = read_logprobs(chunk.output_logprobs, token_ids) if wants_logprobs else None
    return Piece(token_ids, logprobs, _step_counts(chunk, len(token_ids)))


def read_logprobs(message: pb.OutputLogProbs, token_ids: Sequence[int]) -> list[TokenLogprobs]:
    """One entry a token. The protocol has no rank: it is 0 where the token is not among the best ones.

    Raises:
        BrokenStreamError: they are not those of `token_ids`.
    """
    values, best = message.token_logprobs, message.top_logprobs
    if list(message.token_ids) != list(token_ids) or len(values) != len(token_ids):
        raise BrokenStreamError("log probabilities that are not those of the tokens")
    if best and len(best) != len(token_ids):
        raise BrokenStreamError("best tokens for another number of positions than there are")
    return [
        _entry(token, values[index], best[index] if best else pb.TopLogProbs()) for index, token in enumerate(token_ids)
    ]


def read_prompt_logprobs(message: pb.InputLogProbs, num_tokens: int) -> list[TokenLogprobs]:
    """One entry for each prompt token but the first, which nothing precedes; nothing where the message has none."""
    values, best = message.token_logprobs, message.top_logprobs
    if not values:
        return []
    if len(values) != num_tokens or len(message.token_ids) != num_tokens or (best and len(best) != num_tokens):
        raise BrokenStreamError(f"log probabilities of {len(values)} prompt tokens: expected {num_tokens}")
    return [
        _entry(message.token_ids[index], values[index].value, best[index] if best else pb.TopLogProbs())
        for index in range(1, num_tokens)
    ]


def _entry(token: int, logprob: float, best: pb.TopLogProbs) -> TokenLogprobs:
    best_ids = list(best.token_ids)
    if len(best.values) != len(best_ids):
        raise BrokenStreamError("best tokens without their log probabilities")
    rank = best_ids.index(token) + 1 if token in best_ids else 0
    return TokenLogprobs([token, *best_ids], [logprob, *best.values], rank)


def _step_counts(chunk: pb.GenerateStreamChunk, num_tokens: int) -> list[StepCounts] | None:
    for field in UnknownFieldSet(chunk):
        if field.field_number == STEP_COUNTS_FIELD and isinstance(field.data, bytes):
            return decode_step_counts(field.data, num_tokens)
    return None
