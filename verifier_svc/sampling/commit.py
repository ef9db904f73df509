"""Match and commit: accept the draft tokens that equal the drawn ones, and make the emitted tokens part of the row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from model_executor.row_state import RowState
from verifier_svc.sampling.state import SamplingState

NOT_FINISHED: Final = 0
FINISHED_STOP: Final = 1
FINISHED_LENGTH: Final = 2


@dataclass(frozen=True, slots=True)
class CommitResult:
    """What one step did to the rows of a batch of B entries with K draft positions."""

    tokens: Tensor  # [B, K + 1] int64: what was drawn; the first num_emitted of each entry are committed
    num_emitted: Tensor  # [B] int64: accepted draft tokens and the one drawn after them, cut by stop and length
    num_accepted: Tensor  # [B] int64: draft tokens among the emitted ones
    finished: Tensor  # [B] int64: NOT_FINISHED, FINISHED_STOP or FINISHED_LENGTH


def match_and_commit(
    rows: RowState, state: SamplingState, idx_mapping: Tensor, draft_len: Tensor, sampled: Tensor, samples: Tensor
) -> CommitResult:
    """Accept, cut, commit. No loop over rows, and no shape that depends on the outcome.

    Draft token j of entry b stands at rows.token_ids[row, committed_len + j]. It is accepted iff it and all before it
    equal what was drawn at their positions. Emitted are the accepted ones and the first token that differs (or the
    bonus token), up to the first stop token, and no further than max_len. min_tokens needs no look here: while it
    holds, stop tokens are masked and cannot be drawn. Where a stop token is also the last that fits, the row finishes
    by the stop.

    Args:
        rows: token_ids, committed_len, num_computed_tokens and finished are updated.
        state: stop tokens.
        idx_mapping: row of each entry, [B] int64; each row once, none finished.
        draft_len: draft tokens verified for each entry, [B] int64, at most K.
        sampled: drawn tokens, [B, K + 1] int64; whatever stands beyond draft_len + 1 is ignored.
        samples: [B] bool; False is a prefill chunk that ends before the last committed token: its row is left alone.
    """
    width = sampled.shape[1]  # K + 1
    step = torch.arange(width, device=sampled.device)  # [K + 1]
    base = rows.committed_len[idx_mapping]  # [B]
    row_index = idx_mapping.unsqueeze(-1)  # [B, 1]
    columns = base.unsqueeze(-1) + step  # [B, K + 1]
    standing = rows.token_ids[row_index, columns.clamp(max=rows.max_model_len - 1)]  # [B, K + 1] drafts, then leftovers

    matches = (sampled[:, :-1] == standing[:, :-1]) & (step[:-1] < draft_len.unsqueeze(-1))  # [B, K]
    num_matching = matches.cumprod(dim=-1).sum(dim=-1)  # [B]
    max_len = rows.max_len[idx_mapping].clamp(max=rows.max_model_len)
    room = (max_len - base).clamp(min=0)
    num_emitted = torch.minimum(num_matching + 1, room) * samples  # [B]

    stops = state.stop_token_ids[idx_mapping, : state.max_stop_tokens]  # [B, S]
    is_stop = (sampled.unsqueeze(-1) == stops.unsqueeze(1)).any(dim=-1)  # [B, K + 1]
    is_stop &= step < num_emitted.unsqueeze(-1)
    first_stop = torch.where(is_stop, step, width).amin(dim=-1)  # [B]
    num_emitted = torch.minimum(num_emitted, first_stop + 1)

    new_len = base + num_emitted  # [B]
    at_limit = samples & (new_len >= max_len)
    finished = torch.where(first_stop < width, FINISHED_STOP, torch.where(at_limit, FINISHED_LENGTH, NOT_FINISHED))

    # Places that take no token rewrite the first one with what it holds after this step, so that every write to one
    # place writes the same value and the shape stays [B, K + 1].
    emitted = step < num_emitted.unsqueeze(-1)  # [B, K + 1]
    first = torch.where(num_emitted > 0, sampled[:, 0], standing[:, 0]).unsqueeze(-1)  # [B, 1]
    first_column = columns[:, :1].clamp(max=rows.max_model_len - 1)
    values = torch.where(emitted, sampled, first).to(rows.token_ids.dtype)
    rows.token_ids[row_index, torch.where(emitted, columns, first_column)] = values
    rows.committed_len[idx_mapping] = new_len
    rows.num_computed_tokens[idx_mapping] = torch.where(samples, new_len - 1, rows.num_computed_tokens[idx_mapping])
    rows.finished[idx_mapping] = rows.finished[idx_mapping] | (finished != NOT_FINISHED)
    num_accepted = torch.minimum(num_matching, num_emitted)
    return CommitResult(sampled, num_emitted, num_accepted, finished)
