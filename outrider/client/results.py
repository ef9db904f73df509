"""Finished outputs in the shape of the offline API."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer

from common.types import FinishReason, TokenLogprobs
from outrider.client.generation import Generation
from outrider.outputs import CompletionOutput, Logprob, RequestOutput


def build_output(request_id: str, prompt: str | None, generations: Sequence[Generation]) -> RequestOutput:
    """The result of one prompt; `generations` are its outputs in their order."""
    first = generations[0]
    request = first.request
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    if request.params.prompt_logprobs is not None:
        prompt_logprobs = [None, *(_logprobs(entry, first.stream.tokenizer) for entry in first.prompt_logprobs)]
    return RequestOutput(
        request_id=request_id,
        prompt=prompt,
        prompt_token_ids=request.prompt_token_ids,
        prompt_logprobs=prompt_logprobs,
        outputs=[_completion(generation) for generation in generations],
    )


def _completion(generation: Generation) -> CompletionOutput:
    stream = generation.stream
    wants_logprobs = generation.request.params.logprobs is not None
    return CompletionOutput(
        index=generation.index,
        text=stream.text,
        token_ids=stream.token_ids,
        finish_reason=str(stream.finish_reason or FinishReason.ABORT),
        stop_reason=stream.stop_reason,
        logprobs=[_logprobs(entry, stream.tokenizer) for entry in stream.logprobs] if wants_logprobs else None,
        cumulative_logprob=sum(entry.logprobs[0] for entry in stream.logprobs) if wants_logprobs else None,
        draft_stats=stream.draft_stats,
    )


def _logprobs(entry: TokenLogprobs, tokenizer: Tokenizer | None) -> dict[int, Logprob]:
    """The chosen token first; the best ones have the ranks 1, 2, ..."""
    found: dict[int, Logprob] = {}
    ranks = [entry.rank or None, *range(1, len(entry.token_ids))]
    for token, logprob, rank in zip(entry.token_ids, entry.logprobs, ranks, strict=True):
        text = None if tokenizer is None else tokenizer.decode([token], skip_special_tokens=False)
        found.setdefault(token, Logprob(logprob, rank, text))
    return found
