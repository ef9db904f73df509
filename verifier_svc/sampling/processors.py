"""Logit processors: penalties, logit_bias, bad_words and min_tokens, in this order, before temperature and truncation.

Definitions follow vLLM, with one addition: a bad word that the prompt begins is not completed either. Everything is
float32 and elementwise, so the result of a row does not depend on which other rows are processed with it. A row for
which a processor is off passes through it unchanged, bit for bit.

The prefix of the logits row of position p is token_ids[row, :p]. Draft tokens stand there before they are verified,
so a verified position counts the accepted draft tokens before it with no special case. Where one of them is rejected,
the positions behind it are not emitted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from verifier_svc.sampling.state import BAD_WORDS, LOGIT_BIAS, MIN_TOKENS, PENALTIES, SamplingState


def process_logits(
    logits: Tensor,
    state: SamplingState,
    rows: Tensor,
    row_list: Sequence[int],
    positions: Tensor,
    token_ids: Tensor,
    prompt_len: Tensor,
) -> Tensor:
    """Processed logits before temperature.

    Args:
        logits: [T, V] float32; left as it is.
        state: parameters of the rows.
        rows: row of each logits row, [T] int64.
        row_list: the same on the host.
        positions: absolute index of the token to draw, [T] int64.
        token_ids: [R, max_model_len] int32, the prefix of each row stands before `positions`.
        prompt_len: [R] int64.

    Returns:
        [T, V] float32, a new tensor.
    """
    logits = logits.clone()
    flags = [state.flags[row] for row in row_list]

    penalised = [t for t, flag in enumerate(flags) if flag & PENALTIES]
    if penalised:
        _apply_penalties(
            logits, torch.tensor(penalised, device=logits.device), state, rows, positions, token_ids, prompt_len
        )
    biased = [t for t, flag in enumerate(flags) if flag & LOGIT_BIAS]
    if biased:
        _apply_logit_bias(logits, biased, state, row_list)
    worded = [t for t, flag in enumerate(flags) if flag & BAD_WORDS]
    if worded:
        _apply_bad_words(logits, worded, state, row_list, positions[worded].tolist(), token_ids)
    held = [t for t, flag in enumerate(flags) if flag & MIN_TOKENS]
    if held:
        _apply_min_tokens(logits, torch.tensor(held, device=logits.device), state, rows, positions)
    return logits


def _apply_penalties(
    logits: Tensor,  # [T, V]
    selected: Tensor,  # [n] into T
    state: SamplingState,
    rows: Tensor,  # [T]
    positions: Tensor,  # [T]
    token_ids: Tensor,  # [R, max_model_len]
    prompt_len: Tensor,  # [R]
) -> None:
    """Repetition over prompt and output (divide where positive, multiply where not), then frequency, then presence."""
    rows = rows[selected]  # [n]
    positions = positions[selected]  # [n]
    longest = int(positions.max())
    prefix = token_ids[:, :longest][rows].long()  # [n, L]
    index = torch.arange(longest, device=logits.device)  # [L]
    in_prefix = index < positions.unsqueeze(-1)  # [n, L]
    in_output = in_prefix & (index >= prompt_len[rows].unsqueeze(-1))
    prefix = prefix.where(in_prefix, 0)  # whatever stands behind the prefix is no token of it; its weight below is 0

    penalised = logits[selected]  # [n, V]
    seen = torch.zeros_like(penalised).scatter_add_(1, prefix, in_prefix.float()) > 0
    counts = torch.zeros_like(penalised).scatter_add_(1, prefix, in_output.float())  # small integers: exact
    repetition = state.repetition_penalty[rows].unsqueeze(-1)
    scaled = torch.where(penalised > 0, penalised / repetition, penalised * repetition)
    penalised = torch.where(seen, scaled, penalised)
    penalised -= state.frequency_penalty[rows].unsqueeze(-1) * counts
    penalised -= state.presence_penalty[rows].unsqueeze(-1) * (counts > 0)
    logits[selected] = penalised


def _apply_logit_bias(logits: Tensor, selected: list[int], state: SamplingState, row_list: Sequence[int]) -> None:
    for t in selected:
        bias = state.logit_bias[row_list[t]]
        if bias is not None:
            logits[t].index_add_(0, *bias)


def _apply_bad_words(
    logits: Tensor,
    selected: list[int],
    state: SamplingState,
    row_list: Sequence[int],
    positions: list[int],
    token_ids: Tensor,
) -> None:
    """Mask the last token of each word whose other tokens are the ones just before the position."""
    for t, position in zip(selected, positions, strict=True):
        row = row_list[t]
        words = state.bad_words[row]
        if words is None:
            continue
        prefixes, last = words  # [W, M], [W]
        width = prefixes.shape[1]
        if width:
            context = token_ids[row, max(0, position - width) : position].long()
            if position < width:  # -2 matches no token: the prefix of the word does not fit
                context = torch.nn.functional.pad(context, (width - position, 0), value=-2)
            last = last[((prefixes == context) | (prefixes < 0)).all(dim=1)]
        logits[t].index_fill_(0, last, -math.inf)


def _apply_min_tokens(logits: Tensor, selected: Tensor, state: SamplingState, rows: Tensor, positions: Tensor) -> None:
    """Mask stop and end tokens while the output has fewer than min_tokens tokens."""
    rows = rows[selected]  # [n]
    stops = state.stop_token_ids[rows, : state.max_stop_tokens]  # [n, S]
    held = (positions[selected] < state.min_len[rows]).unsqueeze(-1) & (stops >= 0)  # [n, S]
    flat = selected.unsqueeze(-1) * logits.shape[1] + stops  # [n, S] into T * V
    logits.view(-1).index_fill_(0, flat[held], -math.inf)
