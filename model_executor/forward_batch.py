"""Inputs of one forward pass of a decoder: a ragged batch of query tokens over paged KV."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """Query tokens of all requests back to back; request i owns [query_start_loc[i], query_start_loc[i + 1])."""

    input_ids: Tensor  # [num_tokens] int64
    positions: Tensor  # [num_tokens] int64, index of the token in prompt + output
    slot_mapping: Tensor  # [num_tokens] int64, block * block_size + offset: where the token's KV is written
    query_start_loc: Tensor  # [num_reqs + 1] int64
    seq_lens: Tensor  # [num_reqs] int64, tokens with KV after this pass: the context and the query
    block_table: Tensor  # [num_reqs, max_blocks] int64
