"""Rotary position embedding: one table for all layers, one fused rotation for queries and keys."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from model_executor.models.config import RopeConfig


class RotaryTable:
    """cos and signed sin of every position, gathered once a step and shared by all layers.

    Rotates as in Su et al. 2021 (arXiv 2104.09864), in the half-split layout of Hugging Face checkpoints: element i
    pairs with element i + head_dim / 2. `x * cos + swap_halves(x) * sin`, where sin carries the sign of the first half.
    """

    def __init__(
        self, rope: RopeConfig, head_dim: int, max_positions: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        angles = rope_angles(rope, head_dim, max_positions)
        cos, sin = angles.cos(), angles.sin()  # [max_positions, head_dim / 2]
        table = torch.cat((cos, cos, -sin, sin), dim=-1)
        self._table = table.to(dtype).to(device)  # [max_positions, 2 * head_dim]
        self._head_dim = head_dim

    def gather(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and signed sin of `positions` [num_tokens] int64: two tensors [num_tokens, 1, head_dim]."""
        rows = self._table.index_select(0, positions).unsqueeze(1)  # [num_tokens, 1, 2 * head_dim]
        return rows[..., : self._head_dim], rows[..., self._head_dim :]


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate every head of [num_tokens, any number of heads, head_dim]; queries and keys go through in one call."""
    swapped = heads.roll(heads.shape[-1] // 2, -1)
    return torch.addcmul(heads * cos, swapped, sin)


def rope_angles(rope: RopeConfig, head_dim: int, max_positions: int) -> Tensor:
    """Angle of each pair at each position, [max_positions, head_dim / 2] float32, on the CPU."""
    return torch.outer(torch.arange(max_positions, dtype=torch.float32), inverse_frequencies(rope, head_dim))


def rope_cos_sin(rope: RopeConfig, head_dim: int, max_positions: int) -> Tensor:
    """cos of the head_dim / 2 angles of each position, then sin: [max_positions, head_dim] float32, on the CPU."""
    angles = rope_angles(rope, head_dim, max_positions)
    return torch.cat([angles.cos(), angles.sin()], dim=-1)


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """Radians per position of each pair, [head_dim / 2] float32.

    `llama3` (Llama 3.1): wavelengths longer than the original context / low_freq_factor are stretched by `factor`,
    those shorter than the original context / high_freq_factor are kept, and those between are blended.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    inverse = 1.0 / rope.theta**exponents  # [head_dim / 2]
    if rope.type == "default":
        return inverse
    wavelengths = 2 * math.pi / inverse
    turns = rope.original_max_position_embeddings / wavelengths  # full turns within the original context
    kept = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    kept = kept.clamp(0.0, 1.0)
    return kept * inverse + (1 - kept) * inverse / rope.factor
