"""How each row samples: the parameters of its request, on the device, and what they need, on the host."""

from __future__ import annotations

import math
from typing import Final

import torch
from torch import Tensor
from torch.nn.functional import pad

from common.errors import InvalidArgumentError
from common.sampling_params import GREEDY_TEMPERATURE, MAX_END_TOKEN_IDS, MAX_STOP_TOKEN_IDS
from common.types import Request

# What a row needs beyond an argmax. Plain integers: they are OR-ed for every logits row of every step.
RANDOM: Final = 1  # a temperature: noise
MIN_P: Final = 2  # random rows only
TOP_K: Final = 4  # random rows only
TOP_P: Final = 8  # random rows only
PENALTIES: Final = 16
LOGIT_BIAS: Final = 32
BAD_WORDS: Final = 64
MIN_TOKENS: Final = 128
TRUNCATED: Final = TOP_K | TOP_P
PROCESSED: Final = PENALTIES | LOGIT_BIAS | BAD_WORDS | MIN_TOKENS


class SamplingState:
    """Sampling parameters of all rows, made once and overwritten when a row gets a new request.

    Args:
        max_num_seqs: R, rows.
        vocab_size: V.
        device: where the tensors live.
    """

    def __init__(self, max_num_seqs: int, vocab_size: int, device: torch.device) -> None:
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

        # Host side. Sparse data stays a short list per row: most requests have none.
        self.flags = [0] * rows
        self.top_k_host = [0] * rows  # 0: off
        self.max_stop_tokens = 1  # columns of stop_token_ids in use by any row so far
        self.logit_bias: list[tuple[Tensor, Tensor] | None] = [None] * rows  # token ids [m] int64, values [m] float32
        self.bad_words: list[tuple[Tensor, Tensor] | None] = [None] * rows  # see `_bad_word_tensors`
        self._bad_word_width = 0

    def set_row(self, row: int, request: Request) -> None:
        """Give `row` to a request, replacing everything the row's last request left.

        Raises:
            InvalidArgumentError: more stop and end tokens than a row holds.
        """
        params = request.params
        num_stops = len(request.stop_token_ids)
        if num_stops > self.stop_token_ids.shape[1]:
            limit = self.stop_token_ids.shape[1]
            raise InvalidArgumentError("stop_token_ids", f"{num_stops} entries", f"at most {limit} with the end tokens")
        random = not params.is_greedy
        top_k = params.top_k if 0 < params.top_k < self.vocab_size else self.vocab_size

        self.seed[row] = request.seed if request.seed < 2**63 else request.seed - 2**64
        self.temperature[row] = params.temperature if random else 0.0
        self.top_p[row] = params.top_p
        self.top_k[row] = top_k
        self.log_min_p[row] = math.log(params.min_p) if params.min_p > 0.0 else -math.inf
        self.repetition_penalty[row] = params.repetition_penalty
        self.presence_penalty[row] = params.presence_penalty
        self.frequency_penalty[row] = params.frequency_penalty
        self.min_len[row] = request.prompt_len + params.min_tokens
        self.stop_token_ids[row].fill_(-1)
        self.stop_token_ids[row, :num_stops] = torch.tensor(request.stop_token_ids, dtype=torch.int64)

        self.top_k_host[row] = top_k if top_k < self.vocab_size else 0
        self.max_stop_tokens = max(self.max_stop_tokens, num_stops)
        self.logit_bias[row] = self._bias_tensors(params.logit_bias)
        self.bad_words[row] = self._bad_word_tensors(request.bad_words)
        self.flags[row] = _flags(request, has_top_k=top_k < self.vocab_size)

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
