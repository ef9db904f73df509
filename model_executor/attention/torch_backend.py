"""Paged attention in plain torch: the reference for kernels, and the backend of a CPU.

A batch is cut into pieces that one call of scaled-dot-product attention (SDPA) can do:

- Short rows (decode and verify) of similar length form a padded group. Their queries are packed with the heads that
  share a KV head, [num_kv_heads, query_len * group_size], so that KV is never repeated for them.
- A long row (prefill) goes through by itself, in blocks of queries, each with just the KV that it can see.

All index tensors and masks are made once a step in `prepare`. It reads lengths on the host, so that on a CUDA device it
would synchronize; kernels for CUDA come behind the same seam.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from model_executor.attention.workspace import Workspace
from model_executor.forward_batch import ForwardBatch
from model_executor.kv_cache import LayerKV

MAX_SHORT_QUERY_LEN = 32
"""Rows of at most this many query tokens go into padded groups: 1 + MAX_SPECULATIVE_TOKENS, and small chunks."""

PREFILL_QUERY_BLOCK = 256
"""Queries of one SDPA call of a prefill: bounds the mask, and skips KV that no query of the block can see."""

MAX_UNMASKED_PREFILL = 1024
"""A whole prompt up to this goes through in one causal SDPA call, which needs no mask."""


@dataclass(frozen=True, slots=True)
class ShortRow:
    """One decode or verify row by itself: nothing is padded."""

    tokens: slice
    kv_len: int
    blocks: slice | Tensor  # [num_blocks]; a slice where they stand side by side
    mask: Tensor | None  # [1, 1, query_len * group_size, kv_len], added to the scores; None: all is seen


@dataclass(frozen=True, slots=True)
class PaddedGroup:
    """Decode and verify rows of similar length, padded to the longest."""

    tokens: slice | Tensor  # the group's query tokens, [num_rows * query_len]; a slice where none is padding
    real: Tensor | None  # entries of `tokens` that are no padding; None: all of them
    num_rows: int
    query_len: int
    kv_len: int
    blocks: Tensor  # [num_rows * num_blocks]
    mask: Tensor  # [num_rows, 1, query_len * group_size, kv_len], added to the scores


@dataclass(frozen=True, slots=True)
class PrefillBlock:
    """Some query tokens of one long row."""

    tokens: slice
    kv_len: int
    blocks: slice | Tensor  # [num_blocks] of the row; a slice where they stand side by side
    mask: Tensor | None  # [query_len, kv_len], added to the scores; None: plain causal, query i sees KV 0..i


Piece = ShortRow | PaddedGroup | PrefillBlock


@dataclass(frozen=True, slots=True)
class TorchAttentionMetadata:
    """The pieces of a batch."""

    slot_mapping: Tensor  # [num_tokens]
    pieces: Sequence[Piece]
    whole: bool  # one piece that covers every token of the batch: its output is the output


class TorchAttentionBackend:
    """AttentionBackend in plain torch.

    Args:
        num_heads: query heads.
        num_kv_heads: KV heads; divides num_heads.
        block_size: tokens of a KV block.
        dtype: of queries, keys and values.
    """

    def __init__(self, num_heads: int, num_kv_heads: int, block_size: int, dtype: torch.dtype) -> None:
        self._num_kv_heads = num_kv_heads
        self._group_size = num_heads // num_kv_heads
        self._block_size = block_size
        self._dtype = dtype
        self._key_workspace = Workspace(dtype)
        self._value_workspace = Workspace(dtype)

    def prepare(self, batch: ForwardBatch) -> TorchAttentionMetadata:
        starts: list[int] = batch.query_start_loc.tolist()
        seq_lens: list[int] = batch.seq_lens.tolist()
        num_tokens = batch.input_ids.shape[0]
        pieces: list[Piece] = []
        # Power-of-two buckets of the KV length and of the query length -> rows: one long context makes no padding for
        # short ones, and one chunk of a prompt none for decode rows.
        short: dict[tuple[int, int], list[int]] = {}
        for row, seq_len in enumerate(seq_lens):
            query_len = starts[row + 1] - starts[row]
            if query_len > MAX_SHORT_QUERY_LEN:
                pieces += self._prefill_blocks(batch, row, starts[row], query_len, seq_len)
            elif query_len > 0:
                bucket = (((seq_len - 1) // self._block_size).bit_length(), (query_len - 1).bit_length())
                short.setdefault(bucket, []).append(row)
        for rows in short.values():
            if len(rows) == 1:
                pieces.append(self._single_row(batch, rows[0], starts, seq_lens))
            else:
                pieces.append(self._padded_group(batch, rows, starts, seq_lens))
        whole = len(pieces) == 1 and _covers(pieces[0], num_tokens)
        return TorchAttentionMetadata(slot_mapping=batch.slot_mapping, pieces=pieces, whole=whole)

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, layer_kv: LayerKV, metadata: TorchAttentionMetadata
    ) -> Tensor:
        layer_kv.key_slots.index_copy_(0, metadata.slot_mapping, key)
        layer_kv.value_slots.index_copy_(0, metadata.slot_mapping, value)
        if metadata.whole:
            return self._attend(query, layer_kv, metadata.pieces[0])
        output = query.new_zeros(query.shape)
        for piece in metadata.pieces:
            part = self._attend(query[piece.tokens], layer_kv, piece)
            if isinstance(piece.tokens, slice):
                output[piece.tokens] = part
            elif isinstance(piece, PaddedGroup) and piece.real is not None:
                output.index_copy_(0, piece.tokens[piece.real], part[piece.real])
            else:
                output.index_copy_(0, piece.tokens, part)
        return output

    def _attend(self, query: Tensor, layer_kv: LayerKV, piece: Piece) -> Tensor:
        if isinstance(piece, PrefillBlock):
            return self._attend_prefill(query, layer_kv, piece)
        if isinstance(piece, ShortRow):
            return self._attend_row(query, layer_kv, piece)
        return self._attend_group(query, layer_kv, piece)

    def _attend_prefill(self, query: Tensor, layer_kv: LayerKV, block: PrefillBlock) -> Tensor:
        queries = query.transpose(0, 1).unsqueeze(0)  # [1, num_heads, query_len, head_dim]
        keys = self._read_row(layer_kv.key, block, self._key_workspace)
        values = self._read_row(layer_kv.value, block, self._value_workspace)
        output = F.scaled_dot_product_attention(
            queries,
            keys.transpose(0, 1),
            values.transpose(0, 1),
            attn_mask=block.mask,
            is_causal=block.mask is None,
            enable_gqa=self._group_size > 1,
        )
        return output.squeeze(0).transpose(0, 1)

    def _attend_row(self, query: Tensor, layer_kv: LayerKV, row: ShortRow) -> Tensor:
        """The path of batch 1, where the number of operations is what counts.

        KV heads stand where SDPA has its batch, with one head each: then its output is in the order of query heads.
        """
        num_tokens, num_heads, head_dim = query.shape
        if num_tokens > 1:
            query = query.view(num_tokens, self._num_kv_heads, self._group_size, head_dim).transpose(0, 1)
        # [num_kv_heads, 1, query_len * group_size, head_dim]
        packed = query.reshape(self._num_kv_heads, 1, -1, head_dim)
        keys = self._read_row(layer_kv.key, row, self._key_workspace)
        values = self._read_row(layer_kv.value, row, self._value_workspace)
        output = F.scaled_dot_product_attention(packed, keys, values, attn_mask=row.mask)
        if num_tokens > 1:
            output = output.view(self._num_kv_heads, num_tokens, self._group_size, head_dim).transpose(0, 1)
        return output.reshape(num_tokens, num_heads, head_dim)

    def _attend_group(self, query: Tensor, layer_kv: LayerKV, rows: PaddedGroup) -> Tensor:
        num_tokens, num_heads, head_dim = query.shape
        packed_len = self._group_size * rows.query_len
        # [num_rows, num_kv_heads, query_len * group_size, head_dim]; a view for one query token, else a small copy
        grouped = query.view(rows.num_rows, rows.query_len, self._num_kv_heads, self._group_size, head_dim)
        packed = grouped.transpose(1, 2).reshape(rows.num_rows, self._num_kv_heads, packed_len, head_dim)
        keys = self._read_group(layer_kv.key, rows, self._key_workspace)
        values = self._read_group(layer_kv.value, rows, self._value_workspace)
        output = F.scaled_dot_product_attention(packed, keys, values, attn_mask=rows.mask)
        output = output.view(rows.num_rows, self._num_kv_heads, rows.query_len, self._group_size, head_dim)
        return output.transpose(1, 2).reshape(num_tokens, num_heads, head_dim)

    def _read_row(self, cache: Tensor, piece: ShortRow | PrefillBlock, workspace: Workspace) -> Tensor:
        """Keys or values of one row, [num_kv_heads, 1, kv_len, head_dim]: a view if its blocks stand side by side."""
        blocks = piece.blocks
        picked = cache[blocks] if isinstance(blocks, slice) else workspace.gather(cache, blocks)
        return picked.flatten(0, 1)[: piece.kv_len].transpose(0, 1).unsqueeze(1)

    def _read_group(self, cache: Tensor, rows: PaddedGroup, workspace: Workspace) -> Tensor:
        """Keys or values of a padded group, [num_rows, num_kv_heads, kv_len, head_dim]."""
        picked = workspace.gather(cache, rows.blocks).view(rows.num_rows, -1, *cache.shape[2:])
        return picked[:, : rows.kv_len].transpose(1, 2)

    def _single_row(self, batch: ForwardBatch, row: int, starts: Sequence[int], seq_lens: Sequence[int]) -> ShortRow:
        query_len, seq_len = starts[row + 1] - starts[row], seq_lens[row]
        mask = None
        if query_len > 1:
            seen = self._seen([seq_len], [query_len], query_len, batch.seq_lens.device)
            mask = self._mask(seen, seq_len)
        return ShortRow(
            tokens=slice(starts[row], starts[row + 1]),
            kv_len=seq_len,
            blocks=self._blocks_of(batch, row, seq_len),
            mask=mask,
        )

    def _padded_group(
        self, batch: ForwardBatch, rows: Sequence[int], starts: Sequence[int], seq_lens: Sequence[int]
    ) -> PaddedGroup:
        device = batch.seq_lens.device
        query_lens = [starts[row + 1] - starts[row] for row in rows]
        lens = [seq_lens[row] for row in rows]
        query_len, kv_len = max(query_lens), max(lens)
        num_blocks = -(-kv_len // self._block_size)
        tokens: slice | Tensor
        real = None
        if min(query_lens) == query_len and rows[-1] - rows[0] == len(rows) - 1:
            tokens = slice(starts[rows[0]], starts[rows[-1] + 1])
        else:
            # A padding query is the row's last token once more; its output is dropped.
            indices = [
                starts[row] + min(j, length - 1)
                for row, length in zip(rows, query_lens, strict=True)
                for j in range(query_len)
            ]
            tokens = torch.tensor(indices, device=device)
            if min(query_lens) < query_len:
                kept = [i * query_len + j for i, length in enumerate(query_lens) for j in range(length)]
                real = torch.tensor(kept, device=device)
        # Beyond a row's own blocks its table may hold anything; the dummy block stands in for it.
        table = batch.block_table[torch.tensor(rows, device=device), :num_blocks]
        owned = torch.tensor([-(-length // self._block_size) for length in lens], device=device)
        table = table * (torch.arange(num_blocks, device=device) < owned[:, None])
        return PaddedGroup(
            tokens=tokens,
            real=real,
            num_rows=len(rows),
            query_len=query_len,
            kv_len=kv_len,
            blocks=table.flatten(),
            mask=self._mask(self._seen(lens, query_lens, query_len, device), kv_len),
        )

    def _prefill_blocks(
        self, batch: ForwardBatch, row: int, start: int, query_len: int, seq_len: int
    ) -> list[PrefillBlock]:
        context = seq_len - query_len
        if context == 0 and query_len <= MAX_UNMASKED_PREFILL:
            blocks = self._blocks_of(batch, row, seq_len)
            return [PrefillBlock(tokens=slice(start, start + query_len), kv_len=seq_len, blocks=blocks, mask=None)]
        pieces: list[PrefillBlock] = []
        for first in range(0, query_len, PREFILL_QUERY_BLOCK):
            end = min(first + PREFILL_QUERY_BLOCK, query_len)
            seen = torch.arange(context + first + 1, context + end + 1, device=batch.seq_lens.device)
            kv_len = context + end
            blocks = self._blocks_of(batch, row, kv_len)
            mask = self._additive(seen[:, None], kv_len)  # [end - first, kv_len]
            pieces.append(
                PrefillBlock(tokens=slice(start + first, start + end), kv_len=kv_len, blocks=blocks, mask=mask)
            )
        return pieces

    def _blocks_of(self, batch: ForwardBatch, row: int, seq_len: int) -> slice | Tensor:
        """Blocks of a row; a slice where they stand side by side, so that the row is read without a copy."""
        blocks = batch.block_table[row, : -(-seq_len // self._block_size)]
        ids: list[int] = blocks.tolist()
        if ids == list(range(ids[0], ids[0] + len(ids))):
            return slice(ids[0], ids[0] + len(ids))
        return blocks

    def _seen(
        self, seq_lens: Sequence[int], query_lens: Sequence[int], padded_len: int, device: torch.device
    ) -> Tensor:
        """KV tokens that each query sees, [num_rows, padded_len]; a padding query sees what the row's last one sees."""
        seen = [
            [seq_len - query_len + min(j, query_len - 1) + 1 for j in range(padded_len)]
            for seq_len, query_len in zip(seq_lens, query_lens, strict=True)
        ]
        return torch.tensor(seen, device=device)

    def _mask(self, seen: Tensor, kv_len: int) -> Tensor:
        """[num_rows, padded_len] -> [num_rows, 1, padded_len * group_size, kv_len]."""
        packed = seen.repeat_interleave(self._group_size, dim=1)
        return self._additive(packed[:, None, :, None], kv_len)

    def _additive(self, seen: Tensor, kv_len: int) -> Tensor:
        """0 for the first `seen` KV tokens and -inf for the others, along a new last dimension of size 1 in `seen`."""
        hidden = torch.arange(kv_len, device=seen.device) >= seen
        return torch.zeros(hidden.shape, dtype=self._dtype, device=seen.device).masked_fill_(hidden, float("-inf"))


def _covers(piece: Piece, num_tokens: int) -> bool:
    return isinstance(piece.tokens, slice) and piece.tokens == slice(0, num_tokens)
