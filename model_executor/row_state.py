"""Row state: the truth about every running request, on the device.

A request keeps one row for life. The host stages new rows and block appends; everything else (tokens, lengths, finished
flags) is written by the step itself, so that step N+1 can run before the host knows the outcome of step N.

R = max_num_seqs. A draft token is written to `token_ids` behind the committed ones before it is verified: whatever
stands at or beyond `committed_len` is a claim, never a committed token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

RowWrite = Callable[[Tensor, int, NDArray[Any]], None]
"""write(tensor, index, values): `values` become tensor.flatten()[index :], now or with the step that is staged."""


def write_now(tensor: Tensor, index: int, values: NDArray[Any]) -> None:
    """The `RowWrite` that copies at once."""
    tensor.view(-1)[index : index + len(values)] = torch.from_numpy(values)


class RowState:
    """Tensors of all rows, made once.

    Args:
        max_num_seqs: R, rows.
        max_model_len: longest prompt + output, tokens.
        block_size: tokens of a KV block.
        device: where the tensors live.
    """

    def __init__(self, max_num_seqs: int, max_model_len: int, block_size: int, device: torch.device) -> None:
        self.max_model_len = max_model_len
        self.block_size = block_size
        self.device = device
        max_blocks = -(-max_model_len // block_size)
        rows = max_num_seqs
        self.token_ids = torch.zeros(rows, max_model_len, dtype=torch.int32, device=device)  # [R, max_model_len]
        self.committed_len = torch.zeros(rows, dtype=torch.int64, device=device)  # [R]
        self.num_computed_tokens = torch.zeros(rows, dtype=torch.int64, device=device)  # [R] tokens with valid KV
        self.prompt_len = torch.zeros(rows, dtype=torch.int64, device=device)  # [R]
        self.max_len = torch.zeros(rows, dtype=torch.int64, device=device)  # [R] prompt + max_tokens
        self.finished = torch.ones(rows, dtype=torch.bool, device=device)  # [R] a no-op in every later step
        self.generation = torch.zeros(rows, dtype=torch.int64, device=device)  # [R] which request of the row
        self.block_table = torch.zeros(rows, max_blocks, dtype=torch.int64, device=device)  # [R, max_blocks]

    def set_row(
        self,
        row: int,
        tokens: Sequence[int],
        prompt_len: int,
        num_computed_tokens: int,
        max_len: int,
        generation: int = 0,
        write: RowWrite = write_now,
    ) -> None:
        """Give `row` to a request: `tokens` are committed, KV of the first `num_computed_tokens` is in its blocks."""
        write(self.token_ids, row * self.max_model_len, np.array(tokens, dtype=np.int32))
        lengths = (
            (self.committed_len, len(tokens)),
            (self.num_computed_tokens, num_computed_tokens),
            (self.prompt_len, prompt_len),
            (self.max_len, max_len),
            (self.generation, generation),
        )
        for tensor, value in lengths:
            write(tensor, row, np.array([value], dtype=np.int64))
        write(self.finished, row, np.array([False]))

    def append_blocks(self, row: int, start: int, block_ids: Sequence[int], write: RowWrite = write_now) -> None:
        """Put `block_ids` at block_table[row, start:]."""
        write(self.block_table, row * self.block_table.shape[1] + start, np.array(block_ids, dtype=np.int64))
