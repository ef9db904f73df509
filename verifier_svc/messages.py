"""What the front and the engine process say to each other. No torch, no gRPC.

One frame is a message packed by msgspec behind its length (4 bytes, little endian). The engine sends one frame a step
that carries all rows; the front sends one frame for all that happened in one turn of its event loop.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from common.engine_extensions import StepCounts
from common.errors import (
    InvalidRequestError,
    ModelLoadError,
    OutriderError,
    ResourceExhaustedError,
    UnavailableError,
)
from common.sampling_params import SamplingParams
from common.types import FinishReason, Request, TokenLogprobs

HEADER_BYTES = 4
MAX_FRAME_BYTES = 1 << 30


class ServedFacts(msgspec.Struct, frozen=True):
    """What the engine serves: all that the front knows of the model."""

    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    num_speculative_tokens: int
    dtype: str
    num_kv_cache_tokens: int
    block_size: int
    max_num_seqs: int
    tokenizer_json: str | None
    """The tokenizer as transformers sets it up, so that the front encodes the same way without transformers."""


class EngineLoad(msgspec.Struct, frozen=True, array_like=True):
    """The engine between two steps; counters are since its start."""

    num_running: int = 0
    num_waiting: int = 0
    kv_cache_usage: float = 0.0
    num_steps: int = 0
    num_preemptions: int = 0
    num_prefix_queries: int = 0
    num_prefix_hits: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_accepted_tokens_per_pos: list[int] = []
    num_stale_outcomes: int = 0


class DrafterCounts(msgspec.Struct, frozen=True, array_like=True):
    """One drafter as the engine sees it; counters are since the engine's start."""

    address: str
    kind: str
    """Transport in use."""
    is_up: bool
    is_hung: bool
    is_distrusted: bool
    num_rows: int
    num_sessions: int
    num_downs: int
    num_hangs: int
    num_updates: int
    num_replies: int
    num_branches: int
    num_stale_branches: int
    num_invalid_branches: int
    num_late_replies: int
    num_deadline_misses: int
    num_row_errors: int
    num_resyncs: int
    num_drafts: int
    num_draft_tokens: int
    num_accepted_tokens: int
    wait_s: float
    round_trip_bounds: tuple[float, ...]
    round_trip_counts: list[int]
    round_trip_total_s: float


class ExchangeCounts(msgspec.Struct, frozen=True, array_like=True):
    """All drafters of an engine."""

    drafters: list[DrafterCounts]
    num_waits: int
    num_branches_used: int
    num_fallbacks: int
    num_fallback_drafts: int
    num_rows_moved: int


class GraphReplays(msgspec.Struct, frozen=True, array_like=True):
    """One captured step, and how often it ran since the engine's start."""

    num_reqs: int
    """Requests that it has room for."""
    num_draft_tokens: int
    """Draft tokens of each, at most."""
    num_tokens: int
    """Tokens of its input, padding included."""
    is_mixed: bool
    """Has room for chunks of prompts."""
    is_plain: bool
    """For requests that sample by temperature alone."""
    num_replays: int


class ReplayCounts(msgspec.Struct, frozen=True, array_like=True):
    """How the steps of an engine on a GPU ran."""

    graphs: list[GraphReplays]
    """All that were captured: one that is never used shows with 0."""
    num_eager_steps: int


# -- front to engine ---------------------------------------------------------------------------------------------------


class Start(msgspec.Struct, tag="start", array_like=True):
    """The first message: what to serve."""

    config: dict[str, Any]
    log_level: str


class AddRequest(msgspec.Struct, tag="add", array_like=True):
    """One output to produce. `key` names it in all further messages."""

    key: int
    request_id: str
    prompt_token_ids: list[int]
    params: dict[str, Any]
    """Of `SamplingParams`, those that are not the default."""
    seed: int
    max_len: int
    stop_token_ids: tuple[int, ...]
    bad_words: tuple[tuple[int, ...], ...]
    num_speculative_tokens: int
    num_output_tokens: int

    @classmethod
    def of(cls, key: int, request: Request) -> AddRequest:
        return cls(
            key,
            request.request_id,
            request.prompt_token_ids,
            request.params.model_dump(exclude_defaults=True),
            request.seed,
            request.max_len,
            request.stop_token_ids,
            request.bad_words,
            request.num_speculative_tokens,
            request.num_output_tokens,
        )

    def to_request(self) -> Request:
        return Request(
            request_id=self.request_id,
            prompt_token_ids=self.prompt_token_ids,
            params=SamplingParams(**self.params),
            seed=self.seed,
            max_len=self.max_len,
            stop_token_ids=self.stop_token_ids,
            bad_words=self.bad_words,
            num_speculative_tokens=self.num_speculative_tokens,
            num_output_tokens=self.num_output_tokens,
        )


class AbortRequest(msgspec.Struct, tag="abort", array_like=True):
    """Drop an output; nothing of it is sent any more."""

    key: int


class FlushCache(msgspec.Struct, tag="flush", array_like=True):
    """Forget the prefix cache, if nothing runs. Answered in the next report."""

    call: int


class Stop(msgspec.Struct, tag="stop", array_like=True):
    """Leave, without finishing anything."""


ToEngine = Start | AddRequest | AbortRequest | FlushCache | Stop


# -- engine to front ---------------------------------------------------------------------------------------------------


class OutputUpdate(msgspec.Struct, array_like=True):
    """What one or more steps did to one output. More than one only where the front was slow to read."""

    key: int
    token_ids: list[int]
    steps: list[StepCounts]
    finish_reason: FinishReason | None = None
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    num_cached_tokens: int = 0

    def merge(self, later: OutputUpdate) -> None:
        """Take in what a later step did, in place. The size stays bounded by the output itself."""
        self.token_ids += later.token_ids
        self.steps += later.steps
        self.finish_reason = later.finish_reason
        self.logprobs = _joined(self.logprobs, later.logprobs)
        self.prompt_logprobs = _joined(self.prompt_logprobs, later.prompt_logprobs)
        self.num_cached_tokens = later.num_cached_tokens


def _joined(first: list[TokenLogprobs] | None, later: list[TokenLogprobs] | None) -> list[TokenLogprobs] | None:
    if first is None or later is None:
        return later if first is None else first
    first += later
    return first


class Rejected(msgspec.Struct, array_like=True):
    """The engine did not take an output, and why: `status` is a name of `grpc.StatusCode`."""

    key: int
    status: str
    message: str


class FlushResult(msgspec.Struct, array_like=True):
    call: int
    done: bool


class Admitted(msgspec.Struct, array_like=True):
    """An output got a row for the first time, and how long it had waited in the engine."""

    key: int
    queue_s: float


class Report(msgspec.Struct, tag="report", array_like=True):
    """All that happened since the last report."""

    load: EngineLoad
    updates: list[OutputUpdate]
    rejected: list[Rejected] = []
    flushed: list[FlushResult] = []
    admitted: list[Admitted] = []
    exchange: ExchangeCounts | None = None
    """Now and then, where drafters are used."""
    replays: ReplayCounts | None = None
    """Now and then, and whenever no request is left, where steps are graphs."""


class Ready(msgspec.Struct, tag="ready", array_like=True):
    """The model is loaded."""

    served: ServedFacts


class Failed(msgspec.Struct, tag="failed", array_like=True):
    """The engine cannot start or go on; the process ends with this."""

    status: str
    message: str


FromEngine = Ready | Report | Failed


# -- frames ------------------------------------------------------------------------------------------------------------


class FrameReader:
    """Whole messages out of a stream of bytes."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes | memoryview) -> Iterator[bytes]:
        """The frames that `data` completes.

        Raises:
            UnavailableError: a length beyond the limit, so the other end is none of ours.
        """
        buffer = self._buffer
        buffer += data
        start = 0
        while len(buffer) - start >= HEADER_BYTES:
            size = int.from_bytes(buffer[start : start + HEADER_BYTES], "little")
            if size > MAX_FRAME_BYTES:
                raise UnavailableError(f"a frame of {size} bytes: expected at most {MAX_FRAME_BYTES}")
            end = start + HEADER_BYTES + size
            if len(buffer) < end:
                break
            yield bytes(memoryview(buffer)[start + HEADER_BYTES : end])
            start = end
        if start:
            del buffer[:start]


def frame(payload: bytes) -> bytes:
    return len(payload).to_bytes(HEADER_BYTES, "little") + payload


def error_of(status: str, message: str) -> OutriderError:
    """An error that crossed the process border, with the status it had."""
    return _ERRORS.get(status, OutriderError)(message)


_ERRORS: dict[str, type[OutriderError]] = {
    kind.status: kind for kind in (InvalidRequestError, ModelLoadError, ResourceExhaustedError, UnavailableError)
}
