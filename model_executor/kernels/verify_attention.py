"""Paged attention of decode and verify rows: rotation, KV write and attention in one kernel.

A program owns (request, KV head, split of the context). Its tile packs the request's query tokens and the heads that
share the KV head: 4 tokens of a group of 4 are one 16-row tensor-core tile. KV of the context streams from the cache;
KV of the query tokens themselves comes straight from the projection, is rotated and attended to by the last split,
which also writes it to the cache. The last program of a (request, KV head) to finish joins the splits in their order:
the result does not depend on which one that is.

Grid: num_reqs x num_kv_heads x num_splits. Bytes: the KV of every request, once.
Splits with a running softmax: Dao et al., FlashDecoding (2023); online softmax: Milakov and Gimelshein (2018).
"""

# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
# Triton's launch syntax and its constexpr values have no types that pyright follows.
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents


@triton.jit
def _load_rotated(ptr, row_offset, position, cos_sin_ptr, mask, HEAD_DIM: tl.constexpr, TWO: tl.constexpr):
    """Heads after rotate-half rope, float32: their two halves if a tile holds half a head, else the whole head twice.

    What an element is rotated with is read, not moved, and read so that consecutive elements are one wide load: that
    took 10 % off a launch for 16 requests of 4 tokens.
    """
    half: tl.constexpr = HEAD_DIM // 2
    if TWO:
        dim = tl.arange(0, half)
        angle = position[:, None] * HEAD_DIM + dim[None, :]
        place = row_offset[:, None] + dim[None, :]
        cos = tl.load(cos_sin_ptr + angle, mask=mask[:, None], other=0.0)
        sin = tl.load(cos_sin_ptr + angle + half, mask=mask[:, None], other=0.0)
        first = tl.load(ptr + place, mask=mask[:, None], other=0.0).to(tl.float32)
        second = tl.load(ptr + place + half, mask=mask[:, None], other=0.0).to(tl.float32)
        return first * cos - second * sin, second * cos + first * sin
    else:
        dim = tl.arange(0, HEAD_DIM)
        angle = position[:, None] * HEAD_DIM + (dim % half)[None, :]
        cos = tl.load(cos_sin_ptr + angle, mask=mask[:, None], other=0.0)
        sin = tl.load(cos_sin_ptr + angle + half, mask=mask[:, None], other=0.0)
        x = tl.load(ptr + row_offset[:, None] + dim[None, :], mask=mask[:, None], other=0.0).to(tl.float32)
        swapped = (dim + half) % HEAD_DIM
        other = tl.load(ptr + row_offset[:, None] + swapped[None, :], mask=mask[:, None], other=0.0).to(tl.float32)
        whole = x * cos + tl.where(dim < half, -other, other) * sin
        return whole, whole


@triton.jit
def _attend_tile(q0, q1, k0, k1, v0, v1, allowed, row_max, row_sum, acc0, acc1, scale, TWO: tl.constexpr):
    """One KV tile of the online softmax. k0, k1: [CHUNK, TILE]; v0, v1: [TILE, CHUNK]; allowed: [ROWS, TILE]."""
    scores = tl.dot(q0, k0, input_precision="ieee")
    if TWO:
        scores = tl.dot(q1, k1, scores, input_precision="ieee")
    scores = tl.where(allowed, scores * scale, float("-inf"))
    new_max = tl.maximum(row_max, tl.max(scores, axis=1))
    safe_max = tl.where(new_max == float("-inf"), 0.0, new_max)
    weights = tl.exp2(scores - safe_max[:, None])
    shrink = tl.exp2(row_max - safe_max)
    row_sum = row_sum * shrink + tl.sum(weights, axis=1)
    weights = weights.to(v0.dtype)
    acc0 = tl.dot(weights, v0, acc0 * shrink[:, None], input_precision="ieee")
    if TWO:
        acc1 = tl.dot(weights, v1, acc1 * shrink[:, None], input_precision="ieee")
    return new_max, row_sum, acc0, acc1


@triton.jit
def _verify_attention_kernel(
    qkv_ptr,  # [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim]
    cos_sin_ptr,  # [max_model_len, head_dim] float32: cos of the half dimensions, then sin
    key_ptr,  # [num_blocks, BLOCK_SIZE, num_kv_heads, head_dim]
    value_ptr,
    block_table_ptr,  # [R, max_blocks] int32 or int64
    row_ptr,  # [num_reqs], row of each request in the block table
    query_start_ptr,  # [num_reqs] int32 or int64
    query_len_ptr,  # [num_reqs]
    seq_len_ptr,  # [num_reqs]
    out_ptr,  # [num_tokens, num_heads * head_dim]
    part_ptr,  # [num_reqs, num_kv_heads, num_splits, ROWS, head_dim] float32
    part_max_ptr,  # [num_reqs, num_kv_heads, num_splits, ROWS] float32
    part_sum_ptr,
    arrived_ptr,  # [num_reqs, num_kv_heads] int32, zero before and after
    block_table_stride,
    block_stride,
    token_stride,
    head_stride,
    scale,
    max_query_len,
    num_kv_heads: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    CHUNK: tl.constexpr,  # head dimensions of a tile: all, or half of them
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,  # query tokens x GROUP, padded to a power of two of at least 16
    NEW: tl.constexpr,  # query tokens, padded likewise
    TILE: tl.constexpr,  # KV tokens of a tile
    num_splits: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    WRITES_KV: tl.constexpr,
    LETS_NEXT_BEGIN: tl.constexpr,
):
    if LETS_NEXT_BEGIN:
        gdc_launch_dependents()
    request = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    split = tl.program_id(2).to(tl.int64)
    # All four before the first use: their latencies pass together.
    start = tl.load(query_start_ptr + request).to(tl.int64)
    query_len = tl.load(query_len_ptr + request).to(tl.int64)
    row = tl.load(row_ptr + request).to(tl.int64)
    seq_len = tl.load(seq_len_ptr + request).to(tl.int64)
    if (query_len == 0) | (query_len > max_query_len):
        return
    context = seq_len - query_len
    num_heads: tl.constexpr = num_kv_heads * GROUP
    qkv_stride: tl.constexpr = (num_heads + 2 * num_kv_heads) * HEAD_DIM
    two: tl.constexpr = HEAD_DIM > CHUNK
    dim0 = tl.arange(0, CHUNK)

    rows = tl.arange(0, ROWS)
    row_token = rows // GROUP
    is_row = row_token < query_len
    q_offset = (start + row_token) * qkv_stride + (head * GROUP + rows % GROUP) * HEAD_DIM
    position = context + row_token
    dtype = key_ptr.dtype.element_ty
    q0, q1 = _load_rotated(qkv_ptr, q_offset, position, cos_sin_ptr, is_row, HEAD_DIM, two)
    q0, q1 = q0.to(dtype), q1.to(dtype)

    row_max = tl.full((ROWS,), float("-inf"), tl.float32)
    row_sum = tl.zeros((ROWS,), tl.float32)
    acc0 = tl.zeros((ROWS, CHUNK), tl.float32)
    acc1 = tl.zeros((ROWS, CHUNK), tl.float32)
    num_tiles = tl.cdiv(context, TILE)
    tiles_each = tl.cdiv(num_tiles, num_splits)
    first_tile = split * tiles_each
    last_tile = tl.minimum(first_tile + tiles_each, num_tiles)
    in_tile = tl.arange(0, TILE)
    table = block_table_ptr + row * block_table_stride
    for tile in range(first_tile, last_tile):
        token = tile * TILE + in_tile
        is_token = token < context
        block = tl.load(table + token // BLOCK_SIZE, mask=is_token, other=0).to(tl.int64)
        slot = block * block_stride + (token % BLOCK_SIZE) * token_stride + head * head_stride
        k_place = key_ptr + slot[None, :] + dim0[:, None]
        v_place = value_ptr + slot[:, None] + dim0[None, :]
        k0 = tl.load(k_place, mask=is_token[None, :], other=0.0)
        v0 = tl.load(v_place, mask=is_token[:, None], other=0.0)
        k1 = k0
        v1 = v0
        if two:
            k1 = tl.load(k_place + CHUNK, mask=is_token[None, :], other=0.0)
            v1 = tl.load(v_place + CHUNK, mask=is_token[:, None], other=0.0)
        allowed = is_row[:, None] & is_token[None, :]
        row_max, row_sum, acc0, acc1 = _attend_tile(
            q0, q1, k0, k1, v0, v1, allowed, row_max, row_sum, acc0, acc1, scale, two
        )
    if split == num_splits - 1:
        new = tl.arange(0, NEW)
        is_new = new < query_len
        new_position = context + new
        k_offset = (start + new) * qkv_stride + (num_heads + head) * HEAD_DIM
        v_place = qkv_ptr + (k_offset + num_kv_heads * HEAD_DIM)[:, None] + dim0[None, :]
        k0, k1 = _load_rotated(qkv_ptr, k_offset, new_position, cos_sin_ptr, is_new, HEAD_DIM, two)
        k0, k1 = k0.to(dtype), k1.to(dtype)
        v0 = tl.load(v_place, mask=is_new[:, None], other=0.0).to(dtype)
        v1 = v0
        if two:
            v1 = tl.load(v_place + CHUNK, mask=is_new[:, None], other=0.0).to(dtype)
        if WRITES_KV:
            block = tl.load(table + new_position // BLOCK_SIZE, mask=is_new, other=0).to(tl.int64)
            slot = block * block_stride + (new_position % BLOCK_SIZE) * token_stride + head * head_stride
            place = slot[:, None] + dim0[None, :]
            tl.store(key_ptr + place, k0, mask=is_new[:, None])
            tl.store(value_ptr + place, v0, mask=is_new[:, None])
            if two:
                tl.store(key_ptr + place + CHUNK, k1, mask=is_new[:, None])
                tl.store(value_ptr + place + CHUNK, v1, mask=is_new[:, None])
        allowed = is_row[:, None] & (new[None, :] <= row_token[:, None]) & is_new[None, :]
        row_max, row_sum, acc0, acc1 = _attend_tile(
            q0, q1, tl.trans(k0), tl.trans(k1), v0, v1, allowed, row_max, row_sum, acc0, acc1, scale, two
        )

    out_offset = (start + row_token) * (num_heads * HEAD_DIM) + (head * GROUP + rows % GROUP) * HEAD_DIM
    out_place = out_ptr + out_offset[:, None] + dim0[None, :]
    if num_splits == 1:
        row_sum = tl.where(is_row, row_sum, 1.0)
        tl.store(out_place, (acc0 / row_sum[:, None]).to(dtype), mask=is_row[:, None])
        if two:
            tl.store(out_place + CHUNK, (acc1 / row_sum[:, None]).to(dtype), mask=is_row[:, None])
        return
    pair = request * num_kv_heads + head
    part = (pair * num_splits + split) * ROWS + rows
    part_place = part_ptr + part[:, None] * HEAD_DIM + dim0[None, :]
    tl.store(part_place, acc0, mask=is_row[:, None])
    if two:
        tl.store(part_place + CHUNK, acc1, mask=is_row[:, None])
    tl.store(part_max_ptr + part, row_max, mask=is_row)
    tl.store(part_sum_ptr + part, row_sum, mask=is_row)
    tl.debug_barrier()  # all stores of this program stand before its arrival
    arrived = tl.atomic_add(arrived_ptr + pair, 1, sem="acq_rel")
    if arrived == num_splits - 1:
        tl.store(arrived_ptr + pair, 0)
        splits = tl.arange(0, MAX_SPLITS)
        each = (pair * num_splits + splits[:, None]) * ROWS + rows[None, :]  # [MAX_SPLITS, ROWS]
        there = (splits[:, None] < num_splits) & is_row[None, :]
        maxima = tl.load(part_max_ptr + each, mask=there, other=float("-inf"))
        top = tl.max(maxima, axis=0)  # [ROWS]
        top = tl.where(is_row, top, 0.0)
        total = tl.zeros((ROWS,), tl.float32)
        acc0 = tl.zeros((ROWS, CHUNK), tl.float32)
        acc1 = tl.zeros((ROWS, CHUNK), tl.float32)
        for other in tl.static_range(num_splits):  # unrolled: the loads of all splits are under way together
            part = (pair * num_splits + other) * ROWS + rows
            shrink = tl.exp2(tl.load(part_max_ptr + part, mask=is_row, other=float("-inf")) - top)
            total += shrink * tl.load(part_sum_ptr + part, mask=is_row, other=0.0)
            part_place = part_ptr + part[:, None] * HEAD_DIM + dim0[None, :]
            acc0 += shrink[:, None] * tl.load(part_place, mask=is_row[:, None], other=0.0)
            if two:
                acc1 += shrink[:, None] * tl.load(part_place + CHUNK, mask=is_row[:, None], other=0.0)
        total = tl.where(is_row, total, 1.0)
        tl.store(out_place, (acc0 / total[:, None]).to(dtype), mask=is_row[:, None])
        if two:
            tl.store(out_place + CHUNK, (acc1 / total[:, None]).to(dtype), mask=is_row[:, None])


_LOG2_E = 1.4426950408889634


@dataclass(frozen=True, slots=True)
class AttentionTiles:
    """KV tokens of a tile, warps and pipeline stages of a program, and splits of a context."""

    tile: int
    num_warps: int
    num_stages: int
    num_splits: int


def tiles_for(num_reqs: int, num_kv_heads: int, head_dim: int) -> AttentionTiles:
    """Best of some dozens each, measured on an H200 at a context of 1280 with 8 KV heads and 1 to 64 requests.

    One request is bound by latency and takes many splits; large batches are bound by memory, and want about as many
    small programs as the multiprocessors hold. Tiles of 64 head dimensions (a row of 128 bytes) are quickest: all of a
    head of 64, and half of one of 128 at a time (84 us instead of 90 for 64 requests).
    """
    pairs = num_reqs * num_kv_heads
    if head_dim > 64:
        if pairs <= 8:
            return AttentionTiles(64, 8, 2, 16)
        return AttentionTiles(64, 2, 4, max(1, min(12, (432 + pairs // 2) // pairs)))
    if pairs > 384:
        return AttentionTiles(128, 2, 3, 1)
    return AttentionTiles(128, 4, 2, min(12, 384 // pairs))


@dataclass(frozen=True, slots=True)
class SplitWorkspace:
    """Where splits leave their parts; made once for batches of any size up to the largest."""

    tiles: AttentionTiles | None  # None: by the size of the batch
    parts: Tensor  # float32
    maxima: Tensor  # float32
    sums: Tensor  # float32
    arrived: Tensor  # [max_reqs * num_kv_heads] int32, zero between launches


def tile_rows(max_query_len: int, group: int) -> int:
    """Rows of the tensor-core tile that holds `max_query_len` query tokens of a group."""
    return max(16, int(triton.next_power_of_2(max_query_len * group)))


def make_split_workspace(
    max_reqs: int,
    num_kv_heads: int,
    group: int,
    head_dim: int,
    max_query_len: int,
    device: torch.device,
    tiles: AttentionTiles | None = None,
) -> SplitWorkspace:
    """Workspace of launches with at most `max_reqs` requests of at most `max_query_len` query tokens."""
    rows = tile_rows(max_query_len, group)
    sizes = (n * (tiles or tiles_for(n, num_kv_heads, head_dim)).num_splits for n in range(1, max_reqs + 1))
    count = max(sizes) * num_kv_heads * rows
    return SplitWorkspace(
        tiles=tiles,
        parts=torch.empty(count * head_dim, dtype=torch.float32, device=device),
        maxima=torch.empty(count, dtype=torch.float32, device=device),
        sums=torch.empty(count, dtype=torch.float32, device=device),
        arrived=torch.zeros(max_reqs * num_kv_heads, dtype=torch.int32, device=device),
    )


def verify_attention(
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
    workspace: SplitWorkspace,
    writes_kv: bool = True,
    lets_next_begin: bool = False,
) -> None:
    """Attention of requests with at most `max_query_len` query tokens; lengths are read on the device.

    Args:
        qkv: projections before rotation, [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim].
        cos_sin: [max_model_len, head_dim] float32; cos of head_dim / 2 angles, then sin.
        key, value: cache, [num_blocks, block_size, num_kv_heads, head_dim]; KV of the query tokens is written.
        block_table: [R, max_blocks].
        idx_mapping: [num_reqs], row of each request in the block table.
        query_start: [num_reqs], first token of each request in qkv and out.
        query_len: [num_reqs]; requests with 0 or more than `max_query_len` are left out, and so are tokens of none.
        seq_lens: [num_reqs], context and query.
        out: [num_tokens, num_heads * head_dim], written.
        num_heads: of the queries.
        max_query_len: K + 1.
        workspace: of `make_split_workspace` for at least this batch.
        writes_kv: False: somebody else writes the KV of the query tokens, and before this.
        lets_next_begin: the kernel behind may begin before this one has ended, and waits where it has to.
    """
    _, block_size, num_kv_heads, head_dim = key.shape
    group = num_heads // num_kv_heads
    num_reqs = seq_lens.shape[0]
    tiles = workspace.tiles or tiles_for(num_reqs, num_kv_heads, head_dim)
    _verify_attention_kernel[(num_reqs, num_kv_heads, tiles.num_splits)](
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
        workspace.parts,
        workspace.maxima,
        workspace.sums,
        workspace.arrived,
        block_table.stride(0),
        key.stride(0),
        key.stride(1),
        key.stride(2),
        head_dim**-0.5 * _LOG2_E,
        max_query_len,
        num_kv_heads=num_kv_heads,
        GROUP=group,
        HEAD_DIM=head_dim,
        CHUNK=head_dim if head_dim <= 64 else head_dim // 2,
        BLOCK_SIZE=block_size,
        ROWS=tile_rows(max_query_len, group),
        NEW=max(16, triton.next_power_of_2(max_query_len)),
        TILE=tiles.tile,
        num_splits=tiles.num_splits,
        MAX_SPLITS=triton.next_power_of_2(tiles.num_splits),
        WRITES_KV=writes_kv,
        LETS_NEXT_BEGIN=lets_next_begin,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )
