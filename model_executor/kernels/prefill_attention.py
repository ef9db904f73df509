"""Causal attention of prefill chunks over paged KV.

A program owns (KV head, query block of an entry). Its tile packs consecutive query tokens with the heads that share the
KV head, so that a group reads its KV once, a short chunk still fills a tile and little of a tile lies above the
diagonal. Queries are rotated as they are loaded; keys and values, those of the chunk included, come from the cache,
where `write_kv` has put them. Lengths stand on the device only: a program finds its entry from the query lengths, and
programs beyond the last block do nothing. An entry's blocks start with the one that sees the most.

KV comes from the L2 once a query block, and there lies the limit of small tiles: 8 x 1024 tokens of an 8B model take
1.14 GB in tiles of 64 rows, half of that in tiles of 128. Two programs on a multiprocessor let one multiply while the
other exponentiates. Tiles of 128 rows have both only if the compiler is held to `max_registers`, and the kernel does
two things for that: it has queries in shared memory, and waits for a product before the next one.

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
    cos_sin_ptr,  # [max_model_len, HEAD_DIM] float32: cos of the half dimensions, then sin
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
    LEAN: tl.constexpr,  # few registers rather than products that overlap
):
    queries: tl.constexpr = ROWS // GROUP  # query tokens of a block
    num_heads: tl.constexpr = num_kv_heads * GROUP
    qkv_stride: tl.constexpr = (num_heads + 2 * num_kv_heads) * HEAD_DIM
    half: tl.constexpr = HEAD_DIM // 2
    dtype = key_ptr.dtype.element_ty
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
    last_token = context + tl.minimum(first_query + queries, query_len) - 1
    in_tile = tl.arange(0, TILE)
    # Blocks are looked up a tile ahead, so that no load of KV waits for its address. A place behind the last token
    # reads that token: KV that exists, so that no load needs a mask.
    block = tl.load(table + tl.minimum(in_tile, last_token) // BLOCK_SIZE).to(tl.int32)

    rows = tl.arange(0, ROWS)
    query = first_query + rows // GROUP
    is_row = (rows < queries * GROUP) & (query < query_len)
    position = context + query
    row_head = head * GROUP + rows % GROUP
    in_half = tl.arange(0, half)
    q_place = qkv_ptr + ((start + query) * qkv_stride + row_head * HEAD_DIM)[:, None] + in_half[None, :]
    angle = cos_sin_ptr + position.to(tl.int64)[:, None] * HEAD_DIM + in_half[None, :]
    x = tl.load(q_place, mask=is_row[:, None], other=0.0).to(tl.float32)
    y = tl.load(q_place + half, mask=is_row[:, None], other=0.0).to(tl.float32)
    cos = tl.load(angle, mask=is_row[:, None], other=0.0) * scale
    sin = tl.load(angle + half, mask=is_row[:, None], other=0.0) * scale
    q = tl.join((x * cos - y * sin).to(dtype), (y * cos + x * sin).to(dtype))  # [ROWS, half, 2]
    q = tl.reshape(tl.permute(q, (0, 2, 1)), (ROWS, HEAD_DIM))

    dim = tl.arange(0, HEAD_DIM)
    key_ptr += head * head_stride
    value_ptr += head * head_stride
    all_see = context + first_query + 1  # tokens that every query of the block sees
    in_block = (in_tile % BLOCK_SIZE) * token_stride
    last_in_block = (last_token % BLOCK_SIZE) * token_stride
    # Once. Triton 3.6 keeps what it has computed in registers, 32 or 64 a thread; what a loop carries it multiplies
    # from shared memory.
    for _ in range(tl.minimum(last_token + 1, 1)):
        row_max = tl.full((ROWS,), float("-inf"), tl.float32)  # of the scores in powers of two
        row_sum = tl.zeros((ROWS,), tl.float32)
        acc = tl.zeros((ROWS, HEAD_DIM), tl.float32)
        for first in range(0, last_token + 1, TILE):
            token = first + in_tile
            slot = block.to(tl.int64) * block_stride + tl.where(token < last_token, in_block, last_in_block)
            block = tl.load(table + tl.minimum(token + TILE, last_token) // BLOCK_SIZE).to(tl.int32)
            in_cache = slot[:, None] + dim[None, :]
            k = tl.load(key_ptr + in_cache)
            v = tl.load(value_ptr + in_cache)
            scores = tl.dot(q, tl.trans(k), input_precision="ieee")
            if first + TILE > all_see:  # in float32, exact below 2^24: as many predicates would be packed into words
                ahead = position.to(tl.float32)[:, None] - token.to(tl.float32)[None, :]
                scores += tl.minimum(ahead, 0.0) * 1e30
            # Every query sees token 0: from the first tile on, the maximum is that of a token that is seen.
            new_max = tl.maximum(row_max, tl.max(scores, axis=1))
            weights = tl.exp2(scores - new_max[:, None])
            shrink = tl.exp2(row_max - new_max)
            row_sum = row_sum * shrink + tl.sum(weights, axis=1)
            acc = tl.dot(weights.to(dtype), v, acc * shrink[:, None], input_precision="ieee")
            row_max = new_max
            if LEAN:
                # Changes nothing, but the compiler waits for a product before its first use. Otherwise the weights
                # stay in registers beside the next scores, and with too few of them ptxas waits after every wgmma.
                acc = tl.where(dim[None, :] >= 0, acc, 0.0)
        out_place = (start + query) * (num_heads * HEAD_DIM) + row_head * HEAD_DIM
        result = (acc * (1.0 / row_sum)[:, None]).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + out_place[:, None] + dim[None, :], result, mask=is_row[:, None])
        q = tl.zeros((ROWS, HEAD_DIM), dtype)


_LOG2_E = 1.4426950408889634
_MANY_ROWS = 2 * 128 * 128


@dataclass(frozen=True, slots=True)
class PrefillTiles:
    """Rows (queries x heads of a group) of a program, KV tokens of a tile, warps, KV tiles in shared memory.

    `max_registers` of a thread: None lets the compiler take what it likes, and overlap products.
    """

    rows: int
    tile: int
    num_warps: int
    num_stages: int
    max_registers: int | None = None


def candidates(head_dim: int, dtype: torch.dtype) -> list[PrefillTiles]:
    """Tiles worth measuring; each fits the registers and the shared memory of a Hopper GPU."""
    if dtype == torch.float32:
        return [PrefillTiles(32, 32, 4, 2), PrefillTiles(16, 32, 4, 2)]
    if head_dim > 128:
        return [PrefillTiles(128, 64, 8, 2), PrefillTiles(128, 32, 8, 3)]
    tiles = [
        PrefillTiles(128, 64, 8, 2, 128),
        PrefillTiles(64, 64, 4, 3, 168),
        PrefillTiles(128, 64, 4, 2, 255),
        PrefillTiles(128, 32, 8, 3, 128),
        PrefillTiles(64, 64, 4, 2),
        PrefillTiles(128, 64, 8, 3),
        PrefillTiles(128, 128, 8, 2),
    ]
    if head_dim <= 64:
        return [tiles[5], tiles[1], tiles[0], *tiles[2:5], tiles[6]]
    return tiles


def tiles_for(head_dim: int, dtype: torch.dtype, num_rows: int) -> PrefillTiles:
    """The first of the candidates for `num_rows` = tokens x heads; with too few for two programs a multiprocessor, the
    second, whose programs are half as large.

    Measured on an H200 in bfloat16. 8B shape: 201 us for 8 x 1024 tokens and 619 us for 2 x 4096 (342 and 444 TFLOP/s)
    with the first, 84 us for 512 tokens behind 3584 with the second (the first takes 109). 1B shape: 128, 370 and 57.
    """
    tiles = candidates(head_dim, dtype)
    return tiles[num_rows < _MANY_ROWS and len(tiles) > 2]


def max_query_blocks(num_tokens: int, num_reqs: int, max_query_len: int, queries: int) -> int:
    """Most blocks of `queries` tokens that entries of more than `max_query_len` tokens each can need."""
    num_entries = min(num_reqs, num_tokens // (max_query_len + 1))
    return (num_tokens + num_entries * (queries - 1)) // queries


def prefill_attention(
    qkv: Tensor,
    cos_sin: Tensor,
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
        qkv: [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim], contiguous, before rotation; keys and values
            are not read.
        cos_sin: [max_model_len, head_dim] float32; cos of head_dim / 2 angles, then sin (rotate-half layout).
        key, value: cache, [num_blocks, block_size, num_kv_heads, head_dim], of equal strides; holds the KV of all
            visible tokens, those of the query included, keys rotated.
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
    tiles = tiles or tiles_for(head_dim, key.dtype, out.shape[0] * num_heads)
    group = num_heads // num_kv_heads
    num_reqs = seq_lens.shape[0]
    rows = max(tiles.rows, triton.next_power_of_2(group))
    num_blocks = max_query_blocks(out.shape[0], num_reqs, max_query_len, rows // group)
    if num_blocks == 0:
        return
    _prefill_attention_kernel[(num_kv_heads, num_blocks)](
        qkv,
        cos_sin,
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
        LEAN=tiles.max_registers is not None,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        maxnreg=tiles.max_registers,
    )


def prefill_attention_ref(
    qkv: Tensor,
    cos_sin: Tensor,
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
        cos, sin = cos_sin[seq_len - num_queries : seq_len, None].double().chunk(2, dim=-1)
        first, second = queries[start : start + num_queries].chunk(2, dim=-1)
        rotated = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
        scores = torch.einsum("qhd,thd->hqt", rotated, k) * head_dim**-0.5
        weights = torch.softmax(scores.masked_fill(~visible, float("-inf")), dim=-1)
        out[start : start + num_queries] = torch.einsum("hqt,thd->qhd", weights, v)
    return out.flatten(1)
