"""Builds the inputs of a forward pass from the row state, on the device."""

from __future__ import annotations

import torch
from torch import Tensor

from model_executor.forward_batch import ForwardBatch
from model_executor.row_state import RowState


def build_forward_batch(rows: RowState, idx_mapping: Tensor, query_len: Tensor) -> ForwardBatch:
    """The next `query_len` tokens of each row, from its first token without KV on.

    Draft tokens stand behind the committed ones in `rows.token_ids`, so that they need no case of their own.

    Args:
        rows: token ids, lengths and block tables.
        idx_mapping: row of each request of the batch, [num_reqs] int64.
        query_len: tokens of each request, [num_reqs] int64, at least 1.
    """
    device = query_len.device
    ends = query_len.cumsum(0)  # [num_reqs]
    query_start_loc = torch.zeros(query_len.shape[0] + 1, dtype=torch.int64, device=device)  # [num_reqs + 1]
    query_start_loc[1:] = ends
    num_computed = rows.num_computed_tokens[idx_mapping]  # [num_reqs]
    first = num_computed - query_start_loc[:-1]  # [num_reqs], position minus place in the batch
    num_tokens = int(ends[-1])
    request = torch.repeat_interleave(query_len, output_size=num_tokens)  # [num_tokens], request of each token
    positions = torch.arange(num_tokens, device=device) + first[request]  # [num_tokens]
    row = idx_mapping[request]  # [num_tokens]
    block = rows.block_table[row, positions // rows.block_size]  # [num_tokens]
    return ForwardBatch(
        input_ids=rows.token_ids[row, positions].long(),
        positions=positions,
        slot_mapping=block * rows.block_size + positions % rows.block_size,
        query_start_loc=query_start_loc,
        seq_lens=num_computed + query_len,
        block_table=rows.block_table[idx_mapping],
    )
