"""A kernel at one size, as `python -m bench kernels` times it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from model_executor.models.config import ModelConfig

BEYOND_L2 = 192 << 20
"""Bytes after which nothing of the first is left in an L2 of 60 MB."""

MAX_COPIES = 48


@dataclass(frozen=True, slots=True)
class Work:
    """Launches of one kernel, each on memory of its own where production would find it outside the L2."""

    launches: list[Callable[[], object]]
    num_bytes: int
    """Read and written by one launch, everything once."""
    num_flops: int = 0
    """Of one launch; 0: bound by memory, and only the bytes count."""


@dataclass(frozen=True, slots=True)
class Case:
    """What is timed: `make` allocates on the device and returns the launches."""

    kernel: str
    """File of the kernel under model_executor/kernels, or what stands beside it for comparison."""
    size: str
    make: Callable[[torch.device], Work]


@dataclass(frozen=True, slots=True)
class Sizes:
    """Batches and lengths of the cases; those of a test are small."""

    batches: tuple[int, ...] = (1, 16, 64)
    num_draft: int = 3
    context: int = 1280
    num_tokens: int = 8192
    prompts: tuple[tuple[int, int, int], ...] = ((8, 1024, 0), (2, 4096, 0), (1, 512, 3584))
    """Entries, query tokens of each, context before them."""
    num_rows: int = 64
    text_len: int = 32768
    product_rows: tuple[int, ...] = (1, 4, 16, 64)


DEFAULT_SIZES = Sizes()


@dataclass(frozen=True, slots=True)
class Shape:
    """A model that kernels are timed for."""

    name: str
    config: ModelConfig
    dtype: torch.dtype = torch.bfloat16

    @property
    def group(self) -> int:
        return self.config.num_heads // self.config.num_kv_heads

    @property
    def qkv_size(self) -> int:
        return (self.config.num_heads + 2 * self.config.num_kv_heads) * self.config.head_dim

    @property
    def attended_size(self) -> int:
        return self.config.num_heads * self.config.head_dim

    @property
    def kv_token_bytes(self) -> int:
        """Keys and values of one token in one layer."""
        return 2 * self.config.num_kv_heads * self.config.head_dim * self.dtype.itemsize


def copies_for(num_bytes: int) -> int:
    """How many sets of `num_bytes` keep each other out of the L2."""
    return max(1, min(MAX_COPIES, -(-BEYOND_L2 // num_bytes)))
