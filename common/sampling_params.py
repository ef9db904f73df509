"""Sampling parameters of one request, checked when they are made.

Names, defaults and meaning follow vLLM's `SamplingParams`, so that a caller can move over without reading this.
"""

from __future__ import annotations

from collections.abc import Sized
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from common.errors import InvalidArgumentError
from common.validation import to_outrider_error

MAX_SEED = 2**64 - 1
MAX_N = 64
MAX_STOP_STRINGS = 16
MAX_STOP_STRING_LENGTH = 512
MAX_STOP_TOKEN_IDS = 128
MAX_END_TOKEN_IDS = 16  # room for the model's own end tokens beside the stop tokens of a request
MAX_LOGIT_BIAS = 1024
MAX_BAD_WORDS = 256
MAX_BAD_WORD_TOKENS = 64  # a step compares each word whole with the text before each position
MAX_LOGPROBS = 20

# Below this temperature the noise is smaller than the rounding of the logits: it is greedy by any name.
GREEDY_TEMPERATURE = 1e-5


class SamplingParams(BaseModel):
    """How the tokens of one request are chosen. Immutable; `SamplingParams(temperature=0)` is greedy decoding.

    Raises:
        InvalidArgumentError: a value is out of range; names the field, the value and the limit.
        UnknownOptionError: a name that does not exist; names the nearest one that does.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    n: int = Field(default=1, ge=1, le=MAX_N)
    """How many outputs to draw for the prompt; output i uses seed + i."""
    temperature: float = Field(default=1.0, ge=0.0, le=100.0)
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    top_k: int = Field(default=0, ge=-1)
    """Keep the k most likely tokens; 0 and -1 keep all."""
    min_p: float = Field(default=0.0, ge=0.0, le=1.0)
    repetition_penalty: float = Field(default=1.0, gt=0.0, le=100.0)
    presence_penalty: float = Field(default=0.0, ge=-2.0, le=2.0)
    frequency_penalty: float = Field(default=0.0, ge=-2.0, le=2.0)
    logit_bias: dict[int, float] | None = None
    """Token id -> value added to its logit, each in [-100, 100]."""
    bad_words: tuple[str, ...] = ()
    """Strings whose token sequence is never completed."""
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    """The same as token ids, for callers that have no tokenizer."""
    min_tokens: int = Field(default=0, ge=0)
    """No end or stop token, and no stop string, before this many output tokens."""
    max_tokens: int | None = Field(default=16, ge=1)
    """None: as many as fit max_model_len."""
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    seed: int | None = Field(default=None, ge=0, le=MAX_SEED)
    """None: one is drawn at random when the request is accepted."""
    logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    """Log probabilities of the chosen token and of this many best ones, from the unprocessed logits."""
    prompt_logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    skip_special_tokens: bool = True
    num_speculative_tokens: int | None = Field(default=None, ge=0)
    """At most this many draft tokens a step for this request; 0 turns speculation off; None: the engine's value."""

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise to_outrider_error(error, type(self), values) from None

    @field_validator("stop", "bad_words", mode="before")
    @classmethod
    def _one_string_or_many(cls, value: object) -> object:
        if value is None:
            return ()
        return (value,) if isinstance(value, str) else value

    @field_validator("stop_token_ids", "bad_words_token_ids", mode="before")
    @classmethod
    def _none_is_empty(cls, value: object) -> object:
        return () if value is None else value

    @model_validator(mode="after")
    def _check_lists(self) -> SamplingParams:
        _check_count("stop", self.stop, MAX_STOP_STRINGS)
        _check_count("bad_words", self.bad_words, MAX_BAD_WORDS)
        _check_count("bad_words_token_ids", self.bad_words_token_ids, MAX_BAD_WORDS)
        _check_count("stop_token_ids", self.stop_token_ids, MAX_STOP_TOKEN_IDS)
        for text in self.stop:
            if not 1 <= len(text) <= MAX_STOP_STRING_LENGTH:
                raise InvalidArgumentError("stop", text, f"strings of 1 to {MAX_STOP_STRING_LENGTH} characters")
        if "" in self.bad_words:
            raise InvalidArgumentError("bad_words", "", "words that are not empty")
        if () in self.bad_words_token_ids:
            raise InvalidArgumentError("bad_words_token_ids", (), "words that are not empty")
        for word in self.bad_words_token_ids:
            if len(word) > MAX_BAD_WORD_TOKENS:
                limit = f"words of at most {MAX_BAD_WORD_TOKENS} tokens"
                raise InvalidArgumentError("bad_words_token_ids", f"a word of {len(word)} tokens", limit)
        if self.logit_bias is not None:
            _check_count("logit_bias", self.logit_bias, MAX_LOGIT_BIAS)
            for token, bias in self.logit_bias.items():
                if not -100.0 <= bias <= 100.0:
                    raise InvalidArgumentError(f"logit_bias[{token}]", bias, "a value in [-100, 100]")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidArgumentError("min_tokens", self.min_tokens, f"at most max_tokens = {self.max_tokens}")
        return self

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_TEMPERATURE

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise InvalidArgumentError where a token id of the parameters is outside [0, vocab_size)."""
        token_lists: list[tuple[str, tuple[int, ...]]] = [("stop_token_ids", self.stop_token_ids)]
        token_lists.append(("logit_bias", tuple(self.logit_bias or ())))
        token_lists += [("bad_words_token_ids", ids) for ids in self.bad_words_token_ids]
        for field, ids in token_lists:
            for token in ids:
                if not 0 <= token < vocab_size:
                    raise InvalidArgumentError(field, token, f"a token id in [0, {vocab_size})")


def _check_count(field: str, values: Sized, limit: int) -> None:
    count = len(values)
    if count > limit:
        raise InvalidArgumentError(field, f"{count} entries", f"at most {limit} entries")
