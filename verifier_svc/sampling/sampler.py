"""Draw the token of every position: the argmax of processed logits / temperature + noise.

The noise is a function of (seed, position, token), so the drawn token is a function of the request and its prefix
alone. It does not depend on the step, on the batch, or on whether the position is drafted.

Rows that need the same work are computed together. A row goes through the same arithmetic in whatever company, so
that a row alone and the same row in a batch draw the same token. Choosing the work by row is a decision of the host:
this is the torch sampler; on a CPU it costs nothing to look.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from model_executor.kernels.philox import gumbel_noise_at_ref, gumbel_noise_ref
from model_executor.sampling_flags import MIN_P, PROCESSED, RANDOM, TOP_P, TRUNCATED
from verifier_svc.sampling.processors import Positions, process_logits
from verifier_svc.sampling.state import SamplingState
from verifier_svc.sampling.truncation import CANDIDATE_GROWTH, MIN_CANDIDATES, apply_min_p, truncate


class Sampler:
    """Samples for the rows of one `SamplingState`."""

    def __init__(self, state: SamplingState) -> None:
        self._state = state

    def sample(self, logits: Tensor, rows: Tensor, positions: Tensor, token_ids: Tensor, prompt_len: Tensor) -> Tensor:
        """One token for every logits row.

        Args:
            logits: of the target model, [T, V] float32; left as they are.
            rows: row of each logits row, [T] int64.
            positions: absolute index of the token to draw, [T] int64. It keys the noise and ends the prefix.
            token_ids: [R, max_model_len] int32; the prefix of logits row t is token_ids[rows[t], :positions[t]].
            prompt_len: [R] int64.

        Returns:
            [T] int64. The lowest token id wins a tie.
        """
        row_list: list[int] = rows.tolist()
        flags = [self._state.flags[row] for row in row_list]
        union = 0
        for flag in flags:
            union |= flag

        if union & PROCESSED:
            logits = process_logits(logits, self._state, Positions(rows, row_list, positions, token_ids, prompt_len))
        if not union & RANDOM:
            return logits.argmax(dim=-1)

        groups: dict[tuple[int, bool], list[int]] = {}
        for t, flag in enumerate(flags):
            groups.setdefault((flag & (RANDOM | MIN_P), bool(flag & TRUNCATED)), []).append(t)
        if len(groups) == 1:
            return self._sample_group(union, logits, rows, row_list, positions)
        sampled = torch.empty_like(rows)
        for members in groups.values():
            needs = 0
            for t in members:
                needs |= flags[t]
            index = torch.tensor(members, device=logits.device)
            group_rows = [row_list[t] for t in members]
            sampled[index] = self._sample_group(needs, logits[index], rows[index], group_rows, positions[index])
        return sampled

    def _sample_group(
        self, needs: int, logits: Tensor, rows: Tensor, row_list: Sequence[int], positions: Tensor
    ) -> Tensor:
        """Rows that need the same work: logits [n, V], rows [n], positions [n] -> [n]."""
        if not needs & RANDOM:
            return logits.argmax(dim=-1)
        state = self._state
        scaled = logits / state.temperature[rows].unsqueeze(-1)  # [n, V]
        if needs & MIN_P:
            scaled = apply_min_p(scaled, state.log_min_p[rows])
        seeds = state.seed[rows]  # [n]
        if not needs & TRUNCATED:
            return scaled.add_(gumbel_noise_ref(seeds, positions, state.vocab_size)).argmax(dim=-1)
        top_p = state.top_p[rows] if needs & TOP_P else None
        longest_top_k = max(state.top_k_host[row] for row in row_list)
        count = min(state.vocab_size, max(MIN_CANDIDATES, longest_top_k + 1))
        return _sample_truncated(scaled, state.top_k[rows], top_p, seeds, positions, count)


def _sample_truncated(
    scaled: Tensor,  # [n, V]
    top_k: Tensor,  # [n]
    top_p: Tensor | None,  # [n]
    seeds: Tensor,  # [n]
    positions: Tensor,  # [n]
    count: int,
) -> Tensor:
    """Draw among the best `count` tokens, and among more of them for rows which these do not decide. Returns [n]."""
    vocab_size = scaled.shape[-1]
    values, token_ids, decided = truncate(scaled, top_k, top_p, count)  # [n, C]
    scores = values + gumbel_noise_at_ref(seeds, positions, token_ids)
    best = scores.amax(dim=-1, keepdim=True)  # [n, 1]
    # vocab_size - 1 stands for "no score is the best", which only NaN logits can cause: the token must still exist.
    sampled = torch.where(scores == best, token_ids, vocab_size - 1).amin(dim=-1)  # [n]
    if bool(decided.all()):
        return sampled
    rest = (~decided).nonzero().squeeze(-1)
    rest_top_p = None if top_p is None else top_p[rest]
    more = min(vocab_size, count * CANDIDATE_GROWTH)
    sampled[rest] = _sample_truncated(scaled[rest], top_k[rest], rest_top_p, seeds[rest], positions[rest], more)
    return sampled
