"""What the sampling kernels share: the score of a token at a place, and an order of floats as integers.

A place is one position that a step samples: place p = entry * width + j draws the token at committed_len + j of the
row of its entry, for j < num_samples of the entry. Scores are made where they are used, by the same operations in every
kernel, so that a row gets the same bits in whatever company and from whichever variant of the step.
"""

# pyright: reportGeneralTypeIssues=false
# Triton's constexpr values have no types that pyright follows.
from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Protocol

import triton
import triton.language as tl
from torch import Tensor

from model_executor import sampling_flags as flags

PROCESSED: Final = tl.constexpr(flags.PROCESSED)
MIN_P: Final = tl.constexpr(flags.MIN_P)
TOP_K: Final = tl.constexpr(flags.TOP_K)
TOP_P: Final = tl.constexpr(flags.TOP_P)
CUT: Final = tl.constexpr(flags.MIN_P | flags.TOP_K | flags.TOP_P)

NUM_SPLITS: Final = 16
"""Programs that share a place. Always as many: the parts of a sum must not depend on the batch."""

_UNIT: Final = tl.constexpr(2.0**40)


class Places(Protocol):
    """What the sampling kernels read of a step's inputs."""

    @property
    def width(self) -> int: ...  # K + 1
    @property
    def idx_mapping(self) -> Tensor: ...  # [num_reqs] int64, row of each entry
    @property
    def num_samples(self) -> Tensor: ...  # [num_reqs] int64, places of each entry in use


@dataclass(frozen=True, slots=True)
class ProcessedScores:
    """Where `gumbel_argmax` finds what processing and `top_k_cut` left; all at addresses that stay."""

    flags: Tensor  # [R] int32, of model_executor.sampling_flags
    processed: Tensor  # [P, vocab_size] float32, logits after `process_logits`; of rows with PROCESSED flags only
    cut_value: Tensor  # [P] float32; of rows with MIN_P, TOP_K or TOP_P only
    cut_token: Tensor  # [P] int32; kept are tokens above cut_value, and those at it up to cut_token


@triton.jit
def row_of(place, flags_ptr, row_ptr, num_samples_ptr, WIDTH: tl.constexpr):
    """The row of a place and its flags; no flags where the place is not in use."""
    entry = place // WIDTH
    row = tl.load(row_ptr + entry)
    is_in_use = place % WIDTH < tl.load(num_samples_ptr + entry)
    return row, tl.where(is_in_use, tl.load(flags_ptr + row), 0)


@triton.jit
def at_temperature(values, temperature):
    """values / temperature; a greedy row's are left as they are."""
    if temperature > 0:
        values = values / temperature
    return values


@triton.jit
def load_scores(logits_ptr, processed_ptr, place, vocab_size, tokens, inside, row_flags, temperature):
    """Processed logits / temperature of some tokens of a place, float32, -inf outside; a greedy row is not divided."""
    if (row_flags & PROCESSED) != 0:
        scores = tl.load(processed_ptr + place * vocab_size + tokens, mask=inside, other=float("-inf"))
    else:
        scores = tl.load(logits_ptr + place * vocab_size + tokens, mask=inside, other=float("-inf")).to(tl.float32)
    return at_temperature(scores, temperature)


@triton.jit
def order_key(values):
    """float32 -> int32 in the same order; both zeros are one value."""
    bits = tl.where(values == 0.0, 0.0, values).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def key_value(key):
    """The float32 of an `order_key`."""
    bits = key ^ ((key >> 31) & 0x7FFFFFFF)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def weigh(scores, largest):
    """exp(score - largest) in units of 2^-40, int64; 0 of -inf and of what is no number. Sums of it have no order."""
    share = tl.exp(scores - largest)
    return (tl.where((share >= 0.0) & (share <= 1.0), share, 0.0) * _UNIT).to(tl.int64)


@triton.jit
def limit_of(mass, top_p):
    """What must stand before a token for top_p to drop it: the least integer that is not below top_p * mass, and 1."""
    return tl.maximum(tl.ceil(mass.to(tl.float64) * top_p.to(tl.float64)).to(tl.int64), 1)


@triton.jit
def append(items, is_listed, num_ptr, list_ptr, capacity):
    """List what is chosen, in any order, and count it beyond the capacity too."""
    flag = is_listed.to(tl.int32)
    count = tl.sum(flag)
    if count > 0:
        first = tl.atomic_add(num_ptr, count, sem="relaxed")
        if first < capacity:
            index = first + tl.cumsum(flag, 0) - 1
            tl.store(list_ptr + index, items, mask=is_listed & (index < capacity))
