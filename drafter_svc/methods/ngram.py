"""n-gram drafting (prompt look-up): what followed the last few tokens when they occurred before.

The longest match of up to `prompt_lookup_max` tokens wins, the most recent one among equals; a row without a match of
`prompt_lookup_min` tokens abstains. The idea is Saxena's prompt look-up decoding (2023) with three changes:

- The draft is as long as the match, up to the caller's limit; a match of the full `prompt_lookup_max` drafts the whole
  limit. Short matches are mostly noise, and a rejected draft costs the same as a good one.
- A match that ends d tokens before the end of the text claims that the text goes on with period d, so a short loop
  ("a b a b") still drafts the whole limit.
- The search covers the tokens that are there: rows are laid end to end, so a long row costs its own length and no more.
"""

from __future__ import annotations

import torch
from torch import Tensor

from common.draft_exchange import SessionUpdate
from common.errors import InvalidArgumentError
from model_executor.row_state import RowState


class NgramMethod:
    """Drafts from the row's own tokens, with torch operations on any device.

    Args:
        prompt_lookup_max: longest n-gram looked for, tokens.
        prompt_lookup_min: shortest n-gram that counts as a match, tokens.
    """

    def __init__(self, prompt_lookup_max: int, prompt_lookup_min: int) -> None:
        if not 1 <= prompt_lookup_min <= prompt_lookup_max:
            limit = f"a value from 1 to prompt_lookup_max = {prompt_lookup_max}"
            raise InvalidArgumentError("prompt_lookup_min", prompt_lookup_min, limit)
        self._max = prompt_lookup_max
        self._min = prompt_lookup_min

    def propose(self, rows: RowState, idx_mapping: Tensor, max_draft_tokens: Tensor) -> Tensor:
        """See `DraftMethod.propose`."""
        if idx_mapping.numel() == 0:
            return torch.zeros_like(max_draft_tokens)
        lengths = rows.committed_len[idx_mapping]  # [num_reqs]
        match_len, period = self._find(rows, idx_mapping, lengths)
        wanted = torch.where(match_len == self._max, max_draft_tokens, match_len)
        draft_len = torch.minimum(wanted, max_draft_tokens)  # [num_reqs]
        longest = int(draft_len.max())
        if longest == 0:
            return draft_len
        offsets = torch.arange(longest, device=lengths.device)  # [longest]
        period = period.clamp(min=1)
        source = (lengths - period)[:, None] + offsets % period[:, None]  # [num_reqs, longest]
        target = lengths[:, None] + offsets
        mask = offsets < draft_len[:, None]
        row_of = idx_mapping[:, None].expand_as(target)[mask]
        rows.token_ids[row_of, target[mask]] = rows.token_ids[row_of, source[mask]]
        return draft_len

    def observe(self, update: SessionUpdate) -> None:
        """Nothing to do: the row state says it all."""

    def close(self) -> None:
        """Nothing to let go of."""

    def _find(self, rows: RowState, idx_mapping: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Length of the best match of each row (0: none), and how far before the end of the text it ends."""
        num_reqs = lengths.shape[0]
        starts = lengths.cumsum(0) - lengths  # [num_reqs]
        total = int(lengths.sum())
        spans = zip(idx_mapping.tolist(), lengths.tolist(), strict=True)
        tokens = torch.cat([rows.token_ids[row, :length] for row, length in spans])  # [total] int32
        last = starts + lengths - 1  # [num_reqs], index of each row's last token
        # Only places that hold the last token of their row are looked at further: few, as a rule.
        hits = (tokens == tokens[last].repeat_interleave(lengths, output_size=total)).nonzero().squeeze(-1)  # [hits]
        entry = torch.bucketize(hits, last)  # [hits]
        position = hits - starts[entry]  # [hits], within its own row
        # match_len[i]: how many tokens up to and including hit i agree with as many at the end of i's row.
        alive = hits < last[entry]
        match_len = alive.long()
        for back in range(1, self._max):
            wanted = tokens[(last - back).clamp(min=0)]  # [num_reqs]
            before = tokens[(hits - back).clamp(min=0)]  # [hits]
            alive = alive & (position >= back) & (before == wanted[entry])
            match_len += alive
        # Longest first, then most recent: one number orders both.
        score = match_len * (rows.max_model_len + 1) + position
        score = torch.where(match_len >= self._min, score, -1)
        best = torch.full((num_reqs,), -1, device=lengths.device).scatter_reduce_(0, entry, score, "amax")
        found = best >= 0
        best_position = best % (rows.max_model_len + 1)
        best_len = torch.where(found, best // (rows.max_model_len + 1), 0)
        return best_len, lengths - 1 - best_position
