"""Draft tokens of a step, chosen on the device: a branch that is still consistent, else the n-gram match, else none.

A branch is usable if it is of the row's generation, begins at or before the end of the committed tokens, goes on beyond
it, and agrees with the tokens committed since. The one that goes on for longest is taken, and of equals the youngest.
The rules are those of `verifier_svc.drafts.landing` and `drafter_svc.methods.ngram`.

Grid: one program a request. Bytes: 8 F (3 + L) of records, and what they overlap of the row's tokens.
"""

# pyright: reportCallIssue=false, reportArgumentType=false
# Triton's launch syntax and its constexpr values have no types that pyright follows.
from __future__ import annotations

from typing import Protocol

import triton
import triton.language as tl
from torch import Tensor

from model_executor.landing_tensors import (
    BASE_LEN,
    FROM_BRANCH,
    FROM_NGRAM,
    GENERATION,
    HEADER,
    LENGTH,
    NO_DRAFT,
    LandingTensors,
)
from model_executor.row_state import RowState

_BASE_LEN, _LENGTH = tl.constexpr(BASE_LEN), tl.constexpr(LENGTH)
_GENERATION, _HEADER = tl.constexpr(GENERATION), tl.constexpr(HEADER)
_FROM_BRANCH, _FROM_NGRAM = tl.constexpr(FROM_BRANCH), tl.constexpr(FROM_NGRAM)


class DraftInputs(Protocol):
    """What the choice reads and writes of a step's inputs. B entries."""

    @property
    def width(self) -> int: ...  # K + 1
    @property
    def idx_mapping(self) -> Tensor: ...  # [B] int64, row of each entry
    @property
    def num_tokens(self) -> Tensor: ...  # [B] int64, committed tokens to compute
    @property
    def max_draft_tokens(self) -> Tensor: ...  # [B] int64, at most K
    @property
    def best_match(self) -> Tensor: ...  # [B] int64, of `ngram_search`; -1 between steps
    @property
    def period(self) -> Tensor: ...  # [B] int64, written: how far before its end the text is claimed to repeat
    @property
    def draft_len(self) -> Tensor: ...  # [B] int64, written


@triton.jit
def _select_drafts_kernel(
    token_ids_ptr,  # [R, max_model_len] int32
    committed_len_ptr,  # [R] int64
    num_computed_ptr,  # [R] int64
    max_len_ptr,  # [R] int64
    generation_ptr,  # [R] int64
    finished_ptr,  # [R] bool
    records_ptr,  # [R, F, HEADER + L] int64
    row_ptr,  # [B] int64
    num_tokens_ptr,  # [B] int64
    max_draft_ptr,  # [B] int64
    best_ptr,  # [B] int64
    period_ptr,  # [B] int64
    draft_len_ptr,  # [B] int64
    source_ptr,  # [B] int32
    row_stride,
    HAS_BRANCHES: tl.constexpr,
    LONGEST: tl.constexpr,
    PADDED: tl.constexpr,
    BRANCHES: tl.constexpr,
    BRANCH_LEN: tl.constexpr,
    PADDED_BRANCHES: tl.constexpr,
    PADDED_LEN: tl.constexpr,
):
    entry = tl.program_id(0).to(tl.int64)
    row = tl.load(row_ptr + entry)
    length = tl.load(committed_len_ptr + row)
    text = token_ids_ptr + row * row_stride
    room = tl.load(max_len_ptr + row) - length - 1  # the token that is drawn after the drafts comes on top
    limit = tl.maximum(tl.minimum(tl.load(max_draft_ptr + entry), room), 0)
    is_sampling = tl.load(num_computed_ptr + row) + tl.load(num_tokens_ptr + entry) >= length
    is_finished = tl.load(finished_ptr + row).to(tl.int1)
    limit = tl.where(is_finished | (is_sampling == 0), 0, limit)

    best = tl.load(best_ptr + entry)
    tl.store(best_ptr + entry, -1)
    match_len = tl.where(best >= 0, best >> 32, 0)
    period = tl.where(best >= 0, length - 1 - (best & 0xFFFFFFFF), 1)
    draft_len = tl.minimum(tl.where(match_len == LONGEST, limit, match_len), limit)
    source = tl.where(draft_len > 0, _FROM_NGRAM, 0)
    offset = tl.arange(0, PADDED)  # [PADDED] draft tokens
    draft = tl.load(text + length - period + offset % period, mask=offset < draft_len, other=0)

    if HAS_BRANCHES:
        branch = tl.arange(0, PADDED_BRANCHES)  # [F]
        record = records_ptr + (row * BRANCHES + branch) * (_HEADER + BRANCH_LEN)  # [F]
        # A row that takes no draft may be the one that fills unused entries: it has no records.
        is_branch = (branch < BRANCHES) & (limit > 0)
        base_len = tl.load(record + _BASE_LEN, mask=is_branch, other=0)
        end = base_len + tl.load(record + _LENGTH, mask=is_branch, other=0)
        is_current = tl.load(record + _GENERATION, mask=is_branch, other=-1) == tl.load(generation_ptr + row)
        usable = is_branch & is_current & (base_len <= length) & (end > length)
        place = tl.arange(0, PADDED_LEN)  # [L]
        position = base_len[:, None] + place[None, :]  # [F, L]
        is_committed = usable[:, None] & (place[None, :] < BRANCH_LEN) & (position < length)
        claimed = tl.load(record[:, None] + _HEADER + place[None, :], mask=is_committed, other=0)
        standing = tl.load(text + position, mask=is_committed, other=0)
        num_wrong = tl.sum((claimed != standing.to(tl.int64)).to(tl.int32), axis=1)  # [F]
        # One number orders them: tokens left, then base_len.
        score = tl.where(usable & (num_wrong == 0), ((end - length) << 32) + base_len, -1)
        top = tl.max(score, axis=0)
        chosen = tl.min(tl.where(score == top, branch, PADDED_BRANCHES), axis=0)
        num_claimed = tl.where(top >= 0, tl.minimum(top >> 32, limit), 0)
        skip = tl.where(top >= 0, length - (top & 0xFFFFFFFF), 0)
        tokens = records_ptr + (row * BRANCHES + chosen) * (_HEADER + BRANCH_LEN) + _HEADER + skip
        claim = tl.load(tokens + offset, mask=offset < num_claimed, other=0).to(tl.int32)
        draft = tl.where(num_claimed > 0, claim, draft)
        draft_len = tl.where(num_claimed > 0, num_claimed, draft_len)
        period = tl.where(num_claimed > 0, 1, period)
        source = tl.where(num_claimed > 0, _FROM_BRANCH, source)

    tl.store(text + length + offset, draft, mask=offset < draft_len)
    tl.store(period_ptr + entry, period)
    tl.store(draft_len_ptr + entry, draft_len)
    tl.store(source_ptr + entry, source)


def select_drafts(
    rows: RowState, inputs: DraftInputs, prompt_lookup_max: int, landing: LandingTensors | None, source: Tensor
) -> None:
    """Write the drafts of a step behind the committed tokens, and how many there are into `inputs.draft_len`.

    Args:
        rows: token_ids receives the drafts; everything else is only read. Each row once, but for finished ones.
        inputs: best_match is set back to -1. A row that has finished, or does not sample in this step, gets no draft.
        prompt_lookup_max: longest match of `ngram_search`, which drafts the whole limit.
        landing: where branches land; None: there are only n-gram matches. Rows beyond its R never draft.
        source: [B] int32, written: NO_DRAFT, FROM_BRANCH or FROM_NGRAM.
    """
    branches, branch_len = (landing.num_branches, landing.branch_len) if landing is not None else (1, 1)
    _select_drafts_kernel[(inputs.idx_mapping.shape[0],)](
        rows.token_ids,
        rows.committed_len,
        rows.num_computed_tokens,
        rows.max_len,
        rows.generation,
        rows.finished,
        landing.records if landing is not None else rows.generation,
        inputs.idx_mapping,
        inputs.num_tokens,
        inputs.max_draft_tokens,
        inputs.best_match,
        inputs.period,
        inputs.draft_len,
        source,
        rows.token_ids.stride(0),
        HAS_BRANCHES=landing is not None,
        LONGEST=prompt_lookup_max,
        PADDED=triton.next_power_of_2(inputs.width),
        BRANCHES=branches,
        BRANCH_LEN=branch_len,
        PADDED_BRANCHES=triton.next_power_of_2(branches),
        PADDED_LEN=triton.next_power_of_2(branch_len),
        num_warps=1,
    )


def select_drafts_ref(
    rows: RowState, inputs: DraftInputs, prompt_lookup_max: int, landing: LandingTensors | None, source: Tensor
) -> None:
    """The same, an entry at a time."""
    for entry, row in enumerate(inputs.idx_mapping.tolist()):
        length = int(rows.committed_len[row])
        limit = max(0, min(int(inputs.max_draft_tokens[entry]), int(rows.max_len[row]) - length - 1))
        is_sampling = int(rows.num_computed_tokens[row] + inputs.num_tokens[entry]) >= length
        if bool(rows.finished[row]) or not is_sampling:
            limit = 0
        match = int(inputs.best_match[entry])
        inputs.best_match[entry] = -1
        text: list[int] = rows.token_ids[row, :length].tolist()
        draft = [] if landing is None else _branch_ref(text, int(rows.generation[row]), landing, row, limit)
        inputs.period[entry] = 1
        source[entry] = FROM_BRANCH if draft else NO_DRAFT
        if match >= 0 and not draft:
            match_len, period = match >> 32, length - 1 - (match & 0xFFFFFFFF)
            draft_len = limit if match_len == prompt_lookup_max else min(match_len, limit)
            draft = [text[length - period + index % period] for index in range(draft_len)]
            inputs.period[entry] = period
            source[entry] = FROM_NGRAM if draft else NO_DRAFT
        inputs.draft_len[entry] = len(draft)
        rows.token_ids[row, length : length + len(draft)] = rows.token_ids.new_tensor(draft)


def _branch_ref(text: list[int], generation: int, landing: LandingTensors, row: int, limit: int) -> list[int]:
    """The first `limit` tokens that the best branch of a row claims next; none if no branch is usable."""
    found: list[tuple[int, int, int]] = []  # tokens left, base_len, - slot
    rests: dict[int, list[int]] = {}
    if limit == 0:
        return []
    for slot, record in enumerate(landing.records[row].tolist()):
        base_len, tokens = record[BASE_LEN], record[HEADER : HEADER + record[LENGTH]]
        skip = len(text) - base_len
        if record[GENERATION] == generation and 0 <= skip < len(tokens) and text[base_len:] == tokens[:skip]:
            rests[slot] = tokens[skip:]
            found.append((len(tokens) - skip, base_len, -slot))
    return rests[-max(found)[2]][:limit] if found else []
