"""Match and commit on the device: the drawn tokens become part of the rows, and the outcome is written for the host.

A chunk that does not end its prefill commits nothing and only moves on. Grid: one program an entry, which takes the
best slot of each position, accepts draft tokens as long as they equal what was drawn, cuts at a stop token
and at max_len, and updates the row. `verifier_svc.sampling.commit` is the reference.
"""

# pyright: reportCallIssue=false, reportArgumentType=false
# Triton's launch syntax and its constexpr values have no types that pyright follows.
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from model_executor.kernels.step_inputs import StepInputs
from model_executor.row_state import RowState

OUTCOME_HEADER = 5
"""num_emitted, num_draft_tokens, num_accepted, finish code, source of the draft; then the drawn tokens."""

_HEADER = tl.constexpr(OUTCOME_HEADER)


@triton.jit
def _commit_tokens_kernel(
    token_ids_ptr,  # [R, max_model_len] int32
    committed_len_ptr,  # [R] int64
    num_computed_ptr,  # [R] int64
    max_len_ptr,  # [R] int64
    finished_ptr,  # [R] bool
    stop_ids_ptr,  # [R, NUM_STOPS] int64
    seed_ptr,  # [R] int64
    row_ptr,  # [num_reqs] int64
    num_tokens_ptr,  # [num_reqs] int64
    draft_len_ptr,  # [num_reqs] int64
    query_len_ptr,  # [num_reqs] int64
    num_samples_ptr,  # [num_reqs] int64
    source_ptr,  # [num_reqs] int32
    period_ptr,  # [num_reqs] int64
    forced_ptr,  # [WIDTH - 1] float32
    value_ptr,  # [num_reqs * WIDTH, num_slots] float32
    token_ptr,  # [num_reqs * WIDTH, num_slots] int32
    outcome_ptr,  # [num_reqs, HEADER + WIDTH] int32
    row_stride,
    stop_stride,
    num_stops,
    num_slots,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    SLOTS: tl.constexpr,
    STOPS: tl.constexpr,
    FORCED: tl.constexpr,
):
    entry = tl.program_id(0).to(tl.int64)
    row = tl.load(row_ptr + entry)
    outcome = outcome_ptr + entry * (_HEADER + WIDTH)
    if tl.load(num_samples_ptr + entry) == 0:
        tl.store(outcome, 0)
        if tl.load(query_len_ptr + entry) > 0:
            computed = tl.load(num_computed_ptr + row) + tl.load(num_tokens_ptr + entry)
            tl.store(num_computed_ptr + row, computed)
        return
    draft_len = tl.load(draft_len_ptr + entry)
    length = tl.load(committed_len_ptr + row)
    text = token_ids_ptr + row * row_stride
    offset = tl.arange(0, PADDED)  # [PADDED] places of the entry
    slots = tl.arange(0, SLOTS)
    is_place = offset <= draft_len
    part = (entry * WIDTH + offset[:, None]) * num_slots + slots[None, :]
    there = is_place[:, None] & (slots[None, :] < num_slots)
    values = tl.load(value_ptr + part, mask=there, other=float("-inf"))
    best = tl.max(values, axis=1)
    candidates = tl.load(token_ptr + part, mask=there, other=0x7FFFFFFF)
    drawn = tl.min(tl.where(values == best[:, None], candidates, 0x7FFFFFFF), axis=1)
    # Not a number in every slot: some token must come out all the same.
    drawn = tl.where(drawn == 0x7FFFFFFF, 0, drawn)
    draft = tl.load(text + length + offset, mask=offset < draft_len, other=-1)
    if FORCED:
        # Benchmarks: accept by chance, and go on with the text that the draft claims.
        period = tl.load(period_ptr + entry)
        drawn = tl.load(text + length - period + offset % period, mask=is_place, other=0)
        chance = tl.rand(tl.load(seed_ptr + row), length.to(tl.int32))
        rate = tl.load(forced_ptr + offset, mask=offset < draft_len, other=0.0)
        matches = chance < rate
    else:
        matches = (drawn == draft) & (offset < draft_len)
    mismatch = tl.where(matches, PADDED, offset)
    num_matching = tl.minimum(tl.min(mismatch, axis=0), draft_len)
    room = tl.load(max_len_ptr + row) - length
    num_emitted = tl.minimum(num_matching + 1, room)
    stops = tl.arange(0, STOPS)
    stop_ids = tl.load(stop_ids_ptr + row * stop_stride + stops, mask=stops < num_stops, other=-1)
    hit = tl.max((drawn[:, None].to(tl.int64) == stop_ids[None, :]).to(tl.int32), axis=1) > 0
    first_stop = tl.min(tl.where(hit & (offset < num_emitted), offset, PADDED), axis=0)
    is_stopped = first_stop < PADDED
    num_emitted = tl.where(is_stopped, first_stop + 1, num_emitted)
    new_len = length + num_emitted
    finish = tl.where(is_stopped, 1, tl.where(num_emitted == room, 2, 0))
    tl.store(text + length + offset, drawn, mask=offset < num_emitted)
    tl.store(committed_len_ptr + row, new_len)
    tl.store(num_computed_ptr + row, new_len - 1)
    tl.store(finished_ptr + row, finish > 0)
    tl.store(outcome, num_emitted.to(tl.int32))
    tl.store(outcome + 1, draft_len.to(tl.int32))
    tl.store(outcome + 2, tl.minimum(num_matching, num_emitted).to(tl.int32))
    tl.store(outcome + 3, finish.to(tl.int32))
    tl.store(outcome + 4, tl.load(source_ptr + entry))
    tl.store(outcome + _HEADER + offset, drawn, mask=offset < WIDTH)


def commit_tokens(
    rows: RowState,
    stop_token_ids: Tensor,
    seed: Tensor,
    inputs: StepInputs,
    values: Tensor,
    tokens: Tensor,
    outcome: Tensor,
    forced_acceptance: Tensor | None = None,
) -> None:
    """Commit what `gumbel_argmax` left in `values` and `tokens`.

    Args:
        rows: token_ids, committed_len, num_computed_tokens and finished are updated.
        stop_token_ids: [R, S] int64, padded with -1.
        seed: [R] int64; forced acceptance draws its chances with it.
        inputs: of this step.
        values, tokens: [num_reqs * width, num_slots].
        outcome: [num_reqs, OUTCOME_HEADER + width] int32, written; num_emitted is 0 for a row that samples
            nothing.
        forced_acceptance: for benchmarks, [width - 1] float32: chance that at least this many drafts are accepted.
    """
    num_slots = values.shape[1]
    _commit_tokens_kernel[(inputs.idx_mapping.shape[0],)](
        rows.token_ids,
        rows.committed_len,
        rows.num_computed_tokens,
        rows.max_len,
        rows.finished,
        stop_token_ids,
        seed,
        inputs.idx_mapping,
        inputs.num_tokens,
        inputs.draft_len,
        inputs.query_len,
        inputs.num_samples,
        inputs.source,
        inputs.period,
        forced_acceptance if forced_acceptance is not None else values,
        values,
        tokens,
        outcome,
        rows.token_ids.stride(0),
        stop_token_ids.stride(0),
        stop_token_ids.shape[1],
        num_slots,
        WIDTH=inputs.width,
        PADDED=triton.next_power_of_2(inputs.width),
        SLOTS=triton.next_power_of_2(num_slots),
        STOPS=triton.next_power_of_2(stop_token_ids.shape[1]),
        FORCED=forced_acceptance is not None,
    )
