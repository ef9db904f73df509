"""min_p, top_k and top_p: which tokens a random row may draw.

Order and rules, all over logits already divided by the temperature:

1. min_p keeps a token whose probability is at least min_p times the largest one.
2. Tokens are ranked by logit, the largest first; equal logits by token id, the lowest first.
3. top_k keeps the first k of that ranking: exactly k tokens, also when the k-th and the next are equal.
4. top_p keeps the shortest run of the ranking whose probability, renormalised over what 1 and 3 kept, reaches top_p.
   The first token is always kept.

Sorting a row costs more than anything else here (V = 6144 on one core: 309 us; the best 64 cost 21 us, the best 1024
81 us). The ranking is therefore made from the best few, and a row that they do not decide is ranked again with more, in
the end with all. Every way gives the same tokens: the head of the ranking is the same, and sums run over it in the same
order.
"""

from __future__ import annotations

import math
from typing import Final

import torch
from torch import Tensor

MIN_CANDIDATES: Final = 64
"""Candidates of the first try. torch is quickest up to V / 64, and a nucleus is rarely wider."""

CANDIDATE_GROWTH: Final = 16
"""How many times more the next try takes."""


def apply_min_p(scaled: Tensor, log_min_p: Tensor) -> Tensor:
    """Mask what min_p drops.

    Args:
        scaled: logits / temperature, [n, V] float32.
        log_min_p: log of min_p, [n] float32; -inf is off.

    Returns:
        [n, V] float32, -inf where dropped.
    """
    threshold = scaled.amax(dim=-1) + log_min_p  # [n]
    return scaled.masked_fill(scaled < threshold.unsqueeze(-1), -math.inf)


def rank(values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` best of every row in the order of rule 2.

    Args:
        values: [n, V] float32.
        count: C, at most V.

    Returns:
        Values [n, C] float32 and token ids [n, C] int64. Where C < V, entries equal to the last one may not be the
        lowest ids of that value; all entries before them are exact.
    """
    if count == values.shape[-1]:
        return torch.sort(values, dim=-1, descending=True, stable=True)
    best, token_ids = values.topk(count, dim=-1)
    if bool(((best[:, 1:] == best[:, :-1]) & (best[:, 1:] > -math.inf)).any()):  # topk leaves equal values in any order
        token_ids, order = token_ids.sort(dim=-1)
        best, order = torch.sort(best.gather(-1, order), dim=-1, descending=True, stable=True)
        token_ids = token_ids.gather(-1, order)
    return best, token_ids


def rank_exactly(values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """As `rank`, with the lowest ids first also at the end of the list."""
    vocab_size = values.shape[-1]
    best, token_ids = rank(values, min(count + 1, vocab_size))
    if count < vocab_size and bool((best[:, count - 1] == best[:, count]).any()):
        best, token_ids = rank(values, vocab_size)
    return best[:, :count], token_ids[:, :count]


def truncate(scaled: Tensor, top_k: Tensor, top_p: Tensor | None, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Rules 2 to 4 within the best `count` tokens.

    Args:
        scaled: logits / temperature after min_p, [n, V] float32.
        top_k: [n] int64; V is off.
        top_p: [n] float32; 1 is off; None is off for all rows, and spares a softmax.
        count: C, at most V.

    Returns:
        Values [n, C] float32, -inf where dropped; token ids [n, C] int64; and whether the row is decided, [n] bool.
    """
    vocab_size = scaled.shape[-1]
    values, token_ids = rank(scaled, count)
    in_top_k = torch.arange(count, device=scaled.device) < top_k.unsqueeze(-1)  # [n, C]
    in_top_k &= values > -math.inf

    keep = in_top_k
    if top_p is not None:
        probs = torch.softmax(scaled, dim=-1).gather(-1, token_ids) * in_top_k  # [n, C]
        mass = probs.cumsum(dim=-1)  # [n, C]
        total = torch.where(top_k < vocab_size, mass[:, -1], 1.0)
        limit = torch.where(top_p < 1.0, top_p * total, math.inf)  # off keeps also what rounding leaves no mass for
        keep = in_top_k.clone()
        keep[:, 1:] &= mass[:, :-1] < limit.unsqueeze(-1)

    if count == vocab_size:
        decided = torch.ones_like(top_k, dtype=torch.bool)
    else:
        num_exact = (values > values[:, -1:]).sum(dim=-1)  # [n] entries that `rank` vouches for
        # With top_k, all k must be there, since top_p renormalises by their sum. At least one token is always kept.
        needed = torch.where(top_k < vocab_size, in_top_k.sum(dim=-1), keep.sum(dim=-1))
        decided = needed.clamp(min=1) <= num_exact
    return values.masked_fill(~keep, -math.inf), token_ids, decided
