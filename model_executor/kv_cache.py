"""Paged KV cache: keys and values of every layer in blocks that requests own one by one."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from common.config import BLOCK_SIZE
from common.errors import InvalidArgumentError
from model_executor.models.config import ModelConfig

DUMMY_BLOCK = 0
"""A block that no request ever owns: warm-up steps and padding tokens write here, so that they can spoil nothing."""

PAD_SLOT_ID = DUMMY_BLOCK * BLOCK_SIZE
"""Slot of a padding token. A slot that exists, so that the write needs no mask; what stands there is never read."""


@dataclass(frozen=True, slots=True)
class LayerKV:
    """KV of one layer, and the same memory seen token by token (slot = block * block_size + offset)."""

    key: Tensor  # [num_blocks, block_size, num_kv_heads, head_dim]
    value: Tensor  # [num_blocks, block_size, num_kv_heads, head_dim]
    key_slots: Tensor  # [num_blocks * block_size, num_kv_heads, head_dim]
    value_slots: Tensor  # [num_blocks * block_size, num_kv_heads, head_dim]


class KVCache:
    """KV of all layers.

    One allocation for all: it either fits or fails as a whole, and a layer's keys and values stay one strided tensor
    each, which is what a kernel takes. Zeroed, since a masked slot is multiplied by 0, and 0 times a leftover NaN is
    NaN.

    Args:
        config: the model.
        num_blocks: blocks, the dummy block (block 0) included.
        dtype: of keys and values, that of the model.
        device: where the cache lives.
    """

    def __init__(self, config: ModelConfig, num_blocks: int, dtype: torch.dtype, device: torch.device) -> None:
        self.num_blocks = num_blocks
        self.block_size = BLOCK_SIZE
        shape = (config.num_layers, 2, num_blocks, BLOCK_SIZE, config.num_kv_heads, config.head_dim)
        self.storage = torch.zeros(shape, dtype=dtype, device=device)
        slots = self.storage.view(config.num_layers, 2, num_blocks * BLOCK_SIZE, config.num_kv_heads, config.head_dim)
        self.layers = [
            LayerKV(key=blocks[0], value=blocks[1], key_slots=flat[0], value_slots=flat[1])
            for blocks, flat in zip(self.storage, slots, strict=True)
        ]


def bytes_per_block(config: ModelConfig, dtype: torch.dtype) -> int:
    """Bytes of one block of BLOCK_SIZE tokens: keys and values of all layers."""
    return 2 * config.num_layers * BLOCK_SIZE * config.num_kv_heads * config.head_dim * dtype.itemsize


def max_useful_blocks(max_num_seqs: int, max_model_len: int) -> int:
    """What all rows together can ever fill, the dummy block included: more would be memory that nobody uses."""
    return max_num_seqs * -(-max_model_len // BLOCK_SIZE) + 1


def num_blocks_for(memory_bytes: int, config: ModelConfig, dtype: torch.dtype, max_model_len: int) -> int:
    """Blocks that fit in `memory_bytes`, the dummy block included.

    Raises:
        InvalidArgumentError: not even one request of `max_model_len` tokens fits beside the dummy block; it could never
            run.
    """
    block_bytes = bytes_per_block(config, dtype)
    min_blocks = -(-max_model_len // BLOCK_SIZE) + 1
    num_blocks = memory_bytes // block_bytes
    if num_blocks < min_blocks:
        minimum = f"at least {min_blocks * block_bytes} bytes: {min_blocks} blocks of {block_bytes} bytes"
        reason = f"one request of max_model_len = {max_model_len} tokens, and a dummy block"
        raise InvalidArgumentError("kv_cache_memory", memory_bytes, f"{minimum} for {reason}")
    return num_blocks
