"""Attention of random ragged batches over shuffled blocks, against a loop over tokens in float64."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from model_executor.attention.torch_backend import TorchAttentionBackend
from model_executor.forward_batch import ForwardBatch
from model_executor.kv_cache import PAD_SLOT_ID, LayerKV

BLOCK_SIZE = 16
HEAD_DIM = 8


@dataclass(frozen=True, slots=True)
class Row:
    context: int
    query_len: int


rows_strategy = st.lists(
    st.builds(
        Row,
        context=st.one_of(st.just(0), st.integers(0, 40), st.integers(0, 300)),
        query_len=st.one_of(st.just(1), st.integers(0, 17), st.integers(18, 90)),
    ),
    min_size=1,
    max_size=6,
)


def make_layer(num_blocks: int, num_kv_heads: int, generator: torch.Generator, dtype: torch.dtype) -> LayerKV:
    shape = (num_blocks, BLOCK_SIZE, num_kv_heads, HEAD_DIM)
    key, value = (torch.randn(shape, generator=generator).to(dtype) for _ in range(2))
    return LayerKV(key, value, key.view(-1, num_kv_heads, HEAD_DIM), value.view(-1, num_kv_heads, HEAD_DIM))


def make_batch(rows: list[Row], num_padding: int, in_order: bool, rng: random.Random) -> tuple[ForwardBatch, int]:
    """The batch and the number of blocks of the cache."""
    counts = [-(-(row.context + row.query_len) // BLOCK_SIZE) for row in rows]
    num_blocks = sum(counts) + 1
    free = list(range(1, num_blocks))
    if not in_order:
        rng.shuffle(free)
    positions: list[int] = []
    slots: list[int] = []
    starts, table = [0], list[list[int]]()
    for row, count in zip(rows, counts, strict=True):
        blocks = [free.pop(0) for _ in range(count)]
        own = range(row.context, row.context + row.query_len)
        positions += own
        slots += [blocks[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for p in own]
        starts.append(len(positions))
        table.append(blocks + [10**6] * (max(counts) - count))
    positions += [0] * num_padding
    slots += [PAD_SLOT_ID] * num_padding
    batch = ForwardBatch(
        input_ids=torch.zeros(len(positions), dtype=torch.int64),
        positions=torch.tensor(positions, dtype=torch.int64),
        slot_mapping=torch.tensor(slots, dtype=torch.int64),
        query_start_loc=torch.tensor(starts),
        seq_lens=torch.tensor([row.context + row.query_len for row in rows]),
        block_table=torch.tensor(table, dtype=torch.int64).view(len(rows), -1),
    )
    return batch, num_blocks


def attend_token_by_token(query: Tensor, layer: LayerKV, batch: ForwardBatch) -> Tensor:
    """float64, one token and one head at a time; expects the KV of the batch to be written."""
    output = torch.zeros(query.shape, dtype=torch.float64)
    group_size = query.shape[1] // layer.key.shape[2]
    starts = batch.query_start_loc.tolist()
    for row, seq_len in enumerate(batch.seq_lens.tolist()):
        for token in range(starts[row], starts[row + 1]):
            seen = int(batch.positions[token]) + 1
            assert seen <= seq_len
            blocks = batch.block_table[row, torch.arange(seen) // BLOCK_SIZE]
            slots = blocks * BLOCK_SIZE + torch.arange(seen) % BLOCK_SIZE
            for head in range(query.shape[1]):
                keys = layer.key_slots[slots, head // group_size].double()  # [seen, head_dim]
                scores = keys @ query[token, head].double() / HEAD_DIM**0.5
                values = layer.value_slots[slots, head // group_size].double()
                output[token, head] = scores.softmax(0) @ values
    return output


@settings(max_examples=60, deadline=None)
@given(
    rows=rows_strategy,
    heads=st.sampled_from([(4, 4), (4, 2), (6, 2), (3, 1)]),
    num_padding=st.sampled_from([0, 0, 3]),
    in_order=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_attention_equals_the_reference(
    rows: list[Row], heads: tuple[int, int], num_padding: int, in_order: bool, seed: int
) -> None:
    check(rows, heads, num_padding, in_order, seed)


@pytest.mark.parametrize("rows", [[Row(0, 1100)], [Row(300, 600), Row(0, 300), Row(900, 1)], [Row(2000, 4)] * 3])
def test_long_rows_equal_the_reference(rows: list[Row]) -> None:
    """More queries than one block of a prefill holds, with and without context."""
    check(rows, (2, 1), num_padding=0, in_order=False, seed=1)


@pytest.mark.parametrize("in_order", [True, False])
def test_bfloat16_rows_are_close_to_the_reference(in_order: bool) -> None:
    rows = [Row(50, 4), Row(60, 1), Row(55, 3), Row(0, 40), Row(64, 40)]
    check(rows, (4, 2), num_padding=2, in_order=in_order, seed=2, dtype=torch.bfloat16, atol=0.03)


def check(
    rows: list[Row],
    heads: tuple[int, int],
    num_padding: int,
    in_order: bool,
    seed: int,
    dtype: torch.dtype = torch.float32,
    atol: float = 2e-5,
) -> None:
    num_heads, num_kv_heads = heads
    generator = torch.Generator().manual_seed(seed)
    batch, num_blocks = make_batch(rows, num_padding, in_order, random.Random(seed))
    layer = make_layer(num_blocks, num_kv_heads, generator, dtype)
    num_tokens = batch.input_ids.shape[0]
    query = torch.randn(num_tokens, num_heads, HEAD_DIM, generator=generator).to(dtype)
    key, value = (torch.randn(num_tokens, num_kv_heads, HEAD_DIM, generator=generator).to(dtype) for _ in range(2))
    untouched = torch.ones(num_blocks * BLOCK_SIZE, dtype=torch.bool)
    untouched[batch.slot_mapping] = False
    before = layer.key_slots[untouched], layer.value_slots[untouched]

    backend = TorchAttentionBackend(num_heads, num_kv_heads, BLOCK_SIZE, dtype)
    output = backend.forward(query, key, value, layer, backend.prepare(batch))

    real = num_tokens - num_padding
    assert torch.equal(layer.key_slots[batch.slot_mapping[:real]], key[:real])
    assert torch.equal(layer.value_slots[batch.slot_mapping[:real]], value[:real])
    assert torch.equal(layer.key_slots[untouched], before[0])
    assert torch.equal(layer.value_slots[untouched], before[1])
    expected = attend_token_by_token(query, layer, batch)
    assert output.shape == query.shape
    assert output.dtype == dtype
    torch.testing.assert_close(output.double(), expected, atol=atol, rtol=1e-5)
