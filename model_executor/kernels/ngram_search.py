"""n-gram search over the rows' own tokens, on the device.

A program owns (row, split of the text) and looks for the last tokens of the row at every position of its split. Length
and position of a match make one number, so that one atomic maximum per program finds the longest match, and the most
recent one among equals, whatever the order of programs.

Grid: num_reqs x num_splits. Bytes: 4 a token of real text; a split beyond the end of its row does nothing.
The rules are those of `drafter_svc.methods.ngram`, which is the reference.
"""

# pyright: reportCallIssue=false, reportArgumentType=false
# Triton's launch syntax and its constexpr values have no types that pyright follows.
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_TILE = 1024
_TILES_PER_SPLIT = 4


@triton.jit
def _ngram_search_kernel(
    token_ids_ptr,  # [R, max_model_len] int32
    committed_len_ptr,  # [R] int64
    finished_ptr,  # [R] bool
    row_ptr,  # [num_reqs] int64
    best_ptr,  # [num_reqs] int64
    row_stride,
    LONGEST: tl.constexpr,
    SHORTEST: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
):
    entry = tl.program_id(0)
    split = tl.program_id(1)
    row = tl.load(row_ptr + entry)
    length = tl.load(committed_len_ptr + row)
    start = split * TILE * TILES
    if (start >= length - 1) | tl.load(finished_ptr + row).to(tl.int1):
        return
    text = token_ids_ptr + row * row_stride
    last = tl.load(text + length - 1)
    best = tl.full((), -1, tl.int64)
    for tile in range(TILES):
        position = start + tile * TILE + tl.arange(0, TILE).to(tl.int64)
        token = tl.load(text + position, mask=position < length - 1, other=-1)
        alive = token == last
        if tl.max(alive.to(tl.int32), axis=0) > 0:
            match_len = alive.to(tl.int64)
            for back in tl.static_range(1, LONGEST):
                wanted = tl.load(text + length - 1 - back, mask=length > back, other=-2)
                before = tl.load(text + position - back, mask=alive & (position >= back), other=-3)
                alive = alive & (before == wanted)
                match_len += alive.to(tl.int64)
            score = tl.where(match_len >= SHORTEST, (match_len << 32) + position, -1)
            best = tl.maximum(best, tl.max(score, axis=0))
    if best >= 0:
        tl.atomic_max(best_ptr + entry, best, sem="relaxed")


def ngram_search(
    token_ids: Tensor,
    committed_len: Tensor,
    finished: Tensor,
    idx_mapping: Tensor,
    best: Tensor,
    prompt_lookup_max: int,
    prompt_lookup_min: int,
) -> None:
    """best[i] = max(best[i], match length << 32 | position where the match ends) of each request.

    Args:
        token_ids: [R, max_model_len] int32.
        committed_len: [R] int64.
        finished: [R] bool; such rows are left out.
        idx_mapping: [num_reqs] int64.
        best: [num_reqs] int64, -1 where nothing is found yet.
        prompt_lookup_max, prompt_lookup_min: longest and shortest match, tokens.
    """
    num_splits = triton.cdiv(token_ids.shape[1], _TILE * _TILES_PER_SPLIT)
    _ngram_search_kernel[(idx_mapping.shape[0], num_splits)](
        token_ids,
        committed_len,
        finished,
        idx_mapping,
        best,
        token_ids.stride(0),
        LONGEST=prompt_lookup_max,
        SHORTEST=prompt_lookup_min,
        TILE=_TILE,
        TILES=_TILES_PER_SPLIT,
        num_warps=8,
    )
