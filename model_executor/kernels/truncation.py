"""What `top_k_cut` and `top_p_draw` read of the rows, and the memory that they share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from model_executor.kernels.sampling_scores import NUM_SPLITS

STATS_BLOCK: Final = 2048
GROUP: Final = 32
"""Tokens of a block of `_stats_kernel`, and of the groups in it whose largest score it leaves."""

_CAPACITY: Final = 4096


@dataclass(frozen=True, slots=True)
class TruncationParams:
    """How rows truncate; off is never read, the flags say."""

    flags: Tensor  # [R] int32
    temperature: Tensor  # [R] float32
    top_k: Tensor  # [R] int64
    top_p: Tensor  # [R] float32
    log_min_p: Tensor  # [R] float32


@dataclass(frozen=True, slots=True)
class TruncationScratch:
    """Room for `max_places` places, P.

    `top_p_draw` reads what `top_k_cut` leaves in `largest`, `floor` and `total`, and appends to a list whose number,
    num_listed[:, 1], `_stats_kernel` has set to 0.
    """

    part_max: Tensor  # [P, NUM_SPLITS] float32
    group_max: Tensor  # [P, num_groups] float32
    largest: Tensor  # [P] float32, finite
    floor: Tensor  # [P] float32, of min_p, or of top_k where that is higher
    total: Tensor  # [P] int64, what the kept tokens weigh; -1: not summed; 0: top_p has made its cut already
    num_listed: Tensor  # [P, 2] int32, of `top_k_cut` and of `top_p_draw`, beyond capacity too
    listed: Tensor  # [P, capacity] int64: keys of tokens in `top_k_cut`, then groups of four tokens in `top_p_draw`
    part_mass: Tensor  # [P, NUM_SPLITS, 2] int64, of `top_p_draw`


def make_truncation_scratch(
    max_places: int, vocab_size: int, device: torch.device, capacity: int = _CAPACITY
) -> TruncationScratch:
    """Scratch of up to `max_places` places: 49 KB each for a vocabulary of 128256."""

    def empty(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(max_places, *shape, dtype=dtype, device=device)

    return TruncationScratch(
        part_max=empty(NUM_SPLITS, dtype=torch.float32),
        group_max=empty(-(-vocab_size // STATS_BLOCK) * (STATS_BLOCK // GROUP), dtype=torch.float32),
        largest=empty(dtype=torch.float32),
        floor=empty(dtype=torch.float32),
        total=empty(dtype=torch.int64),
        num_listed=empty(2, dtype=torch.int32),
        listed=empty(capacity, dtype=torch.int64),
        part_mass=empty(NUM_SPLITS, 2, dtype=torch.int64),
    )
