"""From messages of VllmEngine to our values, and back.

proto3 sends no zeros, so a plain field that is 0 or empty is unset, and takes our default: top_p, top_k, penalties, n.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from common.engine_extensions import NUM_OUTPUT_TOKENS, NUM_SPECULATIVE_TOKENS, SEED, STEP_COUNTS
from common.errors import InvalidArgumentError, UnsupportedError
from common.sampling_params import MAX_LOGPROBS, MAX_SEED, SamplingParams
from common.types import TokenLogprobs

MAX_REQUEST_ID_LENGTH = 256

# A repeated field of the proto takes any number of entries; a list of more than this is refused before it is copied.
_MAX_ENTRIES = 65536

_CONSTRAINTS = ("json_schema", "regex", "grammar", "structural_tag", "json_object", "choice")


def check_supported(request: pb.GenerateRequest) -> None:
    """Raise where the request asks for a part of the interface that is not built.

    Raises:
        UnsupportedError: media or KV transfer.
        InvalidArgumentError: structured output, or a rank that does not exist.
    """
    if request.HasField("mm_inputs") or request.extra_mm_inputs or request.HasField("media_refs"):
        raise UnsupportedError("images, video and audio are not supported: expected a text prompt")
    if request.HasField("kv_transfer_params") or request.HasField("kv_transfer_params_json"):
        raise UnsupportedError("KV transfer between workers is not supported: expected no kv_transfer_params")
    if request.HasField("data_parallel_rank") and request.data_parallel_rank != 0:
        raise InvalidArgumentError("data_parallel_rank", request.data_parallel_rank, "0: there is one rank")
    constraint = request.sampling_params.WhichOneof("constraint")
    if constraint is not None:
        expected = f"no structured output ({', '.join(_CONSTRAINTS)}): it is not supported yet"
        raise InvalidArgumentError(f"sampling_params.{constraint}", "a constraint", expected)


def request_id_of(request: pb.GenerateRequest) -> str:
    """Raises InvalidArgumentError if it is empty or too long."""
    request_id = request.request_id
    if not 1 <= len(request_id) <= MAX_REQUEST_ID_LENGTH:
        raise InvalidArgumentError("request_id", request_id, f"1 to {MAX_REQUEST_ID_LENGTH} characters")
    return request_id


@dataclass(frozen=True, slots=True)
class Wishes:
    """What the metadata of a call asks for beyond the message: `common.engine_extensions`."""

    num_speculative_tokens: int | None = None
    num_output_tokens: int | None = None
    seed: int | None = None
    has_step_counts: bool = False

    @classmethod
    def of(cls, metadata: Mapping[str, str]) -> Wishes:
        """Raises InvalidArgumentError for a value that is no number in range."""
        return cls(
            num_speculative_tokens=_number(metadata, NUM_SPECULATIVE_TOKENS, 9999),
            num_output_tokens=_number(metadata, NUM_OUTPUT_TOKENS, 2**31 - 1),
            seed=_number(metadata, SEED, MAX_SEED),
            has_step_counts=_number(metadata, STEP_COUNTS, 1) == 1,
        )

    @property
    def answer(self) -> tuple[tuple[str, str], ...]:
        """Initial metadata: what a client has to know was understood."""
        values = ((NUM_OUTPUT_TOKENS, self.num_output_tokens), (SEED, self.seed))
        return tuple((key, str(value)) for key, value in values if value is not None)


def to_sampling_params(message: pb.SamplingParams, wishes: Wishes) -> SamplingParams:
    """The parameters of a request.

    A negative seed stands for its unsigned 32-bit value: routers cut the 64-bit seeds of the OpenAI API to 32 bits.

    Args:
        message: as it came.
        wishes: come before the message.

    Raises:
        InvalidArgumentError: a value is out of range.
    """
    _check_entries("stop", message.stop)
    _check_entries("stop_token_ids", message.stop_token_ids)
    _check_entries("logit_bias", message.logit_bias)
    values: dict[str, Any] = {
        "temperature": message.temperature if message.HasField("temperature") else None,
        "top_p": message.top_p or None,
        "top_k": message.top_k or None,
        "min_p": message.min_p or None,
        "frequency_penalty": message.frequency_penalty or None,
        "presence_penalty": message.presence_penalty or None,
        "repetition_penalty": message.repetition_penalty or None,
        "min_tokens": message.min_tokens or None,
        "stop": tuple(message.stop) or None,
        "stop_token_ids": tuple(message.stop_token_ids) or None,
        "n": message.n or None,
        "logprobs": _num_logprobs("logprobs", message),
        "prompt_logprobs": _num_logprobs("prompt_logprobs", message),
        "seed": wishes.seed if wishes.seed is not None else _seed(message),
        "logit_bias": dict(message.logit_bias) or None,
        "num_speculative_tokens": wishes.num_speculative_tokens,
    }
    return SamplingParams(
        **{name: value for name, value in values.items() if value is not None},
        max_tokens=message.max_tokens if message.HasField("max_tokens") else None,
        ignore_eos=message.ignore_eos,
        include_stop_str_in_output=message.include_stop_str_in_output,
        skip_special_tokens=message.skip_special_tokens,
    )


def truncated(prompt_token_ids: list[int], message: pb.SamplingParams, max_model_len: int) -> list[int]:
    """The last `truncate_prompt_tokens` tokens of a prompt; -1: as many as leave room for one output token."""
    if not message.HasField("truncate_prompt_tokens"):
        return prompt_token_ids
    count = message.truncate_prompt_tokens
    if count == -1:
        count = max_model_len - 1
    if count < 1:
        raise InvalidArgumentError("truncate_prompt_tokens", count, "-1, or at least 1")
    return prompt_token_ids[-count:]


def output_logprobs(token_ids: Sequence[int], entries: Sequence[TokenLogprobs]) -> pb.OutputLogProbs:
    """Log probabilities of output tokens: the chosen one, and the best ones."""
    return pb.OutputLogProbs(
        token_logprobs=[entry.logprobs[0] for entry in entries],
        token_ids=token_ids[: len(entries)],
        top_logprobs=[_top(entry) for entry in entries],
    )


def input_logprobs(prompt_token_ids: Sequence[int], entries: Sequence[TokenLogprobs]) -> pb.InputLogProbs:
    """Log probabilities of prompt tokens; the first has none, as nothing precedes it."""
    message = pb.InputLogProbs(token_ids=prompt_token_ids)
    message.token_logprobs.add()
    message.top_logprobs.add()
    for entry in entries:
        message.token_logprobs.add(value=entry.logprobs[0])
        message.top_logprobs.append(_top(entry))
    return message


def _top(entry: TokenLogprobs) -> pb.TopLogProbs:
    return pb.TopLogProbs(values=entry.logprobs[1:], token_ids=entry.token_ids[1:])


def _num_logprobs(field: str, message: pb.SamplingParams) -> int | None:
    if not message.HasField(field):
        return None
    count = getattr(message, field)
    if count == -1:
        expected = f"0 to {MAX_LOGPROBS}: those of the whole vocabulary are not served"
        raise InvalidArgumentError(field, count, expected)
    return count


def _seed(message: pb.SamplingParams) -> int | None:
    return message.seed % 2**32 if message.HasField("seed") else None


def _number(metadata: Mapping[str, str], key: str, largest: int) -> int | None:
    text = metadata.get(key)
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and len(text) <= 20 and int(text) <= largest):
        raise InvalidArgumentError(key, text, f"a number from 0 to {largest}")
    return int(text)


def _check_entries(field: str, entries: Any) -> None:
    if len(entries) > _MAX_ENTRIES:
        raise InvalidArgumentError(field, f"{len(entries)} entries", f"at most {_MAX_ENTRIES} entries")
