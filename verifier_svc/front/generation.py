"""One Generate call as it runs: its outputs, what of them can be sent, and how it ends."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence

from smg_grpc_proto.generated import vllm_engine_pb2 as pb
from tokenizers import Tokenizer

from common.engine_extensions import StepCounts, encode_step_counts
from common.errors import OutriderError
from common.types import FinishReason, Request, TokenLogprobs
from verifier_svc.front.conversion import input_logprobs, output_logprobs
from verifier_svc.front.engine_client import EngineClient
from verifier_svc.front.metrics import FrontMetrics, OutputTimes
from verifier_svc.front.output_stream import OutputStream
from verifier_svc.messages import OutputUpdate


class Output:
    """One of the `n` outputs of a call. What has not been sent waits as positions in the output itself.

    So a reader that is slow gets fewer and larger chunks, and holds no more memory than the output.

    Args:
        index: among the outputs of the call.
        request: as the engine runs it.
        tokenizer: for stop strings; nothing else needs text, which the interface does not carry.
        has_step_counts: tell which tokens of a chunk were draft tokens, step by step.
        arrival_s: when the call came, on the clock of `FrontMetrics`.
        changed: set when there is something to send.
    """

    def __init__(
        self,
        index: int,
        request: Request,
        tokenizer: Tokenizer | None,
        has_step_counts: bool,
        arrival_s: float,
        changed: asyncio.Event,
    ) -> None:
        has_stop_strings = bool(request.params.stop)
        self.index = index
        self.key = 0
        self.times = OutputTimes(request.prompt_len, arrival_s)
        self.stream = OutputStream(request, tokenizer if has_stop_strings else None)
        self.prompt_logprobs: list[TokenLogprobs] = []
        self.num_cached_tokens = 0
        self.has_started = False
        self.failure: OutriderError | None = None
        self.is_complete = False
        self._engine: EngineClient | None = None
        self._changed = changed
        self._holds_back = has_stop_strings
        self._held: deque[tuple[int, int]] = deque()  # (tokens, characters) at the end of each step held back
        self._step_counts: deque[StepCounts] | None = deque() if has_step_counts else None  # of what is not sent
        self._num_shown_chars = 0
        self._num_sendable = 0
        self._num_sent = 0

    def submit(self, engine: EngineClient) -> None:
        self._engine = engine
        self.key = engine.add(self.stream.request, self, self.times)

    # -- OutputSink ----------------------------------------------------------------------------------------------

    def update(self, update: OutputUpdate) -> None:
        self.has_started = True
        self.num_cached_tokens = update.num_cached_tokens
        if update.prompt_logprobs:
            self.prompt_logprobs += update.prompt_logprobs
        start = 0
        last = len(update.steps) - 1
        for number, step in enumerate(update.steps):
            end = start + step.num_tokens
            reason = update.finish_reason if number == last else None
            logprobs = None if update.logprobs is None else update.logprobs[start:end]
            delta = self.stream.add(
                update.token_ids[start:end], step.num_draft_tokens, step.num_accepted_tokens, reason, logprobs
            )
            self._num_shown_chars += len(delta.text)
            if self._step_counts is not None:
                counts = StepCounts(len(delta.token_ids), delta.num_draft_tokens, delta.num_accepted_tokens)
                self._step_counts.append(counts)
            if self._holds_back:
                self._held.append((len(self.stream.token_ids), len(self.stream.text)))
            start = end
            if self.stream.finish_reason is not None:
                break
        if self.stream.finish_reason is not None and update.finish_reason is None:
            self._abort_in_engine()  # a stop string, of which the engine knows nothing
        self._release()
        self._changed.set()

    def fail(self, error: OutriderError) -> None:
        self.failure = error
        self._changed.set()

    # -- the call ------------------------------------------------------------------------------------------------

    def abort(self) -> None:
        """End it here: what has been made is sent, and the reason is `abort`."""
        if self.stream.finish_reason is None:
            self.stream.finish_reason = FinishReason.ABORT
            self._abort_in_engine()
            self._release()
            self._changed.set()

    def drop(self) -> None:
        """Nobody listens any more."""
        self._abort_in_engine()

    def take_chunk(self) -> pb.GenerateResponse | None:
        """What can be sent and has not been, or None."""
        begin, end = self._num_sent, self._num_sendable
        if begin == end:
            return None
        self._num_sent = end
        stream = self.stream
        token_ids = stream.token_ids[begin:end]
        response = pb.GenerateResponse()
        chunk = response.chunk  # filled in place: made apart it would be copied, 3.5 us instead of 2.2
        chunk.token_ids.extend(token_ids)
        chunk.prompt_tokens = stream.request.prompt_len
        chunk.completion_tokens = end - begin  # of this chunk, as vLLM counts
        chunk.cached_tokens = self.num_cached_tokens
        chunk.index = self.index
        if stream.logprobs:
            chunk.output_logprobs.CopyFrom(output_logprobs(token_ids, stream.logprobs[begin:end]))
        if self._step_counts is not None:
            chunk.MergeFromString(encode_step_counts(self._take_step_counts(len(token_ids))))
        if begin == 0:
            self._add_input_logprobs(chunk)
        return response

    def take_complete(self, with_logprobs: bool) -> pb.GenerateResponse | None:
        """The last message, once everything before it has been taken; None before that, and after."""
        stream = self.stream
        if stream.finish_reason is None or self.is_complete:
            return None
        self.is_complete = True
        complete = pb.GenerateComplete(
            output_ids=stream.token_ids,
            finish_reason=str(stream.finish_reason),
            prompt_tokens=stream.request.prompt_len,
            completion_tokens=len(stream.token_ids),
            cached_tokens=self.num_cached_tokens,
            index=self.index,
            spec_accepted_tokens=stream.draft_stats.num_accepted_tokens,
            spec_draft_tokens=stream.draft_stats.num_draft_tokens,
        )
        if isinstance(stream.stop_reason, int):
            complete.matched_token_id = stream.stop_reason
        elif stream.stop_reason is not None:
            complete.matched_stop_str = stream.stop_reason
        if with_logprobs:
            if stream.request.params.logprobs is not None:
                complete.output_logprobs.CopyFrom(output_logprobs(stream.token_ids, stream.logprobs))
            self._add_input_logprobs(complete)
        return pb.GenerateResponse(complete=complete)

    def _take_step_counts(self, num_tokens: int) -> list[StepCounts]:
        """Of the next steps to send; what is released are whole steps."""
        assert self._step_counts is not None
        counts: list[StepCounts] = []
        while num_tokens > 0:
            counts.append(self._step_counts.popleft())
            num_tokens -= counts[-1].num_tokens
        return counts

    def _add_input_logprobs(self, message: pb.GenerateStreamChunk | pb.GenerateComplete) -> None:
        request = self.stream.request
        if request.params.prompt_logprobs is not None:
            message.input_logprobs.CopyFrom(input_logprobs(request.prompt_token_ids, self.prompt_logprobs))

    def _release(self) -> None:
        """Tokens can be sent once none of their text may be the beginning of a stop string."""
        if not self._holds_back or self.stream.finish_reason is not None:
            self._num_sendable = len(self.stream.token_ids)
            return
        while self._held and self._held[0][1] <= self._num_shown_chars:
            self._num_sendable = self._held.popleft()[0]

    def _abort_in_engine(self) -> None:
        if self._engine is not None:
            self._engine.abort(self.key, self.stream.finish_reason or FinishReason.ABORT)


class Generation:
    """A call and its outputs.

    Args:
        requests: the outputs to make.
        tokenizer: of the model.
        has_step_counts: tell which tokens of a chunk were draft tokens, step by step.
        arrival_s: when the call came, on the clock of `FrontMetrics`; None: now.
    """

    def __init__(
        self,
        requests: Sequence[Request],
        tokenizer: Tokenizer | None,
        has_step_counts: bool = False,
        arrival_s: float | None = None,
    ) -> None:
        if arrival_s is None:
            arrival_s = FrontMetrics.clock()
        self._changed = asyncio.Event()
        self._failure: OutriderError | None = None
        self.outputs = [
            Output(index, request, tokenizer, has_step_counts, arrival_s, self._changed)
            for index, request in enumerate(requests)
        ]

    @property
    def num_waiting_prompt_tokens(self) -> int:
        """Prompt tokens of outputs that the engine has not begun."""
        return sum(len(output.stream.request.prompt_token_ids) for output in self.outputs if not output.has_started)

    def submit(self, engine: EngineClient) -> None:
        """Ask the engine for all outputs, or for none.

        Raises:
            ResourceExhaustedError: they do not fit.
            UnavailableError: the engine is gone.
        """
        engine.check_room(len(self.outputs))
        for output in self.outputs:
            output.submit(engine)

    def abort(self) -> None:
        """End the call with what there is."""
        for output in self.outputs:
            output.abort()

    def fail(self, error: OutriderError) -> None:
        """End the call with a status."""
        self._failure = error
        self._changed.set()

    def drop(self) -> None:
        """Whatever ended the call: nothing of it stays in the engine."""
        for output in self.outputs:
            output.drop()

    async def next_responses(self, stream: bool) -> list[pb.GenerateResponse]:
        """Wait for messages to send; an empty list: there are no more.

        Args:
            stream: send what each output has so far; False: one message an output, when it is complete.

        Raises:
            OutriderError: what ended the call.
        """
        while True:
            failure = self._failure or next((output.failure for output in self.outputs if output.failure), None)
            if failure is not None:
                raise failure
            responses: list[pb.GenerateResponse] = []
            for output in self.outputs:
                chunk = output.take_chunk() if stream else None
                complete = output.take_complete(with_logprobs=not stream)
                responses += [response for response in (chunk, complete) if response is not None]
            if responses or all(output.is_complete for output in self.outputs):
                return responses
            self._changed.clear()
            await self._changed.wait()
