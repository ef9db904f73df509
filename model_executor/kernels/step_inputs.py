"""Inputs of a step, built on the device from the row state: which tokens each entry computes, and what it samples.

Grid: entries x tiles of tokens, and one entry more for the padding. Bytes: a few per token.

Two layouts. A step of decode rows gives every entry K + 1 places of its own, in use or not. Any other step (chunks of
prompts beside decode rows) puts the tokens of all entries back to back, and padding behind them. Either way the number
of entries and of tokens is fixed, so that a step can be a CUDA graph, and everything else is read on the device.
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

_TILE = 256


@dataclass(frozen=True, slots=True)
class StepInputs:
    """Inputs of a step of B entries, T tokens and B * width places to sample, at addresses that stay."""

    width: int  # K + 1
    is_mixed: bool  # tokens back to back; otherwise T = B * width and entry i begins at i * width
    batch: Tensor  # [3, B] int64, what the host says of a step: the three below
    idx_mapping: Tensor  # [B] int64, row of each entry
    num_tokens: Tensor  # [B] int64, committed tokens to compute: 1 for decode, a chunk for prefill
    max_draft_tokens: Tensor  # [B] int64, at most K
    best_match: Tensor  # [B] int64, of `ngram_search`; -1 between steps
    period: Tensor  # [B] int64, how far before its end the text is claimed to repeat
    draft_len: Tensor  # [B] int64
    source: Tensor  # [B] int32, where the draft comes from
    query_start: Tensor  # [B] int64, first token of the entry
    query_len: Tensor  # [B] int64; 0 for a row that has finished
    seq_lens: Tensor  # [B] int64, context and query
    num_samples: Tensor  # [B] int64, places to sample: draft_len + 1, or 0 for a chunk that does not end its prefill
    input_ids: Tensor  # [T] int64
    positions: Tensor  # [T] int64
    slot_mapping: Tensor  # [T] int64, of a mixed step: where KV of each token goes; -1 for padding
    sample_index: Tensor  # [B * width] int64, token of each place to sample; 0 for places not in use


def make_step_inputs(num_reqs: int, num_draft: int, device: torch.device, num_tokens: int | None = None) -> StepInputs:
    """Inputs for `num_reqs` entries with at most `num_draft` draft tokens each.

    Args:
        num_reqs: B.
        num_draft: K.
        device: where they live.
        num_tokens: T of a mixed step; None: a step of decode rows.
    """

    def zeros(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.int64, device=device)

    width = num_draft + 1
    total = num_reqs * width if num_tokens is None else num_tokens
    batch = zeros(3, num_reqs)
    return StepInputs(
        width=width,
        is_mixed=num_tokens is not None,
        batch=batch,
        idx_mapping=batch[0],
        num_tokens=batch[1],
        max_draft_tokens=batch[2],
        best_match=zeros(num_reqs) - 1,
        period=zeros(num_reqs) + 1,
        draft_len=zeros(num_reqs),
        source=torch.zeros(num_reqs, dtype=torch.int32, device=device),
        query_start=torch.arange(num_reqs, device=device) * (width if num_tokens is None else 0),
        query_len=zeros(num_reqs),
        seq_lens=zeros(num_reqs),
        num_samples=zeros(num_reqs),
        input_ids=zeros(total),
        positions=zeros(total),
        slot_mapping=zeros(total) - 1,
        sample_index=zeros(num_reqs * width),
    )


@triton.jit
def _query_len(entries, inside, row_ptr, num_tokens_ptr, draft_len_ptr, finished_ptr):
    """Tokens that entries compute in this step."""
    rows = tl.load(row_ptr + entries, mask=inside, other=0)
    is_finished = tl.load(finished_ptr + rows, mask=inside, other=1).to(tl.int1)
    counts = tl.load(num_tokens_ptr + entries, mask=inside, other=0)
    counts += tl.load(draft_len_ptr + entries, mask=inside, other=0)
    return tl.where(is_finished, 0, counts)


@triton.jit
def _step_inputs_kernel(
    token_ids_ptr,  # [R, max_model_len] int32
    committed_len_ptr,  # [R] int64
    num_computed_ptr,  # [R] int64
    finished_ptr,  # [R] bool
    block_table_ptr,  # [R, max_blocks] int64
    row_ptr,  # [B] int64
    num_tokens_ptr,  # [B] int64
    draft_len_ptr,  # [B] int64
    query_start_ptr,  # [B] int64
    query_len_ptr,
    seq_len_ptr,
    num_samples_ptr,
    input_ids_ptr,  # [T] int64
    positions_ptr,
    slot_mapping_ptr,
    sample_index_ptr,  # [B * WIDTH] int64
    num_reqs,
    total_tokens,
    row_stride,
    block_stride,
    MIXED: tl.constexpr,
    WIDTH: tl.constexpr,
    PADDED_WIDTH: tl.constexpr,
    PADDED_REQS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
):
    entry = tl.program_id(0).to(tl.int64)
    offset = tl.program_id(1).to(tl.int64) * TILE + tl.arange(0, TILE)
    if MIXED:
        entries = tl.arange(0, PADDED_REQS)
        lens = _query_len(entries, entries < num_reqs, row_ptr, num_tokens_ptr, draft_len_ptr, finished_ptr)
        start = tl.sum(tl.where(entries < entry, lens, 0), axis=0)
        if entry == num_reqs:  # the padding behind all entries
            place = start + offset
            is_padding = place < total_tokens
            tl.store(input_ids_ptr + place, 0, mask=is_padding)
            tl.store(positions_ptr + place, 0, mask=is_padding)
            tl.store(slot_mapping_ptr + place, -1, mask=is_padding)
            return
    else:
        start = entry * WIDTH
    row = tl.load(row_ptr + entry)
    is_finished = tl.load(finished_ptr + row).to(tl.int1)
    num_computed = tl.load(num_computed_ptr + row)
    num_tokens = tl.load(num_tokens_ptr + entry)
    draft_len = tl.load(draft_len_ptr + entry)
    query_len = tl.where(is_finished, 0, num_tokens + draft_len)
    position = num_computed + offset
    is_query = offset < query_len
    token = tl.load(token_ids_ptr + row * row_stride + position, mask=is_query, other=0).to(tl.int64)
    if MIXED:
        block = tl.load(block_table_ptr + row * block_stride + position // BLOCK_SIZE, mask=is_query, other=0)
        tl.store(input_ids_ptr + start + offset, token, mask=is_query)
        tl.store(positions_ptr + start + offset, position, mask=is_query)
        tl.store(slot_mapping_ptr + start + offset, block * BLOCK_SIZE + position % BLOCK_SIZE, mask=is_query)
    else:
        tl.store(input_ids_ptr + start + offset, token, mask=offset < WIDTH)
    if tl.program_id(1) == 0:
        samples = (num_computed + num_tokens >= tl.load(committed_len_ptr + row)) & (query_len > 0)
        num_samples = tl.where(samples, draft_len + 1, 0)
        place = tl.arange(0, PADDED_WIDTH)
        index = tl.where(place < num_samples, start + query_len - num_samples + place, 0)
        tl.store(query_start_ptr + entry, start)
        tl.store(query_len_ptr + entry, query_len)
        tl.store(seq_len_ptr + entry, num_computed + query_len)
        tl.store(num_samples_ptr + entry, num_samples)
        tl.store(sample_index_ptr + entry * WIDTH + place, index, mask=place < WIDTH)


def build_step_inputs(rows: RowState, inputs: StepInputs) -> None:
    """Fill `inputs` from what the host said (`batch`) and the drafts that were chosen (`draft_len`).

    Draft tokens stand behind the committed ones in the row state. The tokens of all entries together must not be more
    than T.
    """
    num_reqs, total = inputs.idx_mapping.shape[0], inputs.input_ids.shape[0]
    tile = _TILE if inputs.is_mixed else triton.next_power_of_2(inputs.width)
    grid = (num_reqs + inputs.is_mixed, triton.cdiv(total, tile) if inputs.is_mixed else 1)
    _step_inputs_kernel[grid](
        rows.token_ids,
        rows.committed_len,
        rows.num_computed_tokens,
        rows.finished,
        rows.block_table,
        inputs.idx_mapping,
        inputs.num_tokens,
        inputs.draft_len,
        inputs.query_start,
        inputs.query_len,
        inputs.seq_lens,
        inputs.num_samples,
        inputs.input_ids,
        inputs.positions,
        inputs.slot_mapping,
        inputs.sample_index,
        num_reqs,
        total,
        rows.token_ids.stride(0),
        rows.block_table.stride(0),
        MIXED=inputs.is_mixed,
        WIDTH=inputs.width,
        PADDED_WIDTH=triton.next_power_of_2(inputs.width),
        PADDED_REQS=triton.next_power_of_2(num_reqs),
        BLOCK_SIZE=rows.block_size,
        TILE=tile,
        num_warps=1 if tile < 128 else 4,
    )


def build_step_inputs_ref(rows: RowState, inputs: StepInputs) -> None:
    """The same, an entry at a time."""
    start = 0
    inputs.slot_mapping.fill_(-1)
    inputs.input_ids.zero_()
    inputs.positions.zero_()
    inputs.sample_index.zero_()
    for entry, row in enumerate(inputs.idx_mapping.tolist()):
        first, count = int(rows.num_computed_tokens[row]), int(inputs.num_tokens[entry])
        draft_len = int(inputs.draft_len[entry])
        query_len = 0 if rows.finished[row] else count + draft_len
        if not inputs.is_mixed:
            start = entry * inputs.width
        positions = torch.arange(first, first + query_len, device=rows.device)
        part = slice(start, start + query_len)
        inputs.input_ids[part] = rows.token_ids[row, positions].long()
        if inputs.is_mixed:
            inputs.positions[part] = positions
            blocks = rows.block_table[row, positions // rows.block_size]
            inputs.slot_mapping[part] = blocks * rows.block_size + positions % rows.block_size
        samples = query_len > 0 and first + count >= int(rows.committed_len[row])
        num_samples = draft_len + 1 if samples else 0
        for place in range(num_samples):
            inputs.sample_index[entry * inputs.width + place] = start + query_len - num_samples + place
        inputs.query_start[entry] = start
        inputs.query_len[entry] = query_len
        inputs.seq_lens[entry] = first + query_len
        inputs.num_samples[entry] = num_samples
        start += query_len
