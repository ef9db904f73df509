"""From what a caller asks to a request the engine can run: every check stands before the queue."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral

from tokenizers import Tokenizer

from common.errors import InvalidArgumentError
from common.sampling_params import (
    MAX_BAD_WORD_TOKENS,
    MAX_END_TOKEN_IDS,
    MAX_SEED,
    MAX_STOP_TOKEN_IDS,
    SamplingParams,
)
from common.types import Request


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What a request is checked against."""

    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    num_speculative_tokens: int
    tokenizer: Tokenizer | None
    """None: token ids in and out."""

    def tokenize(self, prompt: str) -> list[int]:
        """Token ids of a prompt, with the special tokens that the tokenizer adds."""
        if self.tokenizer is None:
            raise InvalidArgumentError("prompt", prompt, "token ids, as the engine has no tokenizer")
        return _encode(self.tokenizer, "prompt", prompt, add_special_tokens=True)


def build_requests(
    request_id: str,
    prompt_token_ids: Sequence[int],
    params: SamplingParams,
    model: ServedModel,
    num_output_tokens: int = 0,
) -> list[Request]:
    """The `n` requests of one prompt. Output i is drawn with seed + i.

    Token ids may be integers of numpy too; an array is no list of token ids. With `num_output_tokens` that many tokens
    at the end of the prompt are output which the request got before a failure; `params` are those it had then.

    Raises:
        InvalidArgumentError: names the field, the value and the limit.
    """
    prompt = _checked_prompt(prompt_token_ids, model)
    params.check_vocabulary(model.vocab_size)
    if model.tokenizer is None and (params.stop or params.bad_words):
        field = "stop" if params.stop else "bad_words"
        raise InvalidArgumentError(field, getattr(params, field), "none, as the engine has no tokenizer")
    _check_resumed(num_output_tokens, len(prompt), params)
    prompt_len = len(prompt) - num_output_tokens
    room = model.max_model_len - prompt_len
    if params.min_tokens > room:
        limit = f"at most max_model_len - prompt tokens = {room}"
        raise InvalidArgumentError("min_tokens", params.min_tokens, limit)
    max_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
    stop_token_ids = _stop_token_ids(params, model)
    num_draft = model.num_speculative_tokens
    if params.num_speculative_tokens is not None:
        num_draft = min(num_draft, params.num_speculative_tokens)
    seed = secrets.randbits(64) if params.seed is None else params.seed
    bad_words = params.bad_words_token_ids + _bad_word_ids(params.bad_words, model)
    return [
        Request(
            request_id=request_id if params.n == 1 else f"{request_id}-{index}",
            prompt_token_ids=prompt,
            params=params,
            seed=(seed + index) % (MAX_SEED + 1),
            max_len=prompt_len + max_tokens,
            stop_token_ids=stop_token_ids,
            bad_words=bad_words,
            num_speculative_tokens=num_draft,
            num_output_tokens=num_output_tokens,
        )
        for index in range(params.n)
    ]


def _stop_token_ids(params: SamplingParams, model: ServedModel) -> tuple[int, ...]:
    """Stop tokens of the request, then end tokens of the model: those that it can draw, whatever its files name."""
    ends = () if params.ignore_eos else (token for token in model.eos_token_ids if token < model.vocab_size)
    found = tuple(dict.fromkeys((*params.stop_token_ids, *ends)))
    limit = MAX_STOP_TOKEN_IDS + MAX_END_TOKEN_IDS
    if len(found) > limit:
        expected = f"at most {limit} with the end tokens of the model"
        raise InvalidArgumentError("stop_token_ids", f"{len(found)} entries", expected)
    return found


def _checked_prompt(prompt_token_ids: Sequence[int], model: ServedModel) -> list[int]:
    count = len(prompt_token_ids)
    if count == 0:
        raise InvalidArgumentError("prompt", [], "at least one token")
    if count >= model.max_model_len:
        limit = f"fewer than max_model_len = {model.max_model_len}"
        raise InvalidArgumentError("prompt", f"{count} tokens", limit)
    # The common case in C: 128,000 tokens take 6 ms and not 110, for which nobody else would get a token.
    is_plain = set(map(type, prompt_token_ids)) == {int}
    if is_plain and min(prompt_token_ids) >= 0 and max(prompt_token_ids) < model.vocab_size:
        return list(prompt_token_ids)
    for index, token in enumerate(prompt_token_ids):
        if not isinstance(token, Integral) or isinstance(token, bool) or not 0 <= token < model.vocab_size:
            raise InvalidArgumentError(f"prompt[{index}]", token, f"a token id in [0, {model.vocab_size})")
    return [int(token) for token in prompt_token_ids]


def _check_resumed(num_output_tokens: int, num_tokens: int, params: SamplingParams) -> None:
    if not 0 <= num_output_tokens < num_tokens:
        limit = f"0 to {num_tokens - 1}, fewer than the tokens sent"
        raise InvalidArgumentError("num_output_tokens", num_output_tokens, limit)
    if params.max_tokens is not None and num_output_tokens >= params.max_tokens:
        limit = f"fewer than max_tokens = {params.max_tokens}"
        raise InvalidArgumentError("num_output_tokens", num_output_tokens, limit)
    if num_output_tokens and params.n != 1:
        raise InvalidArgumentError("n", params.n, "1, for an output that is resumed")


def _encode(tokenizer: Tokenizer, field: str, text: str, add_special_tokens: bool) -> list[int]:
    try:
        text.encode()
    except UnicodeEncodeError as error:  # the tokenizer's own message would name neither the field nor the place
        raise InvalidArgumentError(field, text, f"text without lone surrogates, as at {error.start}") from None
    return tokenizer.encode(text, add_special_tokens=add_special_tokens).ids


def _bad_word_ids(words: Sequence[str], model: ServedModel) -> tuple[tuple[int, ...], ...]:
    """Each word as it is spelt at the beginning of a text and behind a space."""
    spellings: dict[tuple[int, ...], None] = {}
    for word in words:
        for text in (word, f" {word.lstrip()}"):
            assert model.tokenizer is not None
            ids = tuple(_encode(model.tokenizer, "bad_words", text, add_special_tokens=False))
            if any(token >= model.vocab_size for token in ids):
                raise InvalidArgumentError("bad_words", word, f"words of the model's {model.vocab_size} tokens")
            if len(ids) > MAX_BAD_WORD_TOKENS:
                limit = f"words of at most {MAX_BAD_WORD_TOKENS} tokens, where this one has {len(ids)}"
                raise InvalidArgumentError("bad_words", word, limit)
            if ids:
                spellings[ids] = None
    return tuple(spellings)
