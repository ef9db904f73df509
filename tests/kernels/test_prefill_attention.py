"""Attention of prefill chunks over paged KV against a float64 softmax."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import pytest
import torch
from torch import Tensor

from model_executor.kernels.prefill_attention import (
    PrefillTiles,
    candidates,
    max_query_blocks,
    prefill_attention,
    prefill_attention_ref,
    tiles_for,
)

BLOCK_SIZE, MAX_BLOCKS, WIDTH = 16, 12, 4
SMALL = PrefillTiles(32, 32, 4, 2)
# Triton's interpreter multiplies the bits of bfloat16 as if they were integers.
HALF = torch.bfloat16 if torch.cuda.is_available() else torch.float16


@dataclass
class Batch:
    """Entries of given query lengths behind given contexts; every token of the cache that no one may see is NaN."""

    arguments: tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]
    """Of the kernel, from qkv to seq_lens."""
    out: Tensor
    num_heads: int

    @classmethod
    def make(
        cls,
        query_lens: list[int],
        contexts: list[int],
        shape: tuple[int, int, int],
        dtype: torch.dtype,
        device: torch.device,
        num_padding: int = 0,
        seed: int = 0,
    ) -> Batch:
        num_heads, num_kv_heads, head_dim = shape
        generator = torch.Generator().manual_seed(seed)
        num_reqs = len(query_lens)
        seq_lens = [q + c for q, c in zip(query_lens, contexts, strict=True)]
        rows = torch.randperm(num_reqs + 2, generator=generator)[:num_reqs]
        blocks = torch.randperm((num_reqs + 2) * MAX_BLOCKS, generator=generator) + 1
        block_table = blocks.view(num_reqs + 2, MAX_BLOCKS)
        storage = torch.full((2, blocks.numel() + 1, BLOCK_SIZE, num_kv_heads, head_dim), float("nan"))
        for row, seq_len in zip(rows.tolist(), seq_lens, strict=True):
            tokens = torch.arange(seq_len)
            place = (block_table[row][tokens // BLOCK_SIZE], tokens % BLOCK_SIZE)
            for cache in storage:
                cache[place] = torch.randn(seq_len, num_kv_heads, head_dim, generator=generator)
        num_tokens = sum(query_lens) + num_padding
        qkv = torch.randn(num_tokens, (num_heads + 2 * num_kv_heads) * head_dim, generator=generator)
        angles = torch.rand(MAX_BLOCKS * BLOCK_SIZE, head_dim // 2, generator=generator) * 6
        cos_sin = torch.cat([angles.cos(), angles.sin()], dim=-1).to(device)
        starts = [0, *accumulate(query_lens)][:-1]
        key, value = storage.to(device, dtype)
        start, query_len, seq_len = (torch.tensor(v, device=device) for v in (starts, query_lens, seq_lens))
        qkv, block_table, rows = qkv.to(device, dtype), block_table.to(device), rows.to(device)
        arguments = (qkv, cos_sin, key, value, block_table, rows, start, query_len, seq_len)
        out = torch.full((num_tokens, num_heads * head_dim), float("nan"), dtype=dtype, device=device)
        return cls(arguments, out, num_heads)

    def check(self, tiles: PrefillTiles | None = None) -> None:
        prefill_attention(*self.arguments, self.out, self.num_heads, WIDTH, tiles)
        expected = prefill_attention_ref(*self.arguments, self.num_heads, WIDTH)
        assert torch.equal(self.out.isnan(), expected.isnan())
        written = ~expected.isnan()
        error = (self.out.double() - expected)[written].norm() / expected[written].norm()
        assert float(error) < (1e-6 if self.out.dtype == torch.float32 else 1e-2)


# Short entries, which are not this kernel's, a finished one, chunks of one and of many blocks, with context or none.
QUERY_LENS, CONTEXTS = [1, 40, 0, 5, 4, 65, 17, 0, 32], [30, 0, 0, 70, 9, 100, 15, 50, 32]


@pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=str)
@pytest.mark.parametrize(
    "shape", [(4, 1, 32), (2, 2, 64), (8, 2, 64), (3, 1, 64), (1, 1, 128), (4, 1, 128), (1, 1, 256)], ids=str
)
def test_ragged_batches(device: torch.device, dtype: torch.dtype, shape: tuple[int, int, int]) -> None:
    batch = Batch.make(QUERY_LENS, CONTEXTS, shape, dtype, device, num_padding=11)
    batch.check(None if device.type == "cuda" else SMALL)
    short = torch.tensor(QUERY_LENS).repeat_interleave(torch.tensor(QUERY_LENS)) <= WIDTH
    assert torch.equal(batch.out[: len(short)].isnan().all(dim=1).cpu(), short)
    assert batch.out[len(short) :].isnan().all()


@pytest.mark.parametrize(
    "tiles", dict.fromkeys(candidates(128, torch.bfloat16) + candidates(256, torch.bfloat16)), ids=str
)
def test_every_way_to_cut(device: torch.device, tiles: PrefillTiles) -> None:
    Batch.make([150, 6], [30, 1], (4, 1, 128), HALF, device).check(tiles)


@pytest.mark.parametrize("head_dim", [32, 64, 128, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_few_rows_never_get_larger_programs(head_dim: int, dtype: torch.dtype) -> None:
    assert tiles_for(head_dim, dtype, 1 << 20) == candidates(head_dim, dtype)[0]
    assert tiles_for(head_dim, dtype, 512 * 32).rows <= tiles_for(head_dim, dtype, 1 << 20).rows


@pytest.mark.parametrize("query_lens", [[0], [0, 0], [1, 4, 4]])
def test_nothing_to_do(device: torch.device, query_lens: list[int]) -> None:
    batch = Batch.make(query_lens, [20] * len(query_lens), (4, 1, 64), torch.float32, device, num_padding=40)
    prefill_attention(*batch.arguments, batch.out, batch.num_heads, WIDTH, SMALL)
    assert batch.out.isnan().all()


@pytest.mark.parametrize("num_tokens", [1, 5, 64, 100, 257])
@pytest.mark.parametrize("num_reqs", [1, 3, 20])
def test_the_bound_of_query_blocks_holds_for_the_worst_batch(num_tokens: int, num_reqs: int) -> None:
    queries = 8
    most = 0
    for num_long in range(1, min(num_reqs, num_tokens // (WIDTH + 1)) + 1):
        lens = [WIDTH + 1] * num_long
        spare = num_tokens - sum(lens)
        for entry in range(num_long):  # one token more than whole blocks costs a block more
            grown = min(spare, queries - WIDTH)
            lens[entry] += grown
            spare -= grown
        lens[0] += spare
        most = max(most, sum(-(-length // queries) for length in lens))
    assert most <= max_query_blocks(num_tokens, num_reqs, WIDTH, queries)
