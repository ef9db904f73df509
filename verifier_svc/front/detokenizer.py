"""Token ids to text, one token at a time."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

# Some decoders treat the first token of a text differently (a leading space is dropped). A few prompt tokens before
# the output give them the context they had in training.
_CONTEXT_TOKENS = 8

_REPLACEMENT = "\ufffd"


class Detokenizer:
    """Text of one output, as it grows. Bytes of an unfinished character are held back until it is complete.

    Args:
        tokenizer: shared by all streams.
        prompt_token_ids: what the output follows.
        skip_special_tokens: leave special tokens out of the text.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._context = list(prompt_token_ids[-_CONTEXT_TOKENS:])
        if self._decode(self._context).endswith(_REPLACEMENT):
            # It ends within a character: the output's first bytes would change its text, and all of it come out again.
            self._context = []
        self._stream = DecodeStream(self._context, skip_special_tokens)
        self._pending: list[int] = []  # tokens since text last came out, behind `_context`

    def add(self, token_id: int) -> str:
        """Text that this token completes; often that of the token, sometimes none."""
        self._pending.append(token_id)
        try:
            text = self._stream.step(self._tokenizer, token_id)
        except Exception:  # tokenizers knows no narrower class
            return self._restart()
        if text:
            self._context = [token_id]
            self._pending.clear()
        return text or ""

    def flush(self) -> str:
        """What is held back: an unfinished character reads as U+FFFD. For the end; no token may follow."""
        if not self._pending:
            return ""
        before = self._decode(self._context)
        whole = self._decode(self._context + self._pending)
        return whole[len(before) :] if whole.startswith(before) else self._decode(self._pending)

    def _restart(self) -> str:
        """Text of the pending tokens, and a new stream behind them.

        Byte-fallback decoders (Llama 2, Mistral) read a run of bytes as one: a byte that fits no character turns the
        characters before it into U+FFFD too. They are out already, and the stream refuses to go on.
        """
        text = self.flush()
        self._context, self._pending = self._pending, []
        self._stream = DecodeStream(self._context, self._skip_special_tokens)
        return text

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._skip_special_tokens)
