"""Log probabilities of drawn tokens, from the logits as the model gave them."""

from __future__ import annotations

import torch
from torch import Tensor

from common.types import TokenLogprobs
from verifier_svc.sampling.truncation import rank_exactly


def gather_logprobs(raw_logits: Tensor, chosen: Tensor, num_logprobs: int) -> list[TokenLogprobs]:
    """Log probabilities at each position: of the chosen token, then of the best ones.

    Args:
        raw_logits: unprocessed logits of the emitted positions, [n, V] float32.
        chosen: the token at each position, [n] int64.
        num_logprobs: how many of the best tokens to list, at least 0; at most V are. The chosen token is listed first
            in any case, and again where it is among the best. Equal values are listed by token id.

    Returns:
        One entry a position. `rank` is 1 + the number of tokens with a strictly larger log probability.
    """
    logprobs = torch.log_softmax(raw_logits, dim=-1)  # [n, V]
    chosen = chosen.unsqueeze(-1)  # [n, 1]
    chosen_logprobs = logprobs.gather(-1, chosen)  # [n, 1]
    ranks: list[int] = ((logprobs > chosen_logprobs).sum(dim=-1) + 1).tolist()
    ids, values = chosen, chosen_logprobs
    count = min(num_logprobs, raw_logits.shape[-1])
    if count > 0:
        best, best_ids = rank_exactly(logprobs, count)  # [n, count]
        ids = torch.cat([chosen, best_ids], dim=-1)
        values = torch.cat([chosen_logprobs, best], dim=-1)
    return [TokenLogprobs(i, v, r) for i, v, r in zip(ids.tolist(), values.tolist(), ranks, strict=True)]
