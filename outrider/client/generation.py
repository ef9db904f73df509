"""One output, over as many calls as it takes: what to ask next, and what the answers add.

Why an output that was cut off goes on exactly: the noise of a token is keyed by seed and absolute position, so prompt +
received tokens under the same seed and parameters have the same continuation on any verifier of the model. The call
that resumes states how many of its tokens are output (`NUM_OUTPUT_TOKENS`), for penalties, limits and stop strings.

It asks for the last received token once more, and the answer has to begin with it. So a cut between the last token and
the message that the output is complete needs no special case (the service finds the end again by itself), and another
model at the other address is noticed instead of continued.

Text and stop strings are made here, from all tokens, so a cut never shows in them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from smg_grpc_proto.generated import vllm_engine_pb2 as pb
from tokenizers import Tokenizer

from common.engine_extensions import NUM_OUTPUT_TOKENS, NUM_SPECULATIVE_TOKENS, SEED, STEP_COUNTS, StepCounts
from common.errors import UnsupportedError
from common.types import FinishReason, Request, TokenLogprobs
from outrider.client.errors import BrokenStreamError, ResumeError, ServiceError
from outrider.client.messages import (
    MAX_FIELD_SEED,
    Piece,
    generate_request,
    read_chunk,
    read_logprobs,
    read_prompt_logprobs,
)
from verifier_svc.front.output_stream import OutputDelta, OutputStream


@dataclass(frozen=True, slots=True)
class CallPlan:
    """The next call of an output."""

    request: pb.GenerateRequest
    metadata: tuple[tuple[str, str], ...]
    required: tuple[str, ...]
    """Keys of `metadata` without which the tokens may be other ones: the answer has to repeat them."""


class Generation:
    """What is known of one output.

    Args:
        request: what was asked, before any failure.
        tokenizer: None: tokens only.
        index: of the output among those of the prompt; only the first asks for the prompt's log probabilities.
    """

    def __init__(self, request: Request, tokenizer: Tokenizer | None, index: int = 0) -> None:
        self.request = request
        self.index = index
        self.stream = OutputStream(request, tokenizer)
        self.prompt_logprobs: list[TokenLogprobs] = []
        self._stop_token_ids = frozenset(request.stop_token_ids)
        self._num_calls = 0
        self._start_call(0)

    def _start_call(self, num_resumed: int) -> None:
        self._num_resumed = num_resumed
        self._call_tokens: list[int] = []  # all that this call brought, the repeated one and those held included
        received = self.stream.token_ids
        self._expected = received[num_resumed] if num_resumed < len(received) else None
        self._held: Piece | None = None
        self._has_steps = False

    @property
    def is_finished(self) -> bool:
        return self.stream.finish_reason is not None

    @property
    def num_received(self) -> int:
        """Tokens that were delivered; a failure takes none of them back."""
        return len(self.stream.token_ids)

    def next_call(self) -> CallPlan:
        """The first call, or the one that goes on after a failure."""
        self._start_call(max(0, self.num_received - 1))
        request, params = self.request, self.request.params
        wants_prompt = self.index == 0 and self.num_received == 0 and not self.prompt_logprobs
        token_ids = request.prompt_token_ids + self.stream.token_ids[: self._num_resumed]
        message = generate_request(
            f"{request.request_id}-call-{self._num_calls}", token_ids, params, request.seed, wants_prompt
        )
        self._num_calls += 1
        metadata = {STEP_COUNTS: "1"}
        required: list[str] = []
        if params.num_speculative_tokens is not None:
            metadata[NUM_SPECULATIVE_TOKENS] = str(params.num_speculative_tokens)
        if request.seed > MAX_FIELD_SEED:
            metadata[SEED] = str(request.seed)
            required.append(SEED)
        if self._num_resumed:
            metadata[NUM_OUTPUT_TOKENS] = str(self._num_resumed)
            if params.presence_penalty or params.frequency_penalty or params.min_tokens:
                required.append(NUM_OUTPUT_TOKENS)
        return CallPlan(message, tuple(metadata.items()), tuple(required))

    def check_answer(self, address: str, plan: CallPlan, metadata: Mapping[str, object]) -> None:
        """Raises ResumeError or UnsupportedError if the service does not know what it has to know for this output."""
        for key in plan.required:
            if key in metadata:
                continue
            if key == NUM_OUTPUT_TOKENS:
                raise ResumeError(f"{address} does not know {key}: it would count output as prompt in the penalties")
            raise UnsupportedError(f"{address} does not know {key}: expected a seed of at most {MAX_FIELD_SEED}")

    def accept(self, response: pb.GenerateResponse) -> list[OutputDelta]:
        """Take a message of the current call.

        Raises:
            BrokenStreamError: the message cannot be one of this output; another call may do better.
            ResumeError: the service continues another output than was begun.
            ServiceError: the service says that the output failed.
        """
        kind = response.WhichOneof("response")
        if kind == "chunk":
            return self._accept_chunk(response.chunk)
        if kind == "complete":
            return self._accept_complete(response.complete)
        raise BrokenStreamError("a message without content")

    def abort(self) -> list[OutputDelta]:
        """End the output here, as the caller wishes."""
        self._held = None
        return [] if self.is_finished else [self.stream.add([], 0, 0, FinishReason.ABORT, None)]

    def _accept_chunk(self, chunk: pb.GenerateStreamChunk) -> list[OutputDelta]:
        if chunk.index != 0:
            raise BrokenStreamError(f"a chunk of output {chunk.index}: expected 0, as one was asked for")
        piece = read_chunk(chunk, self.request.params.logprobs is not None)
        self._take_prompt_logprobs(chunk.input_logprobs)
        self._has_steps |= piece.steps is not None
        return self._accept_piece(piece)

    def _accept_complete(self, complete: pb.GenerateComplete) -> list[OutputDelta]:
        if complete.index != 0:
            raise BrokenStreamError(f"the end of output {complete.index}: expected 0, as one was asked for")
        self._take_prompt_logprobs(complete.input_logprobs)
        if complete.finish_reason == "error":
            raise ServiceError("the service ended the output with an error")
        if complete.finish_reason not in tuple(FinishReason):
            raise BrokenStreamError(f"finish reason {complete.finish_reason!r}: expected stop, length or abort")
        deltas = self._accept_rest(complete)
        # A resumed output may be counted with or without what was there before.
        num_tokens = complete.completion_tokens
        num_in_call = len(self._call_tokens)
        if num_tokens not in (num_in_call, self._num_resumed + num_in_call) and not self.is_finished:
            raise BrokenStreamError(f"an end after {num_tokens} tokens: {num_in_call} came")
        if not self._has_steps:
            self.stream.draft_stats.num_draft_tokens += complete.spec_draft_tokens
            self.stream.draft_stats.num_accepted_tokens += complete.spec_accepted_tokens
        if self.is_finished:
            return deltas
        if complete.finish_reason == FinishReason.STOP and not self._call_tokens:
            raise BrokenStreamError("an output that stopped before its first token")
        if self._expected is not None:
            raise ResumeError("the service ended an output that it was asked to continue before it said anything")
        wants_logprobs = self.request.params.logprobs is not None
        piece, self._held = self._held or Piece([], [] if wants_logprobs else None, None), None
        deltas += self._add(piece, FinishReason(complete.finish_reason))
        if complete.WhichOneof("matched_stop") == "matched_stop_str" and self.stream.stop_reason is None:
            self.stream.stop_reason = complete.matched_stop_str  # found by the service alone: there is no text here
            deltas[-1] = replace(deltas[-1], stop_reason=complete.matched_stop_str)
        return deltas

    def _accept_rest(self, complete: pb.GenerateComplete) -> list[OutputDelta]:
        """Tokens that only the end brings. Services differ: it may repeat all tokens, those of this call, or none."""
        output_ids, known = list(complete.output_ids), self._call_tokens
        for start in dict.fromkeys((0, self._num_resumed)):
            end = start + len(known)
            if len(output_ids) > end and output_ids[start:end] == known:
                wants_logprobs = self.request.params.logprobs is not None
                logprobs = read_logprobs(complete.output_logprobs, output_ids) if wants_logprobs else None
                return self._accept_piece(Piece(output_ids, logprobs, None).without(end))
        return []

    def _accept_piece(self, piece: Piece) -> list[OutputDelta]:
        self._call_tokens += piece.token_ids
        piece = self._without_repeated(piece)
        deltas = self._release_held()
        if not piece.token_ids or self.is_finished:
            return deltas
        if self._may_end_with(piece.token_ids):
            # Whether its last token is text shows only with the next message, which follows at once.
            self._held = piece
            return deltas
        return deltas + self._add(piece, None)

    def _without_repeated(self, piece: Piece) -> Piece:
        """Less the token that a resumed call brings once more."""
        if self._expected is None or not piece.token_ids:
            return piece
        if piece.token_ids[0] != self._expected:
            found, position = piece.token_ids[0], self._num_resumed
            raise ResumeError(
                f"the output goes on differently here: token {position} is {found}, it was {self._expected}; "
                "expected the same model, in a precision where the batch does not change results"
            )
        self._expected = None
        return piece.without(1)

    def _may_end_with(self, token_ids: list[int]) -> bool:
        request = self.request
        num_tokens = request.prompt_len + self.num_received + len(token_ids)
        return token_ids[-1] in self._stop_token_ids or num_tokens >= request.max_len

    def _release_held(self) -> list[OutputDelta]:
        piece, self._held = self._held, None
        return [] if piece is None else self._add(piece, None)

    def _add(self, piece: Piece, finish_reason: FinishReason | None) -> list[OutputDelta]:
        """One delta a step, where the service says what the steps were."""
        room = self.request.max_len - self.request.prompt_len - self.num_received
        if len(piece.token_ids) > room:  # a service that does not know that part of the prompt is output
            piece = Piece(piece.token_ids[:room], piece.logprobs and piece.logprobs[:room], None)
            finish_reason = FinishReason.LENGTH
        steps = piece.steps or [StepCounts(len(piece.token_ids), 0, 0)]
        deltas: list[OutputDelta] = []
        for number, step in enumerate(steps, start=1):
            if self.is_finished:
                break
            now, piece = piece, piece.without(step.num_tokens)
            is_last = number == len(steps)
            deltas.append(
                self.stream.add(
                    now.token_ids[: step.num_tokens],
                    step.num_draft_tokens,
                    step.num_accepted_tokens,
                    finish_reason if is_last else None,
                    None if now.logprobs is None else now.logprobs[: step.num_tokens],
                )
            )
        return deltas

    def _take_prompt_logprobs(self, message: pb.InputLogProbs) -> None:
        if self.request.params.prompt_logprobs is not None and not self.prompt_logprobs:
            self.prompt_logprobs = read_prompt_logprobs(message, self.request.prompt_len)
