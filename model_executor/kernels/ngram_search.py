"""n-gram search over the rows' own tokens, on the device.

A program owns (row, split of the text) and looks for the last tokens of the row at every position of its split. Length
and position of a match make one number, so that one atomic maximum per program finds the longest match, and the most
recent one among equals, whatever the order of programs.

Grid: num_reqs x num_splits. Bytes: 4 a token of real text; a split beyond the end of its row does nothing. Each load of
the chain row -> length -> text -> tokens before a hit waits for the one before it, so a program does each of them once,
for its whole split.
The rules are those of `drafter_svc.methods.ngram`, which is the reference.
"""

# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
# Triton's launch syntax and its constexpr values have no types that pyright follows.
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_TILE = 2048  # tokens of a program: four 16-byte loads a lane, all under way at once


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
):
    entry = tl.program_id(0)
    start = tl.program_id(1) * TILE
    row = tl.load(row_ptr + entry)
    length = tl.load(committed_len_ptr + row).to(tl.int32)
    if (start >= length - 1) | tl.load(finished_ptr + row).to(tl.int1):
        return
    text = token_ids_ptr + row.to(tl.int64) * row_stride
    offset = tl.arange(0, TILE)
    num_places = length - 1 - start  # where a match may end
    # Whole groups of 16 tokens, so that the mask does not split a 16-byte load; a row has no place beyond its stride.
    num_loaded = tl.minimum((num_places + 15) // 16 * 16, row_stride - start)
    token = tl.load(text + start + offset, mask=offset < num_loaded, other=-1)
    alive = (token == tl.load(text + length - 1)) & (offset < num_places)
    # The tokens before a hit are loaded for every hit of the last token, not for those alive still: one latency, not
    # one for each. They have just come by, and are in the L1.
    is_hit = alive
    match_len = alive.to(tl.int32)
    for back in tl.static_range(1, LONGEST):
        wanted = tl.load(text + length - 1 - back, mask=length > back, other=-2)
        before = tl.load(text + start + offset - back, mask=is_hit & (start + offset >= back), other=-3)
        alive = alive & (before == wanted)
        match_len += alive.to(tl.int32)
    score = tl.where(match_len >= SHORTEST, match_len * TILE + offset, -1)
    best = tl.max(score, axis=0)
    if best >= 0:
        place = (best // TILE).to(tl.int64) << 32 | (start + best % TILE)
        tl.atomic_max(best_ptr + entry, place, sem="relaxed")


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
    num_splits = triton.cdiv(token_ids.shape[1], _TILE)
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
        num_warps=4,
    )


def ngram_search_ref(
    token_ids: Tensor,
    committed_len: Tensor,
    finished: Tensor,
    idx_mapping: Tensor,
    prompt_lookup_max: int,
    prompt_lookup_min: int,
) -> Tensor:
    """The best match of each request, [num_reqs] int64, or -1: every length tried at every place."""
    best = torch.full_like(idx_mapping, -1)
    for entry, row in enumerate(idx_mapping.tolist()):
        length = int(committed_len[row])
        text = token_ids[row, :length].long()
        if finished[row]:
            continue
        for size in range(prompt_lookup_min, min(prompt_lookup_max, length - 1) + 1):
            ends = (text[:-1].unfold(0, size, 1) == text[-size:]).all(dim=1).nonzero()[:, 0] + size - 1
            if ends.numel():
                best[entry] = (size << 32) + ends[-1]
    return best
