"""Memory that attention on a CPU gathers paged KV into."""

from __future__ import annotations

import math

import torch
from torch import Tensor


class Workspace:
    """Memory for gathered blocks, kept from layer to layer and from step to step.

    Fresh memory is a page fault every 4 KiB: a gather of 64 rows of 250 tokens took 1.2 ms with it, and 0.2 ms without.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._memory = torch.empty(0, dtype=dtype)

    def gather(self, cache: Tensor, blocks: Tensor) -> Tensor:
        """The blocks [num_blocks] of `cache`, [num_blocks, *cache.shape[1:]]; valid until the next call."""
        shape = (blocks.shape[0], *cache.shape[1:])
        size = math.prod(shape)
        if self._memory.numel() < size or self._memory.device != cache.device:
            # A tensor born in inference mode could not be written outside of it.
            with torch.inference_mode(False):
                self._memory = torch.empty(1 << (size - 1).bit_length(), dtype=cache.dtype, device=cache.device)
        return torch.index_select(cache, 0, blocks, out=self._memory[:size].view(shape))
