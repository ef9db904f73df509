"""Logit processors: penalties, logit_bias, bad_words and min_tokens, in this order, before temperature and truncation.

Definitions follow vLLM, with one addition: a bad word that the prompt begins is not completed either. Everything is
float32 and elementwise, so the result of a row does not depend on which other rows are processed with it. A row for
which a processor is off passes through it unchanged, bit for bit.

The prefix of the logits row of position p is token_ids[row, :p]. Draft tokens stand there before they are verified, so
a verified position counts the accepted draft tokens before it with no special case. Where one of them is rejected, the
positions behind it are not emitted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from model_executor.sampling_flags import BAD_WORDS, LOGIT_BIAS, MIN_TOKENS, PENALTIES
from verifier_svc.sampling.state import SamplingState

# Penalties make several tensors of the shape of the logits. Rows are done in chunks of about this many logits, so that
# their memory does not grow with the batch.
_CHUNK_LOGITS: Final = 65536


@dataclass(frozen=True, slots=True)
class Positions:
    """Which token each of T logits rows is for."""

    rows: Tensor  # [T] int64
    row_list: Sequence[int]  # the same on the host
    positions: Tensor  # [T] int64, absolute index of the token to draw; ends the prefix
    token_ids: Tensor  # [R, max_model_len] int32
    prompt_len: Tensor  # [R] int64


def process_logits(logits: Tensor, state: SamplingState, at: Positions) -> Tensor:
    """Logits before temperature, a new tensor [T, V] float32; `logits` [T, V] float32 are left as they are."""
    logits = logits.clone()
    flags = [state.flags[row] for row in at.row_list]
    for feature, apply in _PROCESSORS:
        selected = [t for t, flag in enumerate(flags) if flag & feature]
        if selected:
            apply(logits, selected, state, at)
    return logits


def _apply_penalties(logits: Tensor, selected: list[int], state: SamplingState, at: Positions) -> None:
    """Repetition over prompt and output (divide where positive, multiply where not), then frequency, then presence."""
    num_rows = max(1, _CHUNK_LOGITS // logits.shape[1])
    for start in range(0, len(selected), num_rows):
        index = torch.tensor(selected[start : start + num_rows], device=logits.device)  # [n]
        logits[index] = _penalised(logits[index], index, state, at)


def _penalised(logits: Tensor, index: Tensor, state: SamplingState, at: Positions) -> Tensor:
    """Penalised logits of the logits rows `index` [n]: [n, V] -> [n, V]."""
    rows = at.rows[index]  # [n]
    positions = at.positions[index].unsqueeze(-1)  # [n, 1]
    longest = int(positions.max())
    prefix = at.token_ids[:, :longest][rows].long()  # [n, L]
    place = torch.arange(longest, device=logits.device)  # [L]
    in_prefix = place < positions  # [n, L]
    in_output = in_prefix & (place >= at.prompt_len[rows].unsqueeze(-1))
    prefix = prefix.where(in_prefix, 0)  # what stands behind the prefix may be no token at all; its weight below is 0

    seen = torch.zeros_like(logits).scatter_add_(1, prefix, in_prefix.float()) > 0
    counts = torch.zeros_like(logits).scatter_add_(1, prefix, in_output.float())  # small integers: exact
    repetition = state.repetition_penalty[rows].unsqueeze(-1)
    logits = torch.where(seen, torch.where(logits > 0, logits / repetition, logits * repetition), logits)
    logits -= state.frequency_penalty[rows].unsqueeze(-1) * counts
    logits -= state.presence_penalty[rows].unsqueeze(-1) * (counts > 0)
    return logits


def _apply_logit_bias(logits: Tensor, selected: list[int], state: SamplingState, at: Positions) -> None:
    biases = [bias for t in selected if (bias := state.logit_bias[at.row_list[t]])]
    owner = _owners(selected, [token_ids.shape[0] for token_ids, _ in biases], logits.device)  # [m]
    flat = owner * logits.shape[1] + torch.cat([token_ids for token_ids, _ in biases])  # [m] into T * V, all different
    logits.view(-1).index_add_(0, flat, torch.cat([values for _, values in biases]))


def _apply_bad_words(logits: Tensor, selected: list[int], state: SamplingState, at: Positions) -> None:
    """Mask the last token of each word whose other tokens are the ones just before the position."""
    words = [word for t in selected if (word := state.bad_words[at.row_list[t]])]
    owner = _owners(selected, [last.shape[0] for _, last in words], logits.device)  # [W], words of all rows
    prefixes = torch.cat([prefix for prefix, _ in words])  # [W, M]
    width = prefixes.shape[1]
    before = torch.arange(-width, 0, device=logits.device)  # [M]
    place = at.positions[owner].unsqueeze(-1) + before  # [W, M]
    context = at.token_ids[at.rows[owner].unsqueeze(-1), place.clamp(min=0)]  # [W, M]
    # -1 pads a shorter word and matches anything; a place before the prompt matches nothing else.
    completes = ((prefixes < 0) | ((prefixes == context) & (place >= 0))).all(dim=-1)  # [W]
    flat = owner * logits.shape[1] + torch.cat([last for _, last in words])  # [W] into T * V
    logits.view(-1).index_fill_(0, flat[completes], -math.inf)


def _apply_min_tokens(logits: Tensor, selected: list[int], state: SamplingState, at: Positions) -> None:
    """Mask stop and end tokens while the output has fewer than min_tokens tokens."""
    index = torch.tensor(selected, device=logits.device)  # [n]
    rows = at.rows[index]  # [n]
    stops = state.stop_token_ids[rows, : state.max_stop_tokens]  # [n, S]
    held = (at.positions[index] < state.min_len[rows]).unsqueeze(-1) & (stops >= 0)  # [n, S]
    flat = index.unsqueeze(-1) * logits.shape[1] + stops  # [n, S] into T * V
    logits.view(-1).index_fill_(0, flat[held], -math.inf)


def _owners(selected: list[int], counts: list[int], device: torch.device) -> Tensor:
    """Logits row of each entry of a batch of lists: selected[i], counts[i] times, [sum of counts] int64."""
    return torch.tensor(selected, device=device).repeat_interleave(torch.tensor(counts, device=device))


_PROCESSORS = (
    (PENALTIES, _apply_penalties),
    (LOGIT_BIAS, _apply_logit_bias),
    (BAD_WORDS, _apply_bad_words),
    (MIN_TOKENS, _apply_min_tokens),
)
