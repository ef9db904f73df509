"""From the engine's events to what a caller sees of one output: tokens, text, logprobs, why it ended."""

from __future__ import annotations

from dataclasses import dataclass, field

from tokenizers import Tokenizer

from common.types import DraftStats, FinishReason, Request, TokenLogprobs
from verifier_svc.front.detokenizer import Detokenizer
from verifier_svc.front.stop_strings import StopStrings


@dataclass(frozen=True, slots=True)
class OutputDelta:
    """What one step added to an output. Deltas of a stream joined together are the whole output."""

    token_ids: list[int]
    text: str
    num_draft_tokens: int
    num_accepted_tokens: int
    """The first this many of `token_ids` were draft tokens."""
    num_accepted_chars: int
    """The first this many characters of `text` are theirs."""
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    """The stop token or stop string that ended the output; None for an end token of the model and for a limit."""


@dataclass(slots=True)
class OutputStream:
    """One output as it grows. Tokens behind a stop string are cut, whichever step brought them."""

    request: Request
    tokenizer: Tokenizer | None
    """None: tokens only."""
    token_ids: list[int] = field(default_factory=list[int])
    text: str = ""
    logprobs: list[TokenLogprobs] = field(default_factory=list[TokenLogprobs])
    draft_stats: DraftStats = field(default_factory=DraftStats)
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    _num_shown: int = 0
    _detokenizer: Detokenizer | None = None
    _stop_strings: StopStrings = field(init=False)

    def __post_init__(self) -> None:
        params = self.request.params
        self._stop_strings = StopStrings(params.stop, params.include_stop_str_in_output)
        if self.tokenizer is None:
            return
        tokens, prompt_len = self.request.prompt_token_ids, self.request.prompt_len
        self._detokenizer = Detokenizer(self.tokenizer, tokens[:prompt_len], params.skip_special_tokens)
        # Output from before a failure: shown already, but a stop string or a character may end in what comes now.
        self.text = "".join(self._detokenizer.add(token) for token in tokens[prompt_len:])
        self._num_shown = self._stop_strings.num_safe(self.text)

    def add(
        self,
        tokens: list[int],
        num_draft_tokens: int,
        num_accepted_tokens: int,
        finish_reason: FinishReason | None,
        logprobs: list[TokenLogprobs] | None,
    ) -> OutputDelta:
        """Take what a step committed. If a stop string ends the output here, `finish_reason` says so, and the caller
        has to abort the request in the engine, which does not know."""
        start = len(self.token_ids)
        num_shown = self._num_shown
        accepted_end = num_shown  # length of the text that ends with the last accepted token
        # A stop token belongs to the tokens, but not to the text.
        hides_last = finish_reason is FinishReason.STOP and not self.request.params.include_stop_str_in_output
        num_texts = len(tokens) - 1 if hides_last else len(tokens)
        for index, token in enumerate(tokens):
            self.token_ids.append(token)
            if self._detokenizer is None or index >= num_texts:
                continue
            is_stopped = self._add_text(self._detokenizer.add(token))
            if index < num_accepted_tokens:
                accepted_end = len(self.text)
            if is_stopped:
                break
        count = len(self.token_ids) - start
        num_accepted_tokens = min(num_accepted_tokens, count)
        self.draft_stats.add(num_draft_tokens, num_accepted_tokens)
        if logprobs is not None:
            self.logprobs += logprobs[:count]
        if self.finish_reason is None and finish_reason is not None:
            self._finish(finish_reason)
        shown = self._show()
        return OutputDelta(
            token_ids=self.token_ids[start:],
            text=shown,
            num_draft_tokens=num_draft_tokens,
            num_accepted_chars=max(0, min(accepted_end - num_shown, len(shown))),
            num_accepted_tokens=num_accepted_tokens,
            logprobs=None if logprobs is None else logprobs[:count],
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
        )

    def _add_text(self, text: str) -> bool:
        """True: a stop string is complete, and the output ends with this token."""
        self.text += text
        params = self.request.params
        num_tokens = self.request.num_output_tokens + len(self.token_ids)
        if not params.stop or not text or num_tokens < params.min_tokens:
            return False
        hit = self._stop_strings.find(self.text, len(text))
        if hit is None:
            return False
        cut, self.stop_reason = hit
        self.text = self.text[:cut]
        self.finish_reason = FinishReason.STOP
        return True

    def _finish(self, reason: FinishReason) -> None:
        self.finish_reason = reason
        if reason is FinishReason.STOP and self.token_ids[-1] in self.request.params.stop_token_ids:
            self.stop_reason = self.token_ids[-1]
        if self._detokenizer is not None:
            self.text += self._detokenizer.flush()

    def _show(self) -> str:
        end = len(self.text) if self.finish_reason is not None else self._stop_strings.num_safe(self.text)
        shown = self.text[self._num_shown : end]
        self._num_shown = max(self._num_shown, end)
        return shown
