"""Attention kernels at the sizes of decode, verify and prefill steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.kernel_case import Case, Shape, Sizes, Work, copies_for
from common.config import BLOCK_SIZE
from model_executor.kernels.prefill_attention import PrefillTiles, candidates, prefill_attention
from model_executor.kernels.verify_attention import make_split_workspace, verify_attention
from model_executor.kernels.write_kv import write_kv
from model_executor.models.rotary import rope_cos_sin


def verify_attention_cases(shape: Shape, sizes: Sizes) -> Iterator[Case]:
    for batch in sizes.batches:
        for width in (1, sizes.num_draft + 1):
            size = f"{shape.name} {batch} x {width} tokens, context {sizes.context}"
            yield Case("verify_attention", size, partial(_verify_attention, shape, batch, width, sizes.context))


def prefill_attention_cases(shape: Shape, sizes: Sizes) -> Iterator[Case]:
    for batch, query_len, context in sizes.prompts:
        size = f"{shape.name} {batch} x {query_len} tokens, context {context}"
        for tiles in candidates(shape.config.head_dim, shape.dtype):
            cut = f"{tiles.rows} x {tiles.tile}, {tiles.num_warps} warps, {tiles.num_stages} stages"
            cut += f", {tiles.max_registers} registers" if tiles.max_registers else ""
            make = partial(_prefill_attention, shape, batch, query_len, context, tiles)
            yield Case("prefill_attention", f"{size}: {cut}", make)
        if not context:
            yield Case("torch sdpa", f"{size}: KV without blocks", partial(_sdpa, shape, batch, query_len))


def write_kv_cases(shape: Shape, sizes: Sizes) -> Iterator[Case]:
    size = f"{shape.name} {sizes.num_tokens} tokens"
    yield Case("write_kv", size, partial(_write_kv, shape, sizes.num_tokens))


def _verify_attention(shape: Shape, batch: int, width: int, context: int, device: torch.device) -> Work:
    config = shape.config
    num_bytes = batch * (context + width) * shape.kv_token_bytes
    seq_len = context + width
    block_table = _block_table(batch, seq_len, device)
    cos_sin = rope_cos_sin(config.rope, config.head_dim, seq_len).to(device)
    qkv = _normal(batch * width, shape.qkv_size, shape=shape, device=device)
    out = torch.empty(batch * width, shape.attended_size, dtype=shape.dtype, device=device)
    workspace = make_split_workspace(batch, config.num_kv_heads, shape.group, config.head_dim, width, device)
    entries = torch.arange(batch, device=device)
    query_len = torch.full((batch,), width, device=device)
    seq_lens = torch.full((batch,), seq_len, device=device)
    caches = [_cache(shape, block_table, device) for _ in range(copies_for(num_bytes))]  # layers, each with its KV
    return Work(
        [
            partial(
                verify_attention, qkv, cos_sin, key, value, block_table, entries, entries * width, query_len, seq_lens,
                out, config.num_heads, width, workspace,
            )
            for key, value in caches
        ],
        num_bytes,
    )  # fmt: skip


def causal_pairs(query_len: int, context: int) -> int:
    """Pairs of a query token and a token that it sees."""
    return query_len * context + query_len * (query_len + 1) // 2


def _prefill_attention(
    shape: Shape, batch: int, query_len: int, context: int, tiles: PrefillTiles, device: torch.device
) -> Work:
    config = shape.config
    block_table = _block_table(batch, context + query_len, device)
    key, value = _cache(shape, block_table, device)
    qkv = _normal(batch * query_len, shape.qkv_size, shape=shape, device=device)
    out = torch.empty(batch * query_len, shape.attended_size, dtype=shape.dtype, device=device)
    entries = torch.arange(batch, device=device)
    lens = torch.full((batch,), query_len, device=device)
    cos_sin = rope_cos_sin(config.rope, config.head_dim, context + query_len).to(device)
    launch = partial(
        prefill_attention, qkv, cos_sin, key, value, block_table, entries, entries * query_len, lens, lens + context,
        out, config.num_heads, 4, tiles,
    )  # fmt: skip
    return _attention_work(shape, batch, query_len, context, launch)


def _sdpa(shape: Shape, batch: int, query_len: int, device: torch.device) -> Work:
    config = shape.config
    query = _normal(batch, config.num_heads, query_len, config.head_dim, shape=shape, device=device)
    key, value = (
        _normal(batch, config.num_kv_heads, query_len, config.head_dim, shape=shape, device=device) for _ in range(2)
    )
    launch = partial(F.scaled_dot_product_attention, query, key, value, is_causal=True, enable_gqa=True)
    return _attention_work(shape, batch, query_len, 0, launch)


def _attention_work(shape: Shape, batch: int, query_len: int, context: int, launch: Callable[[], object]) -> Work:
    num_bytes = batch * query_len * shape.attended_size * 2 * shape.dtype.itemsize
    num_bytes += batch * (query_len + context) * shape.kv_token_bytes
    return Work([launch], num_bytes, 4 * shape.attended_size * batch * causal_pairs(query_len, context))


def _write_kv(shape: Shape, num_tokens: int, device: torch.device) -> Work:
    config = shape.config
    prompt_len = min(num_tokens, 1024)
    block_table = _block_table(num_tokens // prompt_len, prompt_len, device)
    key, value = _cache(shape, block_table, device)
    positions = torch.arange(num_tokens, device=device) % prompt_len
    slots = block_table.flatten()[torch.arange(num_tokens, device=device) // BLOCK_SIZE] * BLOCK_SIZE
    slots += positions % BLOCK_SIZE
    cos_sin = rope_cos_sin(config.rope, config.head_dim, prompt_len).to(device)
    qkv = _normal(num_tokens, shape.qkv_size, shape=shape, device=device)
    num_bytes = 2 * num_tokens * shape.kv_token_bytes
    launch = partial(write_kv, qkv, positions, slots, cos_sin, key, value, config.num_heads)
    return Work([launch], num_bytes)


def _normal(*size: int, shape: Shape, device: torch.device) -> Tensor:
    return torch.randn(*size, dtype=shape.dtype, device=device)


def _block_table(num_rows: int, seq_len: int, device: torch.device) -> Tensor:
    """Blocks of every row in no order, as after a while of serving. [num_rows, blocks of a row] int64."""
    blocks = -(-seq_len // BLOCK_SIZE)
    return (torch.randperm(num_rows * blocks, device=device) + 1).view(num_rows, blocks)


def _cache(shape: Shape, block_table: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
    config = shape.config
    size = (2, block_table.numel() + 1, BLOCK_SIZE, config.num_kv_heads, config.head_dim)
    key, value = torch.randn(size, dtype=shape.dtype, device=device)
    return key, value
