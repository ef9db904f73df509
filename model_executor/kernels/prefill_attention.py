"""Causal attention of prefill chunks over paged KV.

A program owns (KV head, query block of an entry). Its tile packs consecutive query tokens with the heads that share the
KV head, so that a group reads its KV once, a short chunk still fills a tile and little of a tile lies above the
diagonal. KV of the context and of the chunk itself comes from the cache. Lengths stand on the device only: a program
finds its entry from the query lengths, and programs beyond the last block do nothing. Blocks with the most KV start
first.

A long context with a short chunk leaves few programs: 256 tokens of a group of 4 and 8 KV heads are 64, half of the
multiprocessors of an H200.

Grid: num_kv_heads x upper bound of the query blocks. Bytes: queries and output once; the visible KV once a query block,
mostly from the L2. FLOPs: 4 * head_dim * num_heads for each pair of query and visible token.
Tiles and online softmax as in Dao, FlashAttention-2 (2023).
"""

# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
# Triton's launch syntax and its constexpr values have no types that pyright follows.
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _prefill_attention_kernel(
    qkv_ptr,  # [num_tokens, (num_heads + 2 * num_kv_heads) * HEAD_DIM]
    key_ptr,  # [num_blocks, BLOCK_SIZE, num_kv_heads, HEAD_DIM]
    value_ptr,
    block_table_ptr,  # [R, max_blocks] int64
    row_ptr,  # [num_reqs] int64
    query_start_ptr,  # [num_reqs] int64
    query_len_ptr,  # [num_reqs] int64
    seq_len_ptr,  # [num_reqs] int64
    out_ptr,  # [num_tokens, num_heads * HEAD_DIM]
    num_reqs,
    max_query_len,
    block_table_stride,
    block_stride,
    token_stride,
    head_stride,
    scale,
    num_kv_heads: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    PADDED_REQS: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,  # KV tokens of a tile
):
    queries: tl.constexpr = ROWS // GROUP  # query tokens of a block
    num_heads: tl.constexpr = num_kv_heads * GROUP
    qkv_stride: tl.constexpr = (num_heads + 2 * num_kv_heads) * HEAD_DIM
    head = tl.program_id(0).to(tl.int64)

    entries = tl.arange(0, PADDED_REQS)
    query_lens = tl.load(query_len_ptr + entries, mask=entries < num_reqs, other=0).to(tl.int32)
    num_blocks = tl.where(query_lens > max_query_len, tl.cdiv(query_lens, queries), 0)
    index = tl.sum(num_blocks, axis=0) - 1 - tl.program_id(1)  # of the block; an entry's last has the most KV
    if index < 0:
        return
    is_before = tl.cumsum(num_blocks, axis=0) <= index
    entry = tl.sum(is_before.to(tl.int32), axis=0)
    first_query = (index - tl.sum(tl.where(is_before, num_blocks, 0), axis=0)) * queries
    query_len = tl.load(query_len_ptr + entry).to(tl.int32)
    context = tl.load(seq_len_ptr + entry).to(tl.int32) - query_len
    start = tl.load(query_start_ptr + entry).to(tl.int64)
    table = block_table_ptr + tl.load(row_ptr + entry).to(tl.int64) * block_table_stride

    rows = tl.arange(0, ROWS)
    query = first_query + rows // GROUP
    is_row = (rows < queries * GROUP) & (query < query_len)
    position = context + query
    dim = tl.arange(0, HEAD_DIM)
    row_head = head * GROUP + rows % GROUP
    q_place = (start + query) * qkv_stride + row_head * HEAD_DIM
    q = tl.load(qkv_ptr + q_place[:, None] + dim[None, :], mask=is_row[:, None], other=0.0)

    key_ptr += head * head_stride
    value_ptr += head * head_stride
    row_max = tl.full((ROWS,), float("-inf"), tl.float32)  # of the scaled scores
    row_sum = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, HEAD_DIM), tl.float32)
    last_token = context + tl.minimum(first_query + queries, query_len) - 1
    num_below = (context + first_query + 1) // TILE  # tiles that every query of the block sees whole
    in_tile = tl.arange(0, TILE)
    # Blocks are looked up a tile ahead, so that no load of KV waits for its address. A place behind the last token
    # reads that token: KV that exists, so that no load needs a mask.
    block = tl.load(table + tl.minimum(in_tile, last_token) // BLOCK_SIZE).to(tl.int32)
    for tile in range(last_token // TILE + 1):
        token = tile * TILE + in_tile
        slot = block.to(tl.int64) * block_stride + (tl.minimum(token, last_token) % BLOCK_SIZE) * token_stride
        block = tl.load(table + tl.minimum(token + TILE, last_token) // BLOCK_SIZE).to(tl.int32)
        in_cache = slot[:, None] + dim[None, :]
        k = tl.load(key_ptr + in_cache)
        v = tl.load(value_ptr + in_cache)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        if tile >= num_below:
            scores = tl.where(token[None, :] <= position[:, None], scores, float("-inf"))
        # Every query sees token 0: the maximum is a number from the first tile on.
        new_max = tl.maximum(row_max, tl.max(scores, axis=1) * scale)
        weights = tl.exp2(scores * scale - new_max[:, None])
        shrink = tl.exp2(row_max - new_max)
        row_sum = row_sum * shrink + tl.sum(weights, axis=1)
        acc = tl.dot(weights.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
        row_max = new_max
    out_place = (start + query) * (num_heads * HEAD_DIM) + row_head * HEAD_DIM
    result = (acc / row_sum[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + out_place[:, None] + dim[None, :], result, mask=is_row[:, None])


_LOG2_E = 1.4426950408889634


@dataclass(frozen=True, slots=True)
class PrefillTiles:
    """Rows (queries x heads of a group) of a program, KV tokens of a tile, warps, KV tiles in shared memory."""

    rows: int
    tile: int
    num_warps: int
    num_stages: int


def candidates(head_dim: int, dtype: torch.dtype) -> list[PrefillTiles]:
    """Tiles worth measuring; each fits the registers and the shared memory of a Hopper GPU."""
    if dtype == torch.float32:
        return [PrefillTiles(32, 32, 4, 2), PrefillTiles(16, 32, 4, 2)]
    if head_dim > 128:
        return [PrefillTiles(128, 64, 8, 2), PrefillTiles(128, 32, 8, 3)]
    tiles = [
        PrefillTiles(64, 64, 4, 2),
        PrefillTiles(128, 64, 8, 3),
        PrefillTiles(64, 64, 4, 3),
        PrefillTiles(128, 128, 8, 2),
        PrefillTiles(128, 64, 8, 2),
    ]
    return [tiles[1], tiles[0], *tiles[2:]] if head_dim <= 64 else tiles


def tiles_for(head_dim: int, dtype: torch.dtype) -> PrefillTiles:
    """Those that did best on an H200 over 8 x 1024 tokens, 2 x 4096, and 512 behind 3584: the first candidates.

    Heads of 128, 8B shape: 245, 769 and 86 us (281, 358 and 375 TFLOP/s). Heads of 64, 1B shape: 123, 377 and 62 us.
    """
    return candidates(head_dim, dtype)[0]


def max_query_blocks(num_tokens: int, num_reqs: int, max_query_len: int, queries: int) -> int:
    """Most blocks of `queries` tokens that entries of more than `max_query_len` tokens each can need."""
    num_entries = min(num_reqs, num_tokens // (max_query_len + 1))
    return (num_tokens + num_entries * (queries - 1)) // queries


def prefill_attention(
    qkv: Tensor,
    key: Tensor,
    value: Tensor,
    block_table: Tensor,
    idx_mapping: Tensor,
    query_start: Tensor,
    query_len: Tensor,
    seq_lens: Tensor,
    out: Tensor,
    num_heads: int,
    max_query_len: int,
    tiles: PrefillTiles | None = None,
) -> None:
    """Attention of entries with more than `max_query_len` query tokens; `verify_attention` has the others.

    Args:
        qkv: [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim], contiguous; queries rotated, the rest not read.
        key, value: cache, [num_blocks, block_size, num_kv_heads, head_dim], of equal strides; holds the KV of all
            visible tokens, those of the query included.
        block_table: [R, max_blocks].
        idx_mapping: [num_reqs], row of each entry in the block table.
        query_start: [num_reqs], first token of each entry in qkv and out.
        query_len: [num_reqs]; the sum over all entries is at most num_tokens.
        seq_lens: [num_reqs], context and query.
        out: [num_tokens, num_heads * head_dim], contiguous; written for the tokens of these entries.
        num_heads: of the queries.
        max_query_len: K + 1.
        tiles: None: those of `tiles_for`.
    """
    _, block_size, num_kv_heads, head_dim = key.shape
    tiles = tiles or tiles_for(head_dim, key.dtype)
    group = num_heads // num_kv_heads
    num_reqs = seq_lens.shape[0]
    rows = max(tiles.rows, triton.next_power_of_2(group))
    num_blocks = max_query_blocks(out.shape[0], num_reqs, max_query_len, rows // group)
    if num_blocks == 0:
        return
    _prefill_attention_kernel[(num_kv_heads, num_blocks)](
        qkv,
        key,
        value,
        block_table,
        idx_mapping,
        query_start,
        query_len,
        seq_lens,
        out,
        num_reqs,
        max_query_len,
        block_table.stride(0),
        key.stride(0),
        key.stride(1),
        key.stride(2),
        head_dim**-0.5 * _LOG2_E,
        num_kv_heads=num_kv_heads,
        GROUP=group,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        # One compiled kernel for most batches; and at 16 Triton 3.6 takes 14 registers more, which then spill.
        PADDED_REQS=max(64, triton.next_power_of_2(num_reqs)),
        ROWS=rows,
        TILE=tiles.tile,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )


def prefill_attention_ref(
    qkv: Tensor,
    key: Tensor,
    value: Tensor,
    block_table: Tensor,
    idx_mapping: Tensor,
    query_start: Tensor,
    query_len: Tensor,
    seq_lens: Tensor,
    num_heads: int,
    max_query_len: int,
) -> Tensor:
    """The same in float64, [num_tokens, num_heads * head_dim]; NaN for tokens that are left alone."""
    _, block_size, num_kv_heads, head_dim = key.shape
    queries = qkv.view(qkv.shape[0], -1, head_dim)[:, :num_heads].double()
    out = torch.full_like(queries, float("nan"))
    metadata = (t.tolist() for t in (idx_mapping, query_start, query_len, seq_lens))
    for row, start, num_queries, seq_len in zip(*metadata, strict=True):
        if num_queries <= max_query_len:
            continue
        blocks = block_table[row, : triton.cdiv(seq_len, block_size)]
        k, v = (
            cache[blocks].flatten(0, 1)[:seq_len].double().repeat_interleave(num_heads // num_kv_heads, dim=1)
            for cache in (key, value)
        )  # [seq_len, num_heads, head_dim]
        tokens = torch.arange(seq_len, device=key.device)
        visible = tokens <= tokens[seq_len - num_queries :, None]  # [num_queries, seq_len]
        scores = torch.einsum("qhd,thd->hqt", queries[start : start + num_queries], k) * head_dim**-0.5
        weights = torch.softmax(scores.masked_fill(~visible, float("-inf")), dim=-1)
        out[start : start + num_queries] = torch.einsum("hqt,thd->qhd", weights, v)
    return out.flatten(1)
