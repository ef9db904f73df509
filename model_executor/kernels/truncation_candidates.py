"""Which tokens a cut of top_k or top_p can be among: the first half of `truncate_logits`, which says how it goes on.

Five kernels; a program of a place that does not need it returns at once.

1. `_stats_kernel` (places x NUM_SPLITS) reads the scores: largest one, and what bounds the sum of exponentials and the
   k-th largest score (the largest of each GROUP tokens: k of them are k different tokens).
2. `_floor_kernel` (places) makes a floor of these: no token below it can be kept. min_p is a floor, and is done here.
3. `_collect_kernel` (places x NUM_SPLITS) reads the scores again and lists the tokens from the floor on, FEW at most.
4. Flat scores leave more than FEW: `_bracket_kernel` counts and weighs 16 bands of scores, and
5. `_recollect_kernel` lists the bands where the cuts can be.

Bytes: the scores twice, or four times where they are flat. A list has no order, and nothing depends on one.
"""

# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
# Triton's launch syntax and its constexpr values have no types that pyright follows.
from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from model_executor.kernels.sampling_scores import (
    CUT,
    MIN_P,
    NUM_SPLITS,
    TOP_K,
    TOP_P,
    Places,
    ProcessedScores,
    load_scores,
)

BLOCK: Final = 1024
GROUP: Final = 32
FEW: Final = 8192
MAX_LISTED: Final = 32768
NUM_BANDS: Final = 16

_UNIT: Final = tl.constexpr(2.0**40)
_MAX: Final = tl.constexpr(3.4028234663852886e38)
_BAND_SPAN: Final = tl.constexpr(32.0)  # the bands reach at most this far below the largest score


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
    """Room for `max_places` places, P."""

    part_max: Tensor  # [P, NUM_SPLITS] float32
    part_sum: Tensor  # [P, NUM_SPLITS] float32, of exp(score - part_max)
    group_max: Tensor  # [P, num_groups] float32
    largest: Tensor  # [P] float32
    min_p_floor: Tensor  # [P] float32, -inf where min_p is off
    floor: Tensor  # [P] float32, at least min_p_floor
    part_mass: Tensor  # [P, NUM_SPLITS] int64, of all that min_p keeps
    edges: Tensor  # [P, NUM_BANDS] float32, where each band begins, ascending
    band_count: Tensor  # [P, NUM_SPLITS, NUM_BANDS] int64, tokens from each edge on
    band_mass: Tensor  # [P, NUM_SPLITS, NUM_BANDS] int64
    num_listed: Tensor  # [P, 2] int32: of `_collect_kernel` and of `_recollect_kernel`, beyond capacity too
    listed_score: Tensor  # [P, capacity] float32
    listed_token: Tensor  # [P, capacity] int32
    few: int  # tokens that `_collect_kernel` lists at most
    capacity: int  # tokens that `_recollect_kernel` lists at most


def make_truncation_scratch(
    max_places: int, vocab_size: int, device: torch.device, few: int = FEW, capacity: int = MAX_LISTED
) -> TruncationScratch:
    """Scratch of up to `max_places` places: 280 KB each for a vocabulary of 128256, most of it the lists."""

    def empty(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(max_places, *shape, dtype=dtype, device=device)

    num_groups = triton.cdiv(vocab_size, BLOCK) * (BLOCK // GROUP)
    return TruncationScratch(
        part_max=empty(NUM_SPLITS, dtype=torch.float32),
        part_sum=empty(NUM_SPLITS, dtype=torch.float32),
        group_max=empty(num_groups, dtype=torch.float32),
        largest=empty(dtype=torch.float32),
        min_p_floor=empty(dtype=torch.float32),
        floor=empty(dtype=torch.float32),
        part_mass=empty(NUM_SPLITS, dtype=torch.int64),
        edges=empty(NUM_BANDS, dtype=torch.float32),
        band_count=empty(NUM_SPLITS, NUM_BANDS, dtype=torch.int64),
        band_mass=empty(NUM_SPLITS, NUM_BANDS, dtype=torch.int64),
        num_listed=empty(2, dtype=torch.int32),
        listed_score=empty(capacity, dtype=torch.float32),
        listed_token=empty(capacity, dtype=torch.int32),
        few=few,
        capacity=capacity,
    )


@triton.jit
def weigh(scores, largest):
    """exp(score - largest) in units of 2^-40, int64; 0 of -inf and of what is no number."""
    share = tl.exp(scores - largest)
    return (tl.where((share >= 0.0) & (share <= 1.0), share, 0.0) * _UNIT).to(tl.int64)


@triton.jit
def _stats_kernel(
    logits_ptr,  # [P, vocab_size]
    processed_ptr,  # [P, vocab_size] float32
    flags_ptr,  # [R] int32
    temperature_ptr,  # [R] float32
    row_ptr,  # [num_reqs] int64
    num_samples_ptr,  # [num_reqs] int64
    part_max_ptr,  # [P, SPLITS] float32
    part_sum_ptr,  # [P, SPLITS] float32
    group_max_ptr,  # [P, num_groups] float32
    num_listed_ptr,  # [P, 2] int32
    vocab_size,
    num_blocks,
    WIDTH: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
):
    place = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    row = tl.load(row_ptr + place // WIDTH)
    row_flags = tl.load(flags_ptr + row)
    if (row_flags & CUT) == 0:
        return
    if place % WIDTH >= tl.load(num_samples_ptr + place // WIDTH):
        return
    temperature = tl.load(temperature_ptr + row)
    largest = tl.full((), float("-inf"), tl.float32)
    total = tl.full((), 0.0, tl.float32)
    groups = tl.arange(0, BLOCK // GROUP)
    for block in range(split, num_blocks, SPLITS):
        tokens = block * BLOCK + tl.arange(0, BLOCK)
        inside = tokens < vocab_size
        scores = load_scores(logits_ptr, processed_ptr, place, vocab_size, tokens, inside, row_flags, temperature)
        scores = tl.where(scores == scores, tl.minimum(scores, _MAX), float("-inf"))
        new_largest = tl.maximum(largest, tl.max(scores))
        base = tl.where(new_largest > float("-inf"), new_largest, 0.0)
        total = total * tl.exp(largest - base) + tl.sum(tl.exp(scores - base))
        largest = new_largest
        if (row_flags & TOP_K) != 0:
            best = tl.max(tl.reshape(scores, (BLOCK // GROUP, GROUP)), axis=1)
            group = place * num_blocks * (BLOCK // GROUP) + block * (BLOCK // GROUP) + groups
            tl.store(group_max_ptr + group, best)
    tl.store(part_max_ptr + place * SPLITS + split, largest)
    tl.store(part_sum_ptr + place * SPLITS + split, total)
    if split == 0:
        tl.store(num_listed_ptr + place * 2, 0)
        tl.store(num_listed_ptr + place * 2 + 1, 0)


@triton.jit
def _kth_group_floor(group_max, num_groups, k, largest, BLOCK: tl.constexpr, BANDS: tl.constexpr):
    """A score that at least k groups reach, at most 1 / 8 below the k-th largest of them; -inf if it is far below."""
    low = largest - _BAND_SPAN
    step = tl.full((), _BAND_SPAN / BANDS, tl.float32)
    bands = tl.arange(0, BANDS)
    floor = tl.full((), float("-inf"), tl.float32)
    for _ in tl.static_range(2):
        edges = low + step * bands.to(tl.float32)
        counts = tl.zeros((BANDS,), dtype=tl.int32)
        for first in range(0, num_groups, BLOCK):
            group = first + tl.arange(0, BLOCK)
            best = tl.load(group_max + group, mask=group < num_groups, other=float("-inf"))
            counts += tl.sum((best[:, None] >= edges[None, :]).to(tl.int32), axis=0)
        reached = tl.max(tl.where(counts >= k, edges, float("-inf")))
        floor = tl.maximum(floor, reached)
        low = tl.where(reached > float("-inf"), reached, low)
        step = step / BANDS
    return floor


@triton.jit
def _floor_kernel(
    flags_ptr,  # [R] int32
    top_k_ptr,  # [R] int64
    top_p_ptr,  # [R] float32
    log_min_p_ptr,  # [R] float32
    row_ptr,  # [num_reqs] int64
    num_samples_ptr,  # [num_reqs] int64
    part_max_ptr,  # [P, SPLITS] float32
    part_sum_ptr,  # [P, SPLITS] float32
    group_max_ptr,  # [P, num_groups] float32
    largest_ptr,  # [P] float32
    min_p_floor_ptr,  # [P] float32
    floor_ptr,  # [P] float32
    edge_ptr,  # [P, BANDS] float32
    cut_value_ptr,  # [P] float32
    cut_token_ptr,  # [P] int32
    vocab_size,
    num_groups,
    WIDTH: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
    BANDS: tl.constexpr,
):
    place = tl.program_id(0).to(tl.int64)
    row = tl.load(row_ptr + place // WIDTH)
    row_flags = tl.load(flags_ptr + row)
    if (row_flags & CUT) == 0:
        return
    if place % WIDTH >= tl.load(num_samples_ptr + place // WIDTH):
        return
    parts = place * SPLITS + tl.arange(0, SPLITS)
    part_max = tl.maximum(tl.load(part_max_ptr + parts), -_MAX)
    largest = tl.max(part_max)  # finite, also where no token is
    min_p_floor = tl.full((), float("-inf"), tl.float32)
    if (row_flags & MIN_P) != 0:
        min_p_floor = largest + tl.load(log_min_p_ptr + row)
    floor = min_p_floor
    if (row_flags & TOP_K) != 0:
        k = tl.load(top_k_ptr + row)
        group_max = group_max_ptr + place * num_groups
        floor = tl.maximum(floor, _kth_group_floor(group_max, num_groups, k, largest, BLOCK, BANDS))
    elif (row_flags & TOP_P) != 0:
        # What lies below this weighs at most half of what top_p drops: vocab_size tokens, none heavier than the floor.
        # What min_p drops is not part of the whole; at least the largest token is.
        total = tl.sum(tl.load(part_sum_ptr + parts) * tl.exp(part_max - largest))
        if (row_flags & MIN_P) != 0:
            total = tl.full((), 1.0, tl.float32)
        dropped = (1.0 - tl.load(top_p_ptr + row)) * total
        floor = tl.maximum(floor, largest + tl.log(0.5 * dropped / vocab_size))
    tl.store(largest_ptr + place, largest)
    tl.store(min_p_floor_ptr + place, min_p_floor)
    tl.store(floor_ptr + place, floor)
    # The first band reaches down to the floor, or far enough. Made once: rounded otherwise, an edge would miscount.
    bands = tl.arange(0, BANDS)
    low = tl.maximum(floor, largest - _BAND_SPAN)
    tl.store(edge_ptr + place * BANDS + bands, low + (largest - low) * (bands.to(tl.float32) / BANDS))
    tl.store(cut_value_ptr + place, min_p_floor)  # all that a row with min_p alone needs
    tl.store(cut_token_ptr + place, vocab_size)


@triton.jit
def _append(scores, tokens, is_listed, num_ptr, listed_score, listed_token, capacity):
    """List what is chosen, in any order, and count it beyond the capacity too."""
    flag = is_listed.to(tl.int32)
    count = tl.sum(flag)
    if count > 0:
        first = tl.atomic_add(num_ptr, count)
        index = first + tl.cumsum(flag, 0) - 1
        has_room = is_listed & (index < capacity)
        tl.store(listed_score + index, scores, mask=has_room)
        tl.store(listed_token + index, tokens, mask=has_room)


@triton.jit
def _collect_kernel(
    logits_ptr,  # [P, vocab_size]
    processed_ptr,  # [P, vocab_size] float32
    flags_ptr,  # [R] int32
    temperature_ptr,  # [R] float32
    row_ptr,  # [num_reqs] int64
    num_samples_ptr,  # [num_reqs] int64
    largest_ptr,  # [P] float32
    min_p_floor_ptr,  # [P] float32
    floor_ptr,  # [P] float32
    part_mass_ptr,  # [P, SPLITS] int64
    num_listed_ptr,  # [P, 2] int32
    listed_score_ptr,  # [P, CAPACITY] float32
    listed_token_ptr,  # [P, CAPACITY] int32
    vocab_size,
    num_blocks,
    WIDTH: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
    FEW: tl.constexpr,
    CAPACITY: tl.constexpr,
):
    place = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    row = tl.load(row_ptr + place // WIDTH)
    row_flags = tl.load(flags_ptr + row)
    if (row_flags & (TOP_K | TOP_P)) == 0:
        return
    if place % WIDTH >= tl.load(num_samples_ptr + place // WIDTH):
        return
    temperature = tl.load(temperature_ptr + row)
    largest = tl.load(largest_ptr + place)
    min_p_floor = tl.load(min_p_floor_ptr + place)
    floor = tl.load(floor_ptr + place)
    mass = tl.zeros((BLOCK,), dtype=tl.int64)
    for block in range(split, num_blocks, SPLITS):
        tokens = block * BLOCK + tl.arange(0, BLOCK)
        inside = tokens < vocab_size
        scores = load_scores(logits_ptr, processed_ptr, place, vocab_size, tokens, inside, row_flags, temperature)
        mass += tl.where(scores >= min_p_floor, weigh(scores, largest), 0)
        is_listed = (scores >= floor) & (scores > float("-inf"))
        _append(
            scores,
            tokens,
            is_listed,
            num_listed_ptr + place * 2,
            listed_score_ptr + place * CAPACITY,
            listed_token_ptr + place * CAPACITY,
            FEW,
        )
    tl.store(part_mass_ptr + place * SPLITS + split, tl.sum(mass))


@triton.jit
def _bracket_kernel(
    logits_ptr,  # [P, vocab_size]
    processed_ptr,  # [P, vocab_size] float32
    flags_ptr,  # [R] int32
    temperature_ptr,  # [R] float32
    row_ptr,  # [num_reqs] int64
    num_samples_ptr,  # [num_reqs] int64
    largest_ptr,  # [P] float32
    floor_ptr,  # [P] float32
    num_listed_ptr,  # [P, 2] int32
    edge_ptr,  # [P, BANDS] float32
    band_count_ptr,  # [P, SPLITS, BANDS] int64
    band_mass_ptr,  # [P, SPLITS, BANDS] int64
    vocab_size,
    num_blocks,
    WIDTH: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
    BANDS: tl.constexpr,
    FEW: tl.constexpr,
):
    place = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    row = tl.load(row_ptr + place // WIDTH)
    row_flags = tl.load(flags_ptr + row)
    if (row_flags & (TOP_K | TOP_P)) == 0:
        return
    if place % WIDTH >= tl.load(num_samples_ptr + place // WIDTH):
        return
    if tl.load(num_listed_ptr + place * 2) <= FEW:
        return
    temperature = tl.load(temperature_ptr + row)
    largest = tl.load(largest_ptr + place)
    floor = tl.load(floor_ptr + place)
    edges = tl.load(edge_ptr + place * BANDS + tl.arange(0, BANDS))
    counts = tl.zeros((BANDS,), dtype=tl.int64)
    masses = tl.zeros((BANDS,), dtype=tl.int64)
    for block in range(split, num_blocks, SPLITS):
        tokens = block * BLOCK + tl.arange(0, BLOCK)
        inside = tokens < vocab_size
        scores = load_scores(logits_ptr, processed_ptr, place, vocab_size, tokens, inside, row_flags, temperature)
        scores = tl.where(scores >= floor, scores, float("-inf"))
        reaches = scores[:, None] >= edges[None, :]  # [BLOCK, BANDS]
        counts += tl.sum(reaches.to(tl.int32), axis=0)
        if (row_flags & TOP_P) != 0:
            masses += tl.sum(tl.where(reaches, weigh(scores, largest)[:, None], 0), axis=0)
    part = (place * SPLITS + split) * BANDS + tl.arange(0, BANDS)
    tl.store(band_count_ptr + part, counts)
    tl.store(band_mass_ptr + part, masses)


@triton.jit
def limit_of(mass, top_p):
    """What must stand before a token for top_p to drop it: the least integer that is not below top_p * mass."""
    return tl.ceil(mass.to(tl.float64) * top_p.to(tl.float64)).to(tl.int64)


@triton.jit
def bracket(
    row_flags,
    top_k,
    top_p,
    floor,
    total,
    edge,
    band_count,
    band_mass,
    SPLITS: tl.constexpr,
    BANDS: tl.constexpr,
):
    """Scores [low, high) where the cuts are, and how many tokens stand at `high` and above, and what they weigh."""
    edges = tl.load(edge + tl.arange(0, BANDS))
    parts = tl.arange(0, SPLITS)[:, None] * BANDS + tl.arange(0, BANDS)[None, :]
    counts = tl.sum(tl.load(band_count + parts), axis=0)  # [BANDS], descending
    masses = tl.sum(tl.load(band_mass + parts), axis=0)
    low = tl.full((), float("-inf"), tl.float32)
    high = tl.full((), float("inf"), tl.float32)
    least = total
    if (row_flags & TOP_K) != 0:
        low = tl.max(tl.where(counts >= top_k, edges, float("-inf")))
        high = tl.min(tl.where(counts < top_k, edges, float("inf")))
        least = tl.max(tl.where(counts < top_k, masses, 0))  # what top_k keeps weighs at least this
    if (row_flags & TOP_P) != 0:
        limit = tl.maximum(limit_of(least, top_p), 1)
        high = tl.min(tl.where(masses < limit, edges, float("inf")))
        if (row_flags & TOP_K) == 0:
            low = tl.max(tl.where(masses >= limit, edges, float("-inf")))
    base_count = tl.max(tl.where(edges >= high, counts, 0))
    base_mass = tl.max(tl.where(edges >= high, masses, 0))
    return tl.maximum(low, floor), high, base_count, base_mass


@triton.jit
def _recollect_kernel(
    logits_ptr,  # [P, vocab_size]
    processed_ptr,  # [P, vocab_size] float32
    flags_ptr,  # [R] int32
    temperature_ptr,  # [R] float32
    top_k_ptr,  # [R] int64
    top_p_ptr,  # [R] float32
    row_ptr,  # [num_reqs] int64
    num_samples_ptr,  # [num_reqs] int64
    floor_ptr,  # [P] float32
    part_mass_ptr,  # [P, SPLITS] int64
    edge_ptr,  # [P, BANDS] float32
    band_count_ptr,  # [P, SPLITS, BANDS] int64
    band_mass_ptr,  # [P, SPLITS, BANDS] int64
    num_listed_ptr,  # [P, 2] int32
    listed_score_ptr,  # [P, CAPACITY] float32
    listed_token_ptr,  # [P, CAPACITY] int32
    vocab_size,
    num_blocks,
    WIDTH: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
    BANDS: tl.constexpr,
    FEW: tl.constexpr,
    CAPACITY: tl.constexpr,
):
    place = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    row = tl.load(row_ptr + place // WIDTH)
    row_flags = tl.load(flags_ptr + row)
    if (row_flags & (TOP_K | TOP_P)) == 0:
        return
    if place % WIDTH >= tl.load(num_samples_ptr + place // WIDTH):
        return
    if tl.load(num_listed_ptr + place * 2) <= FEW:
        return
    temperature = tl.load(temperature_ptr + row)
    total = tl.sum(tl.load(part_mass_ptr + place * SPLITS + tl.arange(0, SPLITS)))
    low, high, _, _ = bracket(
        row_flags,
        tl.load(top_k_ptr + row),
        tl.load(top_p_ptr + row),
        tl.load(floor_ptr + place),
        total,
        edge_ptr + place * BANDS,
        band_count_ptr + place * SPLITS * BANDS,
        band_mass_ptr + place * SPLITS * BANDS,
        SPLITS,
        BANDS,
    )
    for block in range(split, num_blocks, SPLITS):
        tokens = block * BLOCK + tl.arange(0, BLOCK)
        inside = tokens < vocab_size
        scores = load_scores(logits_ptr, processed_ptr, place, vocab_size, tokens, inside, row_flags, temperature)
        is_listed = (scores >= low) & (scores < high) & (scores > float("-inf"))
        _append(
            scores,
            tokens,
            is_listed,
            num_listed_ptr + place * 2 + 1,
            listed_score_ptr + place * CAPACITY,
            listed_token_ptr + place * CAPACITY,
            CAPACITY,
        )


def list_candidates(
    logits: Tensor, inputs: Places, params: TruncationParams, scores: ProcessedScores, scratch: TruncationScratch
) -> None:
    """Fill `scratch` for every place in use whose row has TOP_K or TOP_P, and make the cut of rows with MIN_P alone.

    Args:
        logits: [num_reqs * width, vocab_size], of the target model.
        inputs: of this step.
        params: of the rows.
        scores: `processed` is read for rows with PROCESSED flags; cut_value and cut_token are written.
        scratch: for at least as many places.
    """
    num_places, vocab_size = logits.shape
    num_blocks = triton.cdiv(vocab_size, BLOCK)
    num_groups = num_blocks * (BLOCK // GROUP)
    place_args = (inputs.idx_mapping, inputs.num_samples)
    score_args = (logits, scores.processed, params.flags, params.temperature)
    listed = (scratch.num_listed, scratch.listed_score, scratch.listed_token)
    bands = (scratch.edges, scratch.band_count, scratch.band_mass)
    split_grid, width = (num_places, NUM_SPLITS), inputs.width
    _stats_kernel[split_grid](
        *score_args,
        *place_args,
        scratch.part_max,
        scratch.part_sum,
        scratch.group_max,
        scratch.num_listed,
        vocab_size,
        num_blocks,
        WIDTH=width,
        SPLITS=NUM_SPLITS,
        BLOCK=BLOCK,
        GROUP=GROUP,
    )
    _floor_kernel[(num_places,)](
        params.flags,
        params.top_k,
        params.top_p,
        params.log_min_p,
        *place_args,
        scratch.part_max,
        scratch.part_sum,
        scratch.group_max,
        scratch.largest,
        scratch.min_p_floor,
        scratch.floor,
        scratch.edges,
        scores.cut_value,
        scores.cut_token,
        vocab_size,
        num_groups,
        WIDTH=width,
        SPLITS=NUM_SPLITS,
        BLOCK=BLOCK,
        BANDS=NUM_BANDS,
    )
    _collect_kernel[split_grid](
        *score_args,
        *place_args,
        scratch.largest,
        scratch.min_p_floor,
        scratch.floor,
        scratch.part_mass,
        *listed,
        vocab_size,
        num_blocks,
        WIDTH=width,
        SPLITS=NUM_SPLITS,
        BLOCK=BLOCK,
        FEW=scratch.few,
        CAPACITY=scratch.capacity,
    )
    _bracket_kernel[split_grid](
        *score_args,
        *place_args,
        scratch.largest,
        scratch.floor,
        scratch.num_listed,
        *bands,
        vocab_size,
        num_blocks,
        WIDTH=width,
        SPLITS=NUM_SPLITS,
        BLOCK=BLOCK,
        BANDS=NUM_BANDS,
        FEW=scratch.few,
    )
    _recollect_kernel[split_grid](
        *score_args,
        params.top_k,
        params.top_p,
        *place_args,
        scratch.floor,
        scratch.part_mass,
        *bands,
        *listed,
        vocab_size,
        num_blocks,
        WIDTH=width,
        SPLITS=NUM_SPLITS,
        BLOCK=BLOCK,
        BANDS=NUM_BANDS,
        FEW=scratch.few,
        CAPACITY=scratch.capacity,
    )
