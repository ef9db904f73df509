"""Log probabilities of prompt tokens, computed chunk by chunk beside the prefill."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol

from torch import Tensor

from common.types import TokenLogprobs
from model_executor.row_state import RowState
from verifier_svc.sampling.logprobs import gather_logprobs

# Logits of this many positions at a time: 128 x 128k tokens in float32 are 64 MB.
_POSITIONS_AT_A_TIME = 128


class LogitsHead(Protocol):
    """The end of a decoder."""

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """[n, hidden] -> [n, vocab_size] float32."""
        ...


class PromptChunk(NamedTuple):
    """Tokens of a row that a step has computed."""

    hidden: Tensor  # [n, hidden]
    first: int
    """Position of the first one."""


class PromptLogprobs:
    """Which rows ask for prompt logprobs, and their values.

    Args:
        decoder: turns hidden states into logits.
        rows: row state; token_ids hold the prompts.
    """

    def __init__(self, decoder: LogitsHead, rows: RowState) -> None:
        self._decoder = decoder
        self._rows = rows
        self._wanted: dict[int, int] = {}  # row -> number of best tokens

    def set_row(self, row: int, num_logprobs: int | None) -> None:
        """The row's new request asks for `num_logprobs` best tokens at each prompt position, or for none of this."""
        if num_logprobs is None:
            self._wanted.pop(row, None)
        else:
            self._wanted[row] = num_logprobs

    def wants(self, row: int) -> bool:
        """Whether the row still has prompt log probabilities to come."""
        return row in self._wanted

    def compute(self, chunks: Mapping[int, PromptChunk]) -> dict[int, list[TokenLogprobs]]:
        """Entries of the prompt tokens that follow the tokens of a step, by row, for the rows that ask."""
        return {row: self._chunk(row, *chunk) for row, chunk in chunks.items() if row in self._wanted}

    def _chunk(self, row: int, hidden: Tensor, first: int) -> list[TokenLogprobs]:
        prompt_len = int(self._rows.prompt_len[row])
        count = min(hidden.shape[0], prompt_len - 1 - first)  # the last prompt token predicts the first output token
        entries: list[TokenLogprobs] = []
        for start in range(0, count, _POSITIONS_AT_A_TIME):
            end = min(count, start + _POSITIONS_AT_A_TIME)
            logits = self._decoder.compute_logits(hidden[start:end])
            following = self._rows.token_ids[row, first + start + 1 : first + end + 1].long()
            entries += gather_logprobs(logits, following, self._wanted[row])
        if first + hidden.shape[0] >= prompt_len:
            del self._wanted[row]
        return entries
