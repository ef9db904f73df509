"""top_p after the draw: does the drawn token stand inside the nucleus?

Kept tokens are a prefix of the ranking, and the noise is fixed. So a token that is the best of a longer prefix, and
that top_p keeps, is the best of what top_p keeps. One that top_p drops says that it drops all behind it too: the draw
is repeated among the tokens that stand before it. What stands before a drawn token weighs a uniform share of what it
was drawn from, so this takes about ln(1 / top_p) more draws on average. The first token of the ranking is always kept,
so this ends. Two kernels; a program of a place that does not need one returns at once.

1. `_check_kernel` (places x NUM_SPLITS): what stands before the drawn token weighs, and all that is kept if `top_k_cut`
   has not summed it; lists groups of four tokens with one that stands before. Bytes: the scores once.
2. `_redraw_kernel` (places): compares the two, and draws again alone, over the list, or over all tokens where it has no
   room for them.

Weights are integers (`sampling_scores.weigh`), so that no order of summation changes them.
"""

# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false, reportOptionalMemberAccess=false
# Triton's launch syntax and its constexpr values have no types that pyright follows.
from __future__ import annotations

from typing import Final

import triton
import triton.language as tl
from torch import Tensor

from model_executor.kernels.gumbel_noise import gumbel_of, noise_words, uniform_of
from model_executor.kernels.sampling_scores import (
    NUM_SPLITS,
    TOP_P,
    Places,
    ProcessedScores,
    append,
    limit_of,
    load_scores,
    row_of,
    weigh,
)
from model_executor.kernels.truncation import TruncationParams, TruncationScratch

_CHECK_GROUPS: Final = 256  # of four tokens, as the noise has them
_DRAW_GROUPS: Final = 1024
_NO_TOKEN: Final = tl.constexpr(0x7FFFFFFF)


@triton.jit
def _best_draw(values, tokens, num_slots, SLOTS: tl.constexpr):
    """Best value of a place and its token, as `commit_tokens` takes them: of equal ones the lowest."""
    slot = tl.arange(0, SLOTS)
    value = tl.load(values + slot, mask=slot < num_slots, other=float("-inf"))
    token = tl.load(tokens + slot, mask=slot < num_slots, other=_NO_TOKEN)
    best = tl.max(value)
    return best, tl.min(tl.where(value == best, token, _NO_TOKEN))


@triton.jit
def _stands_before(scores, tokens, pivot_score, pivot):
    """Whether tokens stand before the pivot in the ranking."""
    return (scores > pivot_score) | ((scores == pivot_score) & (tokens < pivot))


@triton.jit
def _check_kernel(
    logits_ptr,  # [P, vocab_size]
    processed_ptr,  # [P, vocab_size] float32
    flags_ptr,  # [R] int32
    temperature_ptr,  # [R] float32
    row_ptr,  # [num_reqs] int64
    num_samples_ptr,  # [num_reqs] int64
    floor_ptr,  # [P] float32
    largest_ptr,  # [P] float32
    total_ptr,  # [P] int64
    value_ptr,  # [P, num_slots] float32
    token_ptr,  # [P, num_slots] int32
    part_mass_ptr,  # [P, SPLITS, 2] int64
    num_listed_ptr,  # [P, 2] int32
    listed_ptr,  # [P, CAPACITY] int64
    vocab_size,
    num_slots,
    WIDTH: tl.constexpr,
    SPLITS: tl.constexpr,
    SLOTS: tl.constexpr,
    GROUPS: tl.constexpr,
    CAPACITY: tl.constexpr,
):
    place = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    row, row_flags = row_of(place, flags_ptr, row_ptr, num_samples_ptr, WIDTH)
    if (row_flags & TOP_P) == 0:
        return
    known_total = tl.load(total_ptr + place)
    if known_total == 0:  # the cut is that of top_p already
        return
    temperature = tl.load(temperature_ptr + row)
    floor = tl.load(floor_ptr + place)  # what rows without top_k keep
    largest = tl.load(largest_ptr + place)
    _, pivot = _best_draw(value_ptr + place * num_slots, token_ptr + place * num_slots, num_slots, SLOTS)
    pivot_score = load_scores(
        logits_ptr, processed_ptr, place, vocab_size, pivot, pivot < vocab_size, row_flags, temperature
    )
    mass_before = tl.zeros((GROUPS, 4), dtype=tl.int64)
    total = tl.zeros((GROUPS, 4), dtype=tl.int64)
    for first in range(split * GROUPS, (vocab_size + 3) // 4, SPLITS * GROUPS):
        groups = first + tl.arange(0, GROUPS)
        tokens = groups[:, None] * 4 + tl.arange(0, 4)[None, :]
        inside = tokens < vocab_size
        scores = load_scores(logits_ptr, processed_ptr, place, vocab_size, tokens, inside, row_flags, temperature)
        weights = weigh(scores, largest)
        is_before = _stands_before(scores, tokens, pivot_score, pivot)
        mass_before += tl.where(is_before, weights, 0)
        if known_total < 0:
            total += tl.where(scores >= floor, weights, 0)
        has_before = tl.max(is_before.to(tl.int32), axis=1) > 0
        append(groups, has_before, num_listed_ptr + place * 2 + 1, listed_ptr + place * CAPACITY, CAPACITY)
    part = part_mass_ptr + (place * SPLITS + split) * 2
    tl.store(part, tl.sum(mass_before))
    tl.store(part + 1, tl.sum(total))


@triton.jit
def _load_groups(
    first,
    listed,
    is_listed,
    num_groups,
    logits_ptr,
    processed_ptr,
    place,
    vocab_size,
    row_flags,
    temperature,
    GROUPS: tl.constexpr,
):
    """Groups [GROUPS] of the list from `first` on, or of all; tokens and scores [GROUPS, 4], -inf behind the end."""
    index = first + tl.arange(0, GROUPS)
    inside = index < num_groups
    groups = index
    if is_listed:
        groups = tl.load(listed + index, mask=inside, other=0).to(tl.int32)
    tokens = groups[:, None] * 4 + tl.arange(0, 4)[None, :]
    inside = inside[:, None] & (tokens < vocab_size)
    scores = load_scores(logits_ptr, processed_ptr, place, vocab_size, tokens, inside, row_flags, temperature)
    return groups, tokens, scores


@triton.jit
def _redraw_kernel(
    logits_ptr,  # [P, vocab_size]
    processed_ptr,  # [P, vocab_size] float32
    flags_ptr,  # [R] int32
    temperature_ptr,  # [R] float32
    top_p_ptr,  # [R] float32
    seed_ptr,  # [R] int64
    committed_len_ptr,  # [R] int64
    row_ptr,  # [num_reqs] int64
    num_samples_ptr,  # [num_reqs] int64
    largest_ptr,  # [P] float32
    total_ptr,  # [P] int64
    part_mass_ptr,  # [P, SPLITS, 2] int64
    num_listed_ptr,  # [P, 2] int32
    listed_ptr,  # [P, CAPACITY] int64
    value_ptr,  # [P, num_slots] float32
    token_ptr,  # [P, num_slots] int32
    vocab_size,
    num_slots,
    WIDTH: tl.constexpr,
    SPLITS: tl.constexpr,
    SLOTS: tl.constexpr,
    GROUPS: tl.constexpr,
    CAPACITY: tl.constexpr,
):
    place = tl.program_id(0).to(tl.int64)
    row, row_flags = row_of(place, flags_ptr, row_ptr, num_samples_ptr, WIDTH)
    if (row_flags & TOP_P) == 0:
        return
    total = tl.load(total_ptr + place)
    if total == 0:
        return
    part = part_mass_ptr + (place * SPLITS + tl.arange(0, SPLITS)) * 2
    mass_before = tl.sum(tl.load(part))
    part_total = tl.sum(tl.load(part + 1))
    limit = limit_of(tl.where(total < 0, part_total, total), tl.load(top_p_ptr + row))
    if mass_before < limit:
        return
    temperature = tl.load(temperature_ptr + row)
    largest = tl.load(largest_ptr + place)
    seed = tl.load(seed_ptr + row)
    position = tl.load(committed_len_ptr + row) + place % WIDTH
    listed = listed_ptr + place * CAPACITY
    num_groups = tl.load(num_listed_ptr + place * 2 + 1)
    is_listed = num_groups <= CAPACITY
    num_groups = tl.where(is_listed, num_groups, (vocab_size + 3) // 4)
    values, tokens = value_ptr + place * num_slots, token_ptr + place * num_slots
    best, pivot = _best_draw(values, tokens, num_slots, SLOTS)
    pivot_score = load_scores(
        logits_ptr, processed_ptr, place, vocab_size, pivot, pivot < vocab_size, row_flags, temperature
    )
    while mass_before >= limit:
        best_values = tl.full((GROUPS, 4), float("-inf"), tl.float32)
        best_tokens = tl.full((GROUPS, 4), _NO_TOKEN, tl.int32)
        for first in range(0, num_groups, GROUPS):
            groups, candidates, scores = _load_groups(
                first, listed, is_listed, num_groups, logits_ptr, processed_ptr, place, vocab_size, row_flags,
                temperature, GROUPS,
            )  # fmt: skip
            is_before = _stands_before(scores, candidates, pivot_score, pivot)
            if tl.max(is_before.to(tl.int32)) > 0:
                drawn = scores + gumbel_of(uniform_of(noise_words(seed, position, groups)))
                is_better = (drawn > best_values) | ((drawn == best_values) & (candidates < best_tokens))
                is_better = is_better & is_before
                best_values = tl.where(is_better, drawn, best_values)
                best_tokens = tl.where(is_better, candidates, best_tokens)
        best = tl.max(best_values)
        pivot = tl.min(tl.where(best_values == best, best_tokens, _NO_TOKEN))
        pivot_score = load_scores(
            logits_ptr, processed_ptr, place, vocab_size, pivot, pivot < vocab_size, row_flags, temperature
        )
        mass = tl.zeros((GROUPS, 4), dtype=tl.int64)
        for first in range(0, num_groups, GROUPS):
            groups, candidates, scores = _load_groups(
                first, listed, is_listed, num_groups, logits_ptr, processed_ptr, place, vocab_size, row_flags,
                temperature, GROUPS,
            )  # fmt: skip
            is_before = _stands_before(scores, candidates, pivot_score, pivot)
            mass += tl.where(is_before, weigh(scores, largest), 0)
        mass_before = tl.where(best > float("-inf"), tl.sum(mass), 0)  # no way to go on for ever
    slot = tl.arange(0, SLOTS)
    tl.store(values + slot, tl.where(slot == 0, best, float("-inf")), mask=slot < num_slots)
    tl.store(tokens, tl.minimum(pivot, vocab_size - 1))


def top_p_draw(
    logits: Tensor,
    inputs: Places,
    params: TruncationParams,
    seed: Tensor,
    committed_len: Tensor,
    scores: ProcessedScores,
    scratch: TruncationScratch,
    values: Tensor,
    tokens: Tensor,
) -> None:
    """Replace the draw of every place in use whose row has TOP_P and whose drawn token top_p drops.

    Args:
        logits: [num_reqs * width, vocab_size], of the target model.
        inputs: of this step.
        params: of the rows.
        seed, committed_len: [R] int64, as in `gumbel_argmax`.
        scores: as `top_k_cut` left them.
        scratch: as `top_k_cut` left it.
        values: [num_reqs * width, num_slots] float32, as `gumbel_argmax` left them; where the draw is replaced,
            the first one is that of the new token, and the others are -inf.
        tokens: [num_reqs * width, num_slots] int32.
    """
    num_places, vocab_size = logits.shape
    num_slots = values.shape[1]
    score_args = (logits, scores.processed, params.flags, params.temperature)
    place_args = (inputs.idx_mapping, inputs.num_samples)
    listed = (scratch.num_listed, scratch.listed)
    slots, capacity = triton.next_power_of_2(num_slots), scratch.listed.shape[1]
    _check_kernel[(num_places, NUM_SPLITS)](
        *score_args,
        *place_args,
        scratch.floor,
        scratch.largest,
        scratch.total,
        values,
        tokens,
        scratch.part_mass,
        *listed,
        vocab_size,
        num_slots,
        WIDTH=inputs.width,
        SPLITS=NUM_SPLITS,
        SLOTS=slots,
        GROUPS=_CHECK_GROUPS,
        CAPACITY=capacity,
    )
    _redraw_kernel[(num_places,)](
        *score_args,
        params.top_p,
        seed,
        committed_len,
        *place_args,
        scratch.largest,
        scratch.total,
        scratch.part_mass,
        *listed,
        values,
        tokens,
        vocab_size,
        num_slots,
        WIDTH=inputs.width,
        SPLITS=NUM_SPLITS,
        SLOTS=slots,
        GROUPS=_DRAW_GROUPS,
        CAPACITY=capacity,
        num_warps=8,
    )
