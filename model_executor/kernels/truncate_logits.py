"""The cut that min_p, top_k and top_p make at a place: a score, and the last token kept among those that have it.

Kept are tokens above the cut score, and those at it with an id up to the cut token: the rules of
`verifier_svc.sampling.truncation`, without a sort. Only rows that truncate pay; the others' programs return at once.

`truncation_candidates` lists the tokens that may be next to the cut. `_cut_kernel` (places) searches them by the
integer order of floats, 16 ways a round. A list that is too long even so (thousands of equal scores) is read from the
scores themselves.

A token weighs exp(score - largest) in units of 2^-40, so sums are integers: no order of summation changes them, and a
place's result depends on its own scores alone.
"""

# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
# Triton's launch syntax and its constexpr values have no types that pyright follows.
from __future__ import annotations

from typing import Final

import triton
import triton.language as tl
from torch import Tensor

from model_executor.kernels.sampling_scores import (
    NUM_SPLITS,
    TOP_K,
    TOP_P,
    Places,
    ProcessedScores,
    key_value,
    load_scores,
    order_key,
)
from model_executor.kernels.truncation_candidates import (
    BLOCK,
    NUM_BANDS,
    TruncationParams,
    TruncationScratch,
    bracket,
    limit_of,
    list_candidates,
    weigh,
)

_LOWEST_KEY: Final = tl.constexpr(-2139095040)  # order_key of the lowest finite float32
_COUNT: Final = tl.constexpr(0)
_MASS: Final = tl.constexpr(1)
_IDS: Final = tl.constexpr(2)


@triton.jit
def _listed_sums(
    edges,
    logits_ptr,
    processed_ptr,
    listed_score,
    listed_token,
    place,
    vocab_size,
    row_flags,
    temperature,
    low,
    high,
    largest,
    is_listed,
    length,
    equal_key,
    WHAT: tl.constexpr,
    BLOCK: tl.constexpr,
    BANDS: tl.constexpr,
):
    """Over the list, or over all tokens with scores in [low, high), for each of the edges [BANDS]:

    COUNT: how many keys reach it; MASS: what these weigh; IDS: how many tokens at `equal_key` have an id up to it.
    """
    edges = edges.to(tl.int32)
    sums = tl.zeros((BANDS,), dtype=tl.int64)
    for first in range(0, length, BLOCK):
        index = first + tl.arange(0, BLOCK)
        inside = index < length
        if is_listed:
            scores = tl.load(listed_score + index, mask=inside, other=float("-inf"))
            tokens = tl.load(listed_token + index, mask=inside, other=0)
        else:
            scores = load_scores(logits_ptr, processed_ptr, place, vocab_size, index, inside, row_flags, temperature)
            scores = tl.where((scores >= low) & (scores < high), scores, float("-inf"))
            tokens = index
        keys = order_key(scores)
        if WHAT == _IDS:
            hit = (keys == equal_key)[:, None] & (tokens[:, None] <= edges[None, :])
            sums += tl.sum(hit.to(tl.int32), axis=0)
        elif WHAT == _MASS:
            weights = weigh(scores, largest)
            sums += tl.sum(tl.where(keys[:, None] >= edges[None, :], weights[:, None], 0), axis=0)
        else:
            sums += tl.sum((keys[:, None] >= edges[None, :]).to(tl.int32), axis=0)
    return sums


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
    part_mass_ptr,  # [P, SPLITS] int64
    edge_ptr,  # [P, BANDS] float32
    band_count_ptr,  # [P, SPLITS, BANDS] int64
    band_mass_ptr,  # [P, SPLITS, BANDS] int64
    num_listed_ptr,  # [P, 2] int32
    listed_score_ptr,  # [P, CAPACITY] float32
    listed_token_ptr,  # [P, CAPACITY] int32
    cut_value_ptr,  # [P] float32
    cut_token_ptr,  # [P] int32
    vocab_size,
    WIDTH: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
    BANDS: tl.constexpr,
    FEW: tl.constexpr,
    CAPACITY: tl.constexpr,
):
    place = tl.program_id(0).to(tl.int64)
    row = tl.load(row_ptr + place // WIDTH)
    row_flags = tl.load(flags_ptr + row)
    if (row_flags & (TOP_K | TOP_P)) == 0:
        return
    if place % WIDTH >= tl.load(num_samples_ptr + place // WIDTH):
        return
    temperature = tl.load(temperature_ptr + row)
    top_k = tl.load(top_k_ptr + row)
    top_p = tl.load(top_p_ptr + row)
    largest = tl.load(largest_ptr + place)
    low = tl.load(floor_ptr + place)
    high = tl.full((), float("inf"), tl.float32)
    total = tl.sum(tl.load(part_mass_ptr + place * SPLITS + tl.arange(0, SPLITS)))
    base_count = tl.full((), 0, tl.int64)  # of tokens at `high` and above, which the list leaves out
    base_mass = tl.full((), 0, tl.int64)
    length = tl.load(num_listed_ptr + place * 2)
    is_listed = length <= FEW
    if length > FEW:
        low, high, base_count, base_mass = bracket(
            row_flags,
            top_k,
            top_p,
            low,
            total,
            edge_ptr + place * BANDS,
            band_count_ptr + place * SPLITS * BANDS,
            band_mass_ptr + place * SPLITS * BANDS,
            SPLITS,
            BANDS,
        )
        length = tl.load(num_listed_ptr + place * 2 + 1)
        is_listed = length <= CAPACITY
    length = tl.where(is_listed, length, vocab_size)
    scores = listed_score_ptr + place * CAPACITY
    tokens = listed_token_ptr + place * CAPACITY
    ways = tl.arange(0, BANDS)

    # Keys of the tokens of the list are in [key, top); `key` becomes the cut. A search keeps an edge that is reached
    # and one that is not. `edges` of the last look are the cut and the next key above it.
    key = tl.maximum(order_key(low).to(tl.int64), _LOWEST_KEY)
    top = tl.minimum(order_key(largest).to(tl.int64) + 1, order_key(high).to(tl.int64))
    num_kept = tl.full((), 0, tl.int64)  # tokens kept among those at the cut
    num_equal = tl.full((), 0, tl.int64)
    limit = limit_of(total, top_p)
    if (row_flags & TOP_K) != 0:
        # The largest key that k tokens reach. Where min_p has left fewer than k, the lowest: all of them stay.
        above = top
        while above - key > 1:
            edges = key + (above - key) * ways // BANDS
            sums = _listed_sums(
                edges, logits_ptr, processed_ptr, scores, tokens, place, vocab_size, row_flags, temperature,
                low, high, largest, is_listed, length, 0, _COUNT, BLOCK, BANDS,
            )  # fmt: skip
            is_reached = (sums + base_count >= top_k) | (ways == 0)
            above = tl.min(tl.where(is_reached, above, edges))
            key = tl.max(tl.where(is_reached, edges, key))
        edges = key + tl.minimum(ways, 1)
        sums = base_count + _listed_sums(
            edges, logits_ptr, processed_ptr, scores, tokens, place, vocab_size, row_flags, temperature,
            low, high, largest, is_listed, length, 0, _COUNT, BLOCK, BANDS,
        )  # fmt: skip
        num_equal = tl.max(sums) - tl.min(sums)
        num_kept = tl.minimum(num_equal, top_k - tl.min(sums))
        if (row_flags & TOP_P) != 0:
            masses = base_mass + _listed_sums(
                edges, logits_ptr, processed_ptr, scores, tokens, place, vocab_size, row_flags, temperature,
                low, high, largest, is_listed, length, 0, _MASS, BLOCK, BANDS,
            )  # fmt: skip
            weight = (tl.max(masses) - tl.min(masses)) // tl.maximum(num_equal, 1)
            limit = limit_of(tl.min(masses) + num_kept * weight, top_p)
    if (row_flags & TOP_P) != 0:
        # The largest key where what stands at it and above weighs as much as top_p asks for.
        above = top
        while above - key > 1:
            edges = key + (above - key) * ways // BANDS
            masses = base_mass + _listed_sums(
                edges, logits_ptr, processed_ptr, scores, tokens, place, vocab_size, row_flags, temperature,
                low, high, largest, is_listed, length, 0, _MASS, BLOCK, BANDS,
            )  # fmt: skip
            is_reached = (masses >= limit) | (ways == 0)
            above = tl.min(tl.where(is_reached, above, edges))
            key = tl.max(tl.where(is_reached, edges, key))
        edges = key + tl.minimum(ways, 1)
        sums = _listed_sums(
            edges, logits_ptr, processed_ptr, scores, tokens, place, vocab_size, row_flags, temperature,
            low, high, largest, is_listed, length, 0, _COUNT, BLOCK, BANDS,
        )  # fmt: skip
        masses = base_mass + _listed_sums(
            edges, logits_ptr, processed_ptr, scores, tokens, place, vocab_size, row_flags, temperature,
            low, high, largest, is_listed, length, 0, _MASS, BLOCK, BANDS,
        )  # fmt: skip
        num_equal = tl.max(sums) - tl.min(sums)
        weight = tl.maximum((tl.max(masses) - tl.min(masses)) // tl.maximum(num_equal, 1), 1)
        num_kept = tl.minimum(tl.maximum((limit - tl.min(masses) + weight - 1) // weight, 1), num_equal)

    # The lowest ids of equal scores stay.
    last = tl.full((), 0, tl.int64) + vocab_size - 1
    if num_kept < num_equal:
        before = tl.full((), -1, tl.int64)
        while last - before > 1:
            edges = before + ((last - before) * (ways + 1) + BANDS - 1) // BANDS
            sums = _listed_sums(
                edges, logits_ptr, processed_ptr, scores, tokens, place, vocab_size, row_flags, temperature,
                low, high, largest, is_listed, length, key, _IDS, BLOCK, BANDS,
            )  # fmt: skip
            is_reached = sums >= num_kept
            before = tl.max(tl.where(is_reached, before, edges))
            last = tl.min(tl.where(is_reached, edges, last))
    tl.store(cut_value_ptr + place, key_value(key.to(tl.int32)))
    tl.store(cut_token_ptr + place, last.to(tl.int32))


def truncate_logits(
    logits: Tensor, inputs: Places, params: TruncationParams, scores: ProcessedScores, scratch: TruncationScratch
) -> None:
    """The cut of every place in use whose row has MIN_P, TOP_K or TOP_P; other places are left as they are.

    Args:
        logits: [num_reqs * width, vocab_size], of the target model.
        inputs: of this step.
        params: of the rows.
        scores: `processed` is read for rows with PROCESSED flags; cut_value and cut_token are written.
        scratch: for at least as many places.
    """
    num_places, vocab_size = logits.shape
    list_candidates(logits, inputs, params, scores, scratch)
    _cut_kernel[(num_places,)](
        logits,
        scores.processed,
        params.flags,
        params.temperature,
        params.top_k,
        params.top_p,
        inputs.idx_mapping,
        inputs.num_samples,
        scratch.largest,
        scratch.floor,
        scratch.part_mass,
        scratch.edges,
        scratch.band_count,
        scratch.band_mass,
        scratch.num_listed,
        scratch.listed_score,
        scratch.listed_token,
        scores.cut_value,
        scores.cut_token,
        vocab_size,
        WIDTH=inputs.width,
        SPLITS=NUM_SPLITS,
        BLOCK=BLOCK,
        BANDS=NUM_BANDS,
        FEW=scratch.few,
        CAPACITY=scratch.capacity,
        num_warps=8,
    )
