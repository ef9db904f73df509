"""How each row samples: the parameters of its request, on the device, and what they need, on the host."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Final

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from common.errors import InvalidArgumentError
from common.sampling_params import GREEDY_TEMPERATURE, MAX_END_TOKEN_IDS, MAX_LOGIT_BIAS, MAX_STOP_TOKEN_IDS
from common.types import Request
from model_executor.row_state import RowWrite, write_now
from model_executor.sampling_flags import (
    BAD_WORDS,
    LOGIT_BIAS,
    MIN_P,
    MIN_TOKENS,
    PENALTIES,
    RANDOM,
    TOP_K,
    TOP_P,
)
from model_executor.sampling_tables import MAX_ROW_BAD_WORDS, ProcessorTables, make_processor_tables

NO_LOGPROBS: Final = -1


class SamplingState:
    """Sampling parameters of all rows, made once and overwritten when a row gets a new request.

    Args:
        max_num_seqs: R, rows.
        vocab_size: V.
        device: where the tensors live.
        has_tables: biases and bad words go to tables of `DeviceSampler`, and not to the lists of `Sampler`.
    """

    def __init__(self, max_num_seqs: int, vocab_size: int, device: torch.device, has_tables: bool = False) -> None:
        self.vocab_size = vocab_size
        self.device = device
        rows = max_num_seqs
        self.seed = torch.zeros(rows, dtype=torch.int64, device=device)  # [R] unsigned 64 bits kept in int64
        self.temperature = torch.zeros(rows, dtype=torch.float32, device=device)  # [R] 0: greedy
        self.top_p = torch.ones(rows, dtype=torch.float32, device=device)  # [R] 1: off
        self.top_k = torch.full((rows,), vocab_size, dtype=torch.int64, device=device)  # [R] V: off
        self.log_min_p = torch.full((rows,), -math.inf, dtype=torch.float32, device=device)  # [R] -inf: off
        self.repetition_penalty = torch.ones(rows, dtype=torch.float32, device=device)  # [R]
        self.presence_penalty = torch.zeros(rows, dtype=torch.float32, device=device)  # [R]
        self.frequency_penalty = torch.zeros(rows, dtype=torch.float32, device=device)  # [R]
        self.min_len = torch.zeros(rows, dtype=torch.int64, device=device)  # [R] prompt_len + min_tokens
        max_stops = MAX_STOP_TOKEN_IDS + MAX_END_TOKEN_IDS
        self.stop_token_ids = torch.full((rows, max_stops), -1, dtype=torch.int64, device=device)  # [R, S] -1: none
        self.row_flags = torch.zeros(rows, dtype=torch.int32, device=device)  # [R] of model_executor.sampling_flags
        self.num_logprobs = torch.full((rows,), NO_LOGPROBS, dtype=torch.int32, device=device)  # [R]
        self.tables: ProcessorTables | None = make_processor_tables(rows, vocab_size, device) if has_tables else None

        # Host side. Sparse data stays a short list per row: most requests have none.
        self.flags = [0] * rows
        self.num_logprobs_host = [NO_LOGPROBS] * rows
        self.top_k_host = [0] * rows  # 0: off
        self.max_stop_tokens = 1  # columns of stop_token_ids in use by any row so far
        self.logit_bias: list[tuple[Tensor, Tensor] | None] = [None] * rows  # token ids [m] int64, values [m] float32
        self.bad_words: list[tuple[Tensor, Tensor] | None] = [None] * rows  # see `_bad_word_tensors`
        self._bad_word_width = 0
        # What each row holds on the device: most requests differ in few values from the one before them in the row.
        self._written: list[dict[str, float | tuple[int, ...]]] = [self._defaults() for _ in range(rows)]

    def set_row(self, row: int, request: Request, write: RowWrite = write_now) -> None:
        """Give `row` to a request, replacing everything the row's last request left.

        Args:
            row: below R.
            request: its parameters are checked already.
            write: brings values to the device; no other device work is done where there are tables.

        Raises:
            InvalidArgumentError: more stop and end tokens, biases or bad words than a row holds.
        """
        params = request.params
        _check_capacity(
            "stop_token_ids", len(request.stop_token_ids), self.stop_token_ids.shape[1], " with the end tokens"
        )
        _check_capacity("logit_bias", len(params.logit_bias or ()), MAX_LOGIT_BIAS)
        _check_capacity("bad_words", len(request.bad_words), MAX_ROW_BAD_WORDS)
        random = not params.is_greedy
        top_k = params.top_k if 0 < params.top_k < self.vocab_size else self.vocab_size
        flags = _flags(request, has_top_k=top_k < self.vocab_size)
        self.flags[row] = flags
        self.num_logprobs_host[row] = NO_LOGPROBS if params.logprobs is None else params.logprobs
        self.top_k_host[row] = top_k if top_k < self.vocab_size else 0
        self.max_stop_tokens = max(self.max_stop_tokens, len(request.stop_token_ids))
        self._write_row(
            row,
            {
                "seed": request.seed if request.seed < 2**63 else request.seed - 2**64,
                "temperature": params.temperature if random else 0.0,
                "top_p": params.top_p,
                "top_k": top_k,
                "log_min_p": math.log(params.min_p) if params.min_p > 0.0 else -math.inf,
                "repetition_penalty": params.repetition_penalty,
                "presence_penalty": params.presence_penalty,
                "frequency_penalty": params.frequency_penalty,
                "min_len": request.prompt_len + params.min_tokens,
                "stop_token_ids": request.stop_token_ids,
                "row_flags": flags,
                "num_logprobs": self.num_logprobs_host[row],
            },
            write,
        )
        if self.tables is not None:
            _write_tables(self.tables, row, request, flags, write)
        else:
            self.logit_bias[row] = self._bias_tensors(params.logit_bias)
            self.bad_words[row] = self._bad_word_tensors(request.bad_words)

    def is_plain(self, rows: Iterable[int]) -> bool:
        """Whether all these rows sample by temperature alone: the plain variant of a step does for them."""
        flags = self.flags
        return all(flags[row] & ~RANDOM == 0 for row in rows)

    def wants_logprobs(self, rows: Iterable[int]) -> bool:
        """Whether any of these rows asks for log probabilities."""
        counts = self.num_logprobs_host
        return any(counts[row] != NO_LOGPROBS for row in rows)

    def _defaults(self) -> dict[str, float | tuple[int, ...]]:
        """What the constructor puts into every row of the tensors of these names."""
        return {
            "seed": 0,
            "temperature": 0.0,
            "top_p": 1.0,
            "top_k": self.vocab_size,
            "log_min_p": -math.inf,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "min_len": 0,
            "stop_token_ids": (),
            "row_flags": 0,
            "num_logprobs": NO_LOGPROBS,
        }

    def _write_row(self, row: int, values: dict[str, float | tuple[int, ...]], write: RowWrite) -> None:
        written = self._written[row]
        for name, value in values.items():
            if written[name] == value:
                continue
            written[name] = value
            tensor: Tensor = getattr(self, name)
            if isinstance(value, tuple):
                padded = np.full(tensor.shape[1], -1, dtype=np.int64)
                padded[: len(value)] = value
                write(tensor, row * tensor.shape[1], padded)
            else:
                write(tensor, row, np.array([value], dtype=_NUMPY_TYPES[tensor.dtype]))

    def _bias_tensors(self, logit_bias: dict[int, float] | None) -> tuple[Tensor, Tensor] | None:
        if not logit_bias:
            return None
        token_ids = torch.tensor(list(logit_bias), dtype=torch.int64, device=self.device)
        return token_ids, torch.tensor(list(logit_bias.values()), dtype=torch.float32, device=self.device)

    def _bad_word_tensors(self, words: tuple[tuple[int, ...], ...]) -> tuple[Tensor, Tensor] | None:
        """Prefixes [W, M] int64, aligned to the right and padded with -1 (matches anything), and last tokens [W].

        M is the same for all rows, so that the words of a batch are one tensor; a longer word widens every row.
        """
        if not words:
            return None
        longest = max(len(word) for word in words) - 1
        if longest > self._bad_word_width:
            wider = (longest - self._bad_word_width, 0)
            self.bad_words = [other and (pad(other[0], wider, value=-1), other[1]) for other in self.bad_words]
            self._bad_word_width = longest
        width = self._bad_word_width
        prefixes = [[-1] * (width + 1 - len(word)) + list(word[:-1]) for word in words]
        last = torch.tensor([word[-1] for word in words], dtype=torch.int64, device=self.device)
        return torch.tensor(prefixes, dtype=torch.int64, device=self.device).view(len(words), width), last


_NUMPY_TYPES: Final = {torch.int64: np.int64, torch.int32: np.int32, torch.float32: np.float32}


def _check_capacity(field: str, count: int, limit: int, what: str = "") -> None:
    if count > limit:
        raise InvalidArgumentError(field, f"{count} entries", f"at most {limit}{what}")


def _write_tables(tables: ProcessorTables, row: int, request: Request, flags: int, write: RowWrite) -> None:
    """What a row needs that asks for anything; whatever the flags leave out is never read."""
    if flags & PENALTIES:
        write(tables.counted_len, row, np.zeros(1, dtype=np.int64))
    if flags & LOGIT_BIAS and request.params.logit_bias:
        biases = request.params.logit_bias
        write(tables.num_biases, row, np.array([len(biases)], dtype=np.int64))
        start = row * tables.bias_tokens.shape[1]
        write(tables.bias_tokens, start, np.array(list(biases), dtype=np.int64))
        write(tables.bias_values, start, np.array(list(biases.values()), dtype=np.float32))
    if flags & BAD_WORDS:
        words = request.bad_words
        write(tables.num_bad_words, row, np.array([len(words)], dtype=np.int64))
        ends = np.cumsum([len(word) for word in words], dtype=np.int64)
        write(tables.bad_word_ends, row * tables.bad_word_ends.shape[1], ends)
        joined = np.array([token for word in words for token in word], dtype=np.int32)
        write(tables.bad_word_tokens, row * tables.bad_word_tokens.shape[1], joined)


def _flags(request: Request, has_top_k: bool) -> int:
    params = request.params
    flags = 0
    if params.temperature >= GREEDY_TEMPERATURE:
        flags |= RANDOM
        flags |= MIN_P if params.min_p > 0.0 else 0
        flags |= TOP_K if has_top_k else 0
        flags |= TOP_P if params.top_p < 1.0 else 0
    if params.repetition_penalty != 1.0 or params.presence_penalty != 0.0 or params.frequency_penalty != 0.0:
        flags |= PENALTIES
    flags |= LOGIT_BIAS if params.logit_bias else 0
    flags |= BAD_WORDS if request.bad_words else 0
    flags |= MIN_TOKENS if params.min_tokens > 0 and request.stop_token_ids else 0
    return flags
