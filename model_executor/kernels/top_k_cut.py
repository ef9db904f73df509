"""The cut that min_p and top_k make at a place: a score, and the last token kept among those that have it.

Kept are tokens above the cut score, and those at it with an id up to the cut token: the rules of
`verifier_svc.sampling.truncation`, without a sort. top_p is left to `top_p_draw`, but for rows whose top_k leaves few
tokens: there its cut is made here too. Four kernels; a program of a place that does not need one returns at once.

1. `_stats_kernel` (places x NUM_SPLITS): the largest score, and that of each GROUP tokens for top_k.
2. `_floor_kernel` (places): what min_p keeps, and floors below which nothing can be kept. For top_k: k groups that
   reach it are k different tokens. For top_p: all tokens below it together weigh less than top_p drops.
3. `_collect_kernel` (places x NUM_SPLITS), for top_k: lists the tokens from the floor on.
4. `_cut_kernel` (places), for top_k: counts what stands before each token of a short list. A long one, or all tokens
   where the list has no room for them, is searched for the k-th token, 16 ways a round.

Bytes: the scores once for min_p and top_p, twice for top_k. A list has no order, and nothing depends on one.
"""

# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# Triton's launch syntax and its constexpr values have no types that pyright follows.
from __future__ import annotations

from typing import Final

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
    append,
    key_value,
    limit_of,
    load_scores,
    order_key,
    row_of,
    weigh,
)
from model_executor.kernels.truncation import GROUP, STATS_BLOCK, TruncationParams, TruncationScratch

SHORT: Final = 256
"""A list of up to as many is ranked at once: 256 x 16 comparisons a round, in registers."""

_WAYS: Final = tl.constexpr(16)
_BAND_SPAN: Final = tl.constexpr(32.0)  # the floor of top_k is looked for this far below the largest score
_MAX: Final = tl.constexpr(3.4028234663852886e38)
_LOWEST_KEY: Final = tl.constexpr(-2139095040)  # order_key of -_MAX
_NO_SCORE: Final = tl.constexpr(-2139095041)  # order_key of -inf


@triton.jit
def _stats_kernel(
    logits_ptr,  # [P, vocab_size]
    processed_ptr,  # [P, vocab_size] float32
    flags_ptr,  # [R] int32
    temperature_ptr,  # [R] float32
    row_ptr,  # [num_reqs] int64
    num_samples_ptr,  # [num_reqs] int64
    part_max_ptr,  # [P, SPLITS] float32
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
    row, row_flags = row_of(place, flags_ptr, row_ptr, num_samples_ptr, WIDTH)
    if (row_flags & CUT) == 0:
        return
    temperature = tl.load(temperature_ptr + row)
    largest = tl.full((BLOCK,), float("-inf"), tl.float32)
    groups = tl.arange(0, BLOCK // GROUP)
    for block in range(split, num_blocks, SPLITS):
        tokens = block * BLOCK + tl.arange(0, BLOCK)
        inside = tokens < vocab_size
        scores = load_scores(logits_ptr, processed_ptr, place, vocab_size, tokens, inside, row_flags, temperature)
        scores = tl.where(scores == scores, tl.minimum(scores, _MAX), float("-inf"))
        largest = tl.maximum(largest, scores)
        if (row_flags & TOP_K) != 0:
            best = tl.max(tl.reshape(scores, (BLOCK // GROUP, GROUP)), axis=1)
            tl.store(group_max_ptr + (place * num_blocks + block) * (BLOCK // GROUP) + groups, best)
    tl.store(part_max_ptr + place * SPLITS + split, tl.max(largest))
    if split == 0:
        tl.store(num_listed_ptr + place * 2, 0)
        tl.store(num_listed_ptr + place * 2 + 1, 0)


@triton.jit
def _kth_group_floor(group_max, num_groups, k, largest, BLOCK: tl.constexpr):
    """A score that at least k groups reach, at most 1 / 8 below the k-th largest of them; -inf if it is far below."""
    low = largest - _BAND_SPAN
    step = tl.full((), _BAND_SPAN / _WAYS, tl.float32)
    floor = tl.full((), float("-inf"), tl.float32)
    for _ in tl.static_range(2):
        edges = low + step * tl.arange(0, _WAYS).to(tl.float32)
        counts = tl.zeros((_WAYS,), dtype=tl.int32)
        for first in range(0, num_groups, BLOCK):
            group = first + tl.arange(0, BLOCK)
            best = tl.load(group_max + group, mask=group < num_groups, other=float("-inf"))
            counts += tl.sum((best[:, None] >= edges[None, :]).to(tl.int32), axis=0)
        reached = tl.max(tl.where(counts >= k, edges, float("-inf")))
        floor = tl.maximum(floor, reached)
        low = tl.where(reached > float("-inf"), reached, low)
        step = step / _WAYS
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
    group_max_ptr,  # [P, num_groups] float32
    largest_ptr,  # [P] float32
    floor_ptr,  # [P] float32
    total_ptr,  # [P] int64
    cut_value_ptr,  # [P] float32
    cut_token_ptr,  # [P] int32
    vocab_size,
    num_groups,
    WIDTH: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    place = tl.program_id(0).to(tl.int64)
    row, row_flags = row_of(place, flags_ptr, row_ptr, num_samples_ptr, WIDTH)
    if (row_flags & CUT) == 0:
        return
    part_max = tl.load(part_max_ptr + place * SPLITS + tl.arange(0, SPLITS))
    largest = tl.maximum(tl.max(part_max), -_MAX)  # finite, also where no token is
    floor = tl.full((), float("-inf"), tl.float32)
    if (row_flags & MIN_P) != 0:
        floor = largest + tl.load(log_min_p_ptr + row)
    cut_value = floor
    if (row_flags & (TOP_K | TOP_P)) == TOP_P:
        # The largest token alone weighs 1 and top_p drops 1 - top_p of the whole; one half is room for rounding.
        cut_value = tl.maximum(floor, largest + tl.log(0.5 * (1.0 - tl.load(top_p_ptr + row)) / vocab_size))
    tl.store(cut_value_ptr + place, cut_value)  # all that a row without top_k needs
    tl.store(cut_token_ptr + place, vocab_size)
    tl.store(largest_ptr + place, largest)
    tl.store(total_ptr + place, -1)
    if (row_flags & TOP_K) != 0:
        top_k = tl.load(top_k_ptr + row)
        floor = tl.maximum(
            floor, _kth_group_floor(group_max_ptr + place * num_groups, num_groups, top_k, largest, BLOCK)
        )
    tl.store(floor_ptr + place, floor)


@triton.jit
def _ranking_key(scores, tokens, TOKEN_BITS: tl.constexpr):
    """int64 that stands for a token in the ranking: the largest is first, no two are equal."""
    return (order_key(scores).to(tl.int64) << TOKEN_BITS) + ((1 << TOKEN_BITS) - 1 - tokens)


@triton.jit
def _key_score(key, TOKEN_BITS: tl.constexpr):
    return key_value((key >> TOKEN_BITS).to(tl.int32))


@triton.jit
def _collect_kernel(
    logits_ptr,  # [P, vocab_size]
    processed_ptr,  # [P, vocab_size] float32
    flags_ptr,  # [R] int32
    temperature_ptr,  # [R] float32
    row_ptr,  # [num_reqs] int64
    num_samples_ptr,  # [num_reqs] int64
    floor_ptr,  # [P] float32
    num_listed_ptr,  # [P, 2] int32
    listed_ptr,  # [P, CAPACITY] int64
    vocab_size,
    num_blocks,
    WIDTH: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
    CAPACITY: tl.constexpr,
    TOKEN_BITS: tl.constexpr,
):
    place = tl.program_id(0).to(tl.int64)
    row, row_flags = row_of(place, flags_ptr, row_ptr, num_samples_ptr, WIDTH)
    if (row_flags & TOP_K) == 0:
        return
    temperature = tl.load(temperature_ptr + row)
    floor = tl.load(floor_ptr + place)
    for block in range(tl.program_id(1), num_blocks, SPLITS):
        tokens = block * BLOCK + tl.arange(0, BLOCK)
        inside = tokens < vocab_size
        scores = load_scores(logits_ptr, processed_ptr, place, vocab_size, tokens, inside, row_flags, temperature)
        is_listed = (scores >= floor) & (scores > float("-inf"))
        keys = _ranking_key(scores, tokens, TOKEN_BITS)
        append(keys, is_listed, num_listed_ptr + place * 2, listed_ptr + place * CAPACITY, CAPACITY)


@triton.jit
def _load_keys(
    first,
    listed,
    is_listed,
    length,
    logits_ptr,
    processed_ptr,
    place,
    vocab_size,
    row_flags,
    temperature,
    BLOCK: tl.constexpr,
    TOKEN_BITS: tl.constexpr,
):
    """Keys [BLOCK] of the list from `first` on, or of all tokens; below all others where there is no number."""
    index = first + tl.arange(0, BLOCK)
    inside = index < length
    if is_listed:
        keys = tl.load(listed + index, mask=inside, other=_NO_SCORE << TOKEN_BITS)
    else:
        scores = load_scores(logits_ptr, processed_ptr, place, vocab_size, index, inside, row_flags, temperature)
        keys = tl.where(scores > float("-inf"), _ranking_key(scores, index, TOKEN_BITS), _NO_SCORE << TOKEN_BITS)
    return keys


@triton.jit
def _cut_kernel(
    logits_ptr,  # [P, vocab_size]
    processed_ptr,  # [P, vocab_size] float32
    flags_ptr,  # [R] int32
    temperature_ptr,  # [R] float32
    top_k_ptr,  # [R] int64
    top_p_ptr,  # [R] float32
    row_ptr,  # [num_reqs] int64
    num_samples_ptr,  # [num_reqs] int64
    largest_ptr,  # [P] float32
    floor_ptr,  # [P] float32
    total_ptr,  # [P] int64
    num_listed_ptr,  # [P, 2] int32
    listed_ptr,  # [P, CAPACITY] int64
    cut_value_ptr,  # [P] float32
    cut_token_ptr,  # [P] int32
    vocab_size,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    SHORT: tl.constexpr,
    CAPACITY: tl.constexpr,
    TOKEN_BITS: tl.constexpr,
):
    place = tl.program_id(0).to(tl.int64)
    row, row_flags = row_of(place, flags_ptr, row_ptr, num_samples_ptr, WIDTH)
    if (row_flags & TOP_K) == 0:
        return
    top_k = tl.load(top_k_ptr + row)
    top_p = tl.load(top_p_ptr + row)
    largest = tl.load(largest_ptr + place)
    length = tl.load(num_listed_ptr + place * 2)
    listed = listed_ptr + place * CAPACITY
    ways = tl.arange(0, _WAYS)
    if (length <= SHORT) & (length <= CAPACITY):
        index = tl.arange(0, SHORT)
        keys = tl.load(listed + index, mask=index < length, other=_NO_SCORE << TOKEN_BITS)
        num_before = tl.zeros((SHORT, _WAYS), dtype=tl.int32)
        mass_before = tl.zeros((SHORT, _WAYS), dtype=tl.int64)
        for first in range(0, length, _WAYS):
            others = tl.load(listed + first + ways, mask=first + ways < length, other=_NO_SCORE << TOKEN_BITS)
            is_before = others[None, :] > keys[:, None]
            num_before += is_before.to(tl.int32)
            mass_before += tl.where(is_before, weigh(_key_score(others, TOKEN_BITS), largest)[None, :], 0)
        is_kept = (index < length) & (tl.sum(num_before, axis=1) < top_k)
        if (row_flags & TOP_P) != 0:
            total = tl.sum(tl.where(is_kept, weigh(_key_score(keys, TOKEN_BITS), largest), 0))
            is_kept = is_kept & (tl.sum(mass_before, axis=1) < limit_of(total, top_p))
        cut = tl.min(tl.where(is_kept, keys, 1 << 62))
        tl.store(total_ptr + place, 0)
    else:
        # The ranking ends at `cut`, which k tokens reach, and not at `above`. Where min_p has left fewer than k tokens,
        # `cut` stays where it is: all of them stay.
        temperature = tl.load(temperature_ptr + row)
        is_listed = length <= CAPACITY
        length = tl.where(is_listed, length, vocab_size)
        floor_key = tl.maximum(order_key(tl.load(floor_ptr + place)), _LOWEST_KEY)
        cut = floor_key.to(tl.int64) << TOKEN_BITS
        above = (order_key(largest).to(tl.int64) + 1) << TOKEN_BITS
        num_reached = tl.full((), 0, tl.int32) + vocab_size
        while (num_reached > top_k) & (above - cut > 1):
            edges = cut + (above - cut) * ways // _WAYS
            counts = tl.zeros((BLOCK, _WAYS), dtype=tl.int32)
            for first in range(0, length, BLOCK):
                chunk = _load_keys(
                    first, listed, is_listed, length, logits_ptr, processed_ptr, place, vocab_size, row_flags,
                    temperature, BLOCK, TOKEN_BITS,
                )  # fmt: skip
                counts += (chunk[:, None] >= edges[None, :]).to(tl.int32)
            count = tl.sum(counts, axis=0)
            is_reached = (count >= top_k) | (ways == 0)
            num_reached = tl.min(tl.where(is_reached, count, vocab_size))
            above = tl.min(tl.where(is_reached, above, edges))
            cut = tl.max(tl.where(is_reached, edges, cut))
        if (row_flags & TOP_P) != 0:
            mass = tl.zeros((BLOCK,), dtype=tl.int64)
            for first in range(0, length, BLOCK):
                chunk = _load_keys(
                    first, listed, is_listed, length, logits_ptr, processed_ptr, place, vocab_size, row_flags,
                    temperature, BLOCK, TOKEN_BITS,
                )  # fmt: skip
                mass += tl.where(chunk >= cut, weigh(_key_score(chunk, TOKEN_BITS), largest), 0)
            tl.store(total_ptr + place, tl.maximum(tl.sum(mass), 1))
    tl.store(cut_value_ptr + place, _key_score(cut, TOKEN_BITS))
    tl.store(cut_token_ptr + place, ((1 << TOKEN_BITS) - 1 - (cut & ((1 << TOKEN_BITS) - 1))).to(tl.int32))


def top_k_cut(
    logits: Tensor,
    inputs: Places,
    params: TruncationParams,
    scores: ProcessedScores,
    scratch: TruncationScratch,
    short: int = SHORT,
) -> None:
    """The cut of every place in use whose row has MIN_P, TOP_K or TOP_P; other places are left as they are.

    Args:
        logits: [num_reqs * width, vocab_size], of the target model.
        inputs: of this step.
        params: of the rows.
        scores: `processed` is read for rows with PROCESSED flags; cut_value and cut_token are written.
        scratch: for at least as many places.
        short: longest list that is ranked at once, a power of two.
    """
    num_places, vocab_size = logits.shape
    num_blocks = triton.cdiv(vocab_size, STATS_BLOCK)
    place_args = (inputs.idx_mapping, inputs.num_samples)
    score_args = (logits, scores.processed, params.flags, params.temperature)
    width, split_grid = inputs.width, (num_places, NUM_SPLITS)
    capacity, token_bits = scratch.listed.shape[1], max(vocab_size - 1, 1).bit_length()
    _stats_kernel[split_grid](
        *score_args,
        *place_args,
        scratch.part_max,
        scratch.group_max,
        scratch.num_listed,
        vocab_size,
        num_blocks,
        WIDTH=width,
        SPLITS=NUM_SPLITS,
        BLOCK=STATS_BLOCK,
        GROUP=GROUP,
    )
    _floor_kernel[(num_places,)](
        params.flags,
        params.top_k,
        params.top_p,
        params.log_min_p,
        *place_args,
        scratch.part_max,
        scratch.group_max,
        scratch.largest,
        scratch.floor,
        scratch.total,
        scores.cut_value,
        scores.cut_token,
        vocab_size,
        scratch.group_max.shape[1],
        WIDTH=width,
        SPLITS=NUM_SPLITS,
        BLOCK=1024,
        num_warps=8,
    )
    _collect_kernel[split_grid](
        *score_args,
        *place_args,
        scratch.floor,
        scratch.num_listed,
        scratch.listed,
        vocab_size,
        triton.cdiv(vocab_size, 1024),
        WIDTH=width,
        SPLITS=NUM_SPLITS,
        BLOCK=1024,
        CAPACITY=capacity,
        TOKEN_BITS=token_bits,
    )
    _cut_kernel[(num_places,)](
        *score_args,
        params.top_k,
        params.top_p,
        *place_args,
        scratch.largest,
        scratch.floor,
        scratch.total,
        scratch.num_listed,
        scratch.listed,
        scores.cut_value,
        scores.cut_token,
        vocab_size,
        WIDTH=width,
        BLOCK=512,
        SHORT=short,
        CAPACITY=capacity,
        TOKEN_BITS=token_bits,
        num_warps=8,
    )
