"""The offline API: a model in this process, prompts in, outputs back."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from numbers import Integral
from types import TracebackType
from typing import Any

from tqdm import tqdm

from common.config import EngineConfig
from common.errors import InvalidArgumentError
from common.sampling_params import SamplingParams
from common.types import FinishReason, Request, TokenLogprobs
from model_executor.drafting import DraftMethod
from outrider.local import build_local_engine
from outrider.outputs import CompletionOutput, Logprob, RequestOutput
from verifier_svc.front.admission import build_requests
from verifier_svc.front.output_stream import OutputDelta, OutputStream
from verifier_svc.orchestrator.step import Event

Prompt = str | Sequence[int]


@dataclass(slots=True)
class _Sample:
    """One output that is being made."""

    index: int
    stream: OutputStream
    ready: deque[tuple[_Sample, OutputDelta]]
    """Where the call that asked for it finds its deltas."""
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list[TokenLogprobs])


class LLM:
    """Loads a model and generates from it, with speculation.

    Args:
        model: a Hugging Face model directory.
        options: the fields of `EngineConfig`, such as drafter="ngram", num_speculative_tokens=3, max_model_len=2048.

    Raises:
        UnknownOptionError: an option that does not exist; names the nearest one that does.
        InvalidArgumentError: a value out of range.
        ModelLoadError: the directory cannot be served.
    """

    def __init__(self, model: str, **options: Any) -> None:
        self._start(EngineConfig(model=str(model), **options))

    @classmethod
    def with_draft_method(cls, model: str, draft_method: DraftMethod, **options: Any) -> LLM:
        """An LLM that drafts with an object of the caller's: for experiments and tests."""
        llm = cls.__new__(cls)
        llm._start(EngineConfig(model=str(model), **options), draft_method)
        return llm

    def _start(self, config: EngineConfig, draft_method: DraftMethod | None = None) -> None:
        self.config = config
        local = build_local_engine(config, draft_method)
        self._engine = local.engine
        self._served = local.served
        self._request_ids = itertools.count()
        self._samples: dict[str, _Sample] = {}  # unfinished, by request id

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Generate for all prompts and wait for the end.

        Args:
            prompts: text or token ids; one, or a list.
            sampling_params: for all prompts, or one for each. None: the defaults.
            use_tqdm: show progress, if standard error is a terminal.

        Returns:
            One output a prompt, in their order.

        Raises:
            InvalidArgumentError: a prompt or parameter is out of range; nothing was generated, and the engine goes on.
        """
        prompt_list = _as_prompts(prompts)
        params_list = _as_params(sampling_params, len(prompt_list))
        token_lists = [self._tokenize(prompt) for prompt in prompt_list]
        if not prompt_list:
            return []
        samples: list[_Sample] = []
        ready: deque[tuple[_Sample, OutputDelta]] = deque()
        for tokens, params in zip(token_lists, params_list, strict=True):
            for index, request in enumerate(self._build(tokens, params)):
                samples.append(_Sample(index, OutputStream(request, self._served.tokenizer), ready))
        with tqdm(total=len(samples), desc="generating", unit="output", disable=None if use_tqdm else True) as bar:
            for sample, _ in self._run(samples):
                bar.update(sample.stream.finish_reason is not None)
        return self._collect(prompt_list, token_lists, params_list, samples)

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Iterator[OutputDelta]:
        """Generate one output and yield what each step adds. Closing the iterator early aborts the request."""
        (params,) = _as_params(sampling_params, 1)
        if params.n != 1:
            raise InvalidArgumentError("n", params.n, "1, when streaming")
        (request,) = self._build(self._tokenize(prompt), params)
        sample = _Sample(0, OutputStream(request, self._served.tokenizer), deque())
        # The inner generator holds the request: it is closed with this one, not when the last reference to it goes.
        with closing(self._run([sample])) as deltas:
            for _, delta in deltas:
                yield delta

    def close(self) -> None:
        """Stop the engine. The model's memory is freed with the object."""
        self._engine.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _tokenize(self, prompt: Prompt) -> Sequence[int]:
        if isinstance(prompt, str):
            return self._served.tokenize(prompt)
        if not _is_list(prompt):
            raise InvalidArgumentError("prompt", prompt, "text or a list of token ids")
        return prompt

    def _build(self, tokens: Sequence[int], params: SamplingParams) -> list[Request]:
        return build_requests(f"request-{next(self._request_ids)}", tokens, params, self._served)

    def _run(self, samples: list[_Sample]) -> Generator[tuple[_Sample, OutputDelta], None, None]:
        """Drive the engine until all samples are finished; whatever ends this early aborts what is left."""
        engine = self._engine
        waiting = deque(sample.stream.request for sample in samples)
        mine = {sample.stream.request.request_id: sample for sample in samples}
        self._samples |= mine
        ready = samples[0].ready
        num_left = len(samples)
        try:
            while num_left:
                while waiting and engine.orchestrator.num_waiting < self.config.max_num_waiting:
                    engine.add(waiting.popleft())
                self._dispatch(engine.step())
                while ready:
                    sample, delta = ready.popleft()
                    num_left -= delta.finish_reason is not None
                    yield sample, delta
        finally:
            for request_id in mine:
                if self._samples.pop(request_id, None) is not None:
                    engine.abort(request_id)
            self._dispatch(engine.drain())

    def _dispatch(self, events: list[Event]) -> None:
        """Give every event to the stream it belongs to, whichever call is driving the engine."""
        for event in events:
            sample = self._samples.get(event.request_id)
            if sample is None:
                continue  # a stop string has ended it in an earlier event of the same drain
            if event.prompt_logprobs:
                sample.prompt_logprobs.extend(event.prompt_logprobs)
            delta = sample.stream.add(
                event.tokens, event.num_draft_tokens, event.num_accepted_tokens, event.finish_reason, event.logprobs
            )
            if delta.finish_reason is not None:
                del self._samples[event.request_id]
                if event.finish_reason is None:  # a stop string, of which the engine knows nothing
                    self._engine.abort(event.request_id)
            sample.ready.append((sample, delta))

    def _collect(
        self,
        prompts: list[Prompt],
        token_lists: list[Sequence[int]],
        params_list: list[SamplingParams],
        samples: list[_Sample],
    ) -> list[RequestOutput]:
        outputs: list[RequestOutput] = []
        position = 0
        for prompt, tokens, params in zip(prompts, token_lists, params_list, strict=True):
            of_prompt = samples[position : position + params.n]
            position += params.n
            outputs.append(
                RequestOutput(
                    request_id=of_prompt[0].stream.request.request_id.removesuffix("-0" if params.n > 1 else ""),
                    prompt=prompt if isinstance(prompt, str) else None,
                    prompt_token_ids=list(tokens),
                    prompt_logprobs=self._prompt_logprobs(of_prompt[0], params),
                    outputs=[self._completion(sample) for sample in of_prompt],
                )
            )
        return outputs

    def _completion(self, sample: _Sample) -> CompletionOutput:
        stream = sample.stream
        wants_logprobs = stream.request.params.logprobs is not None
        reason = stream.finish_reason or FinishReason.ABORT
        return CompletionOutput(
            index=sample.index,
            text=stream.text,
            token_ids=stream.token_ids,
            finish_reason=str(reason),
            stop_reason=stream.stop_reason,
            logprobs=[self._logprobs(entry) for entry in stream.logprobs] if wants_logprobs else None,
            cumulative_logprob=sum(entry.logprobs[0] for entry in stream.logprobs) if wants_logprobs else None,
            draft_stats=stream.draft_stats,
        )

    def _prompt_logprobs(self, sample: _Sample, params: SamplingParams) -> list[dict[int, Logprob] | None] | None:
        if params.prompt_logprobs is None:
            return None
        return [None, *(self._logprobs(entry) for entry in sample.prompt_logprobs)]

    def _logprobs(self, entry: TokenLogprobs) -> dict[int, Logprob]:
        """The chosen token first; the best ones have the ranks 1, 2, ..."""
        tokenizer = self._served.tokenizer
        found: dict[int, Logprob] = {}
        ranks = [entry.rank, *range(1, len(entry.token_ids))]
        for token, logprob, rank in zip(entry.token_ids, entry.logprobs, ranks, strict=True):
            text = None if tokenizer is None else tokenizer.decode([token], skip_special_tokens=False)
            found.setdefault(token, Logprob(logprob, rank, text))
        return found


def _as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    if not _is_list(prompts):
        raise InvalidArgumentError("prompts", prompts, "text, a list of token ids, or a list of these")
    if len(prompts) > 0 and isinstance(prompts[0], Integral):
        return [prompts]  # type: ignore[list-item]
    for index, prompt in enumerate(prompts):
        if not isinstance(prompt, str) and not _is_list(prompt):
            raise InvalidArgumentError(f"prompts[{index}]", prompt, "text or a list of token ids")
    return list(prompts)  # type: ignore[arg-type]


def _is_list(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray)


def _as_params(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    if params is None:
        params = SamplingParams()
    if isinstance(params, SamplingParams):
        return [params] * count
    if not _is_list(params) or not all(isinstance(entry, SamplingParams) for entry in params):
        raise InvalidArgumentError("sampling_params", params, "SamplingParams, or a list of them")
    if len(params) != count:
        raise InvalidArgumentError("sampling_params", f"{len(params)} entries", f"one for each of the {count} prompts")
    return list(params)
