"""Drafts and inputs of a decode step, built on the device from the row state.

Grid: one program a request. It turns the best n-gram match into draft tokens behind the committed ones, and writes the
step's inputs: entry i owns the places i * width .. of every token tensor, width = K + 1, and uses `query_len` of them.
A finished row uses none.
"""

# pyright: reportCallIssue=false, reportArgumentType=false
# Triton's launch syntax and its constexpr values have no types that pyright follows.
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from model_executor.row_state import RowState


@dataclass(frozen=True, slots=True)
class DecodeInputs:
    """Inputs of a decode step of `num_reqs` requests, at addresses that stay."""

    width: int  # K + 1
    idx_mapping: Tensor  # [num_reqs] int64, row of each entry
    max_draft_tokens: Tensor  # [num_reqs] int64
    best_match: Tensor  # [num_reqs] int64, of `ngram_search`; -1 between steps
    period: Tensor  # [num_reqs] int64, how far before its end the text is claimed to repeat
    draft_len: Tensor  # [num_reqs] int64
    query_start: Tensor  # [num_reqs] int64, i * width
    query_len: Tensor  # [num_reqs] int64
    seq_lens: Tensor  # [num_reqs] int64
    input_ids: Tensor  # [num_reqs * width] int64


def make_decode_inputs(num_reqs: int, num_draft: int, device: torch.device) -> DecodeInputs:
    """Inputs for `num_reqs` requests with at most `num_draft` draft tokens each."""

    def zeros(count: int) -> Tensor:
        return torch.zeros(count, dtype=torch.int64, device=device)

    width = num_draft + 1
    return DecodeInputs(
        width=width,
        idx_mapping=zeros(num_reqs),
        max_draft_tokens=zeros(num_reqs),
        best_match=zeros(num_reqs) - 1,
        period=zeros(num_reqs) + 1,
        draft_len=zeros(num_reqs),
        query_start=torch.arange(num_reqs, device=device) * width,
        query_len=zeros(num_reqs),
        seq_lens=zeros(num_reqs),
        input_ids=zeros(num_reqs * width),
    )


@triton.jit
def _decode_inputs_kernel(
    token_ids_ptr,  # [R, max_model_len] int32
    committed_len_ptr,  # [R] int64
    max_len_ptr,  # [R] int64
    finished_ptr,  # [R] bool
    row_ptr,  # [num_reqs] int64
    max_draft_ptr,  # [num_reqs] int64
    best_ptr,  # [num_reqs] int64
    period_ptr,
    draft_len_ptr,
    query_len_ptr,
    seq_len_ptr,
    input_ids_ptr,  # [num_reqs * WIDTH] int64
    row_stride,
    LONGEST: tl.constexpr,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
):
    entry = tl.program_id(0).to(tl.int64)
    row = tl.load(row_ptr + entry)
    length = tl.load(committed_len_ptr + row)
    is_finished = tl.load(finished_ptr + row).to(tl.int1)
    best = tl.load(best_ptr + entry)
    tl.store(best_ptr + entry, -1)
    match_len = tl.where(best >= 0, best >> 32, 0)
    period = tl.where(best >= 0, length - 1 - (best & 0xFFFFFFFF), 1)
    limit = tl.minimum(tl.load(max_draft_ptr + entry), tl.load(max_len_ptr + row) - length - 1)
    wanted = tl.where(match_len == LONGEST, limit, match_len)
    draft_len = tl.maximum(tl.minimum(wanted, limit), 0)
    draft_len = tl.where(is_finished, 0, draft_len)
    query_len = tl.where(is_finished, 0, draft_len + 1)
    tl.store(period_ptr + entry, period)
    tl.store(draft_len_ptr + entry, draft_len)
    tl.store(query_len_ptr + entry, query_len)
    tl.store(seq_len_ptr + entry, length - 1 + query_len)
    text = token_ids_ptr + row * row_stride
    offset = tl.arange(0, PADDED)  # place within the entry: the last committed token, then the drafts
    is_draft = (offset >= 1) & (offset <= draft_len)
    source = tl.where(offset == 0, length - 1, length - period + (offset - 1) % period)
    token = tl.load(text + source, mask=(offset == 0) | is_draft, other=0)
    tl.store(text + length - 1 + offset, token, mask=is_draft)
    tl.store(input_ids_ptr + entry * WIDTH + offset, token.to(tl.int64), mask=offset < WIDTH)


def build_decode_inputs(rows: RowState, inputs: DecodeInputs, prompt_lookup_max: int) -> None:
    """Fill `inputs` for the rows of `inputs.idx_mapping`, and write their drafts into the row state."""
    _decode_inputs_kernel[(inputs.idx_mapping.shape[0],)](
        rows.token_ids,
        rows.committed_len,
        rows.max_len,
        rows.finished,
        inputs.idx_mapping,
        inputs.max_draft_tokens,
        inputs.best_match,
        inputs.period,
        inputs.draft_len,
        inputs.query_len,
        inputs.seq_lens,
        inputs.input_ids,
        rows.token_ids.stride(0),
        LONGEST=prompt_lookup_max,
        WIDTH=inputs.width,
        PADDED=triton.next_power_of_2(inputs.width),
        num_warps=1,
    )
