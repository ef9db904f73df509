"""Drafts from other processes for steps that the host puts together: it matches branches and calls the fallback."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from common.draft_exchange import SessionUpdate
from model_executor.drafting import DraftMethod
from model_executor.row_state import RowState
from verifier_svc.drafts.drafter_link import DrafterLink
from verifier_svc.drafts.exchange import DraftExchange, ExchangeStats
from verifier_svc.drafts.landing import LandingBuffer
from verifier_svc.messages import ExchangeCounts


class RemoteDrafts:
    """A draft method whose drafts come through transports.

    Args:
        exchange: with the drafters; closed with this object.
        landing: where its branches land.
        fallback: drafts for rows without a usable branch; closed with this object.
    """

    def __init__(self, exchange: DraftExchange, landing: LandingBuffer, fallback: DraftMethod) -> None:
        self._exchange = exchange
        self._landing = landing
        self._fallback = fallback

    @property
    def stats(self) -> ExchangeStats:
        """Counts since the start."""
        return self._exchange.stats

    @property
    def links(self) -> Sequence[DrafterLink]:
        """The drafters, in the order of their transports."""
        return self._exchange.links

    def propose(self, rows: RowState, idx_mapping: Tensor, max_draft_tokens: Tensor) -> Tensor:
        """See `DraftMethod.propose`. Waits at most `deadline_s`."""
        self._exchange.receive()
        batch_rows: list[int] = idx_mapping.tolist()
        limits: list[int] = max_draft_tokens.tolist()
        draft_len = max_draft_tokens  # [num_reqs]
        lengths: list[int] = []

        def match() -> list[int]:
            nonlocal draft_len, lengths
            draft_len = self._landing.match(rows, idx_mapping, max_draft_tokens)
            lengths = draft_len.tolist()
            return [row for row, length, most in zip(batch_rows, lengths, limits, strict=True) if most > length == 0]

        self._exchange.wait_until(match)
        missing = self._note_sources(batch_rows, lengths, limits)
        if missing:
            self._fall_back(rows, idx_mapping, max_draft_tokens, draft_len, missing)
        return draft_len

    def observe(self, update: SessionUpdate) -> None:
        """Tell each drafter what happened to its rows. Never waits."""
        self._exchange.observe(update)

    def close(self) -> None:
        self._exchange.close()
        self._fallback.close()

    def counts(self) -> ExchangeCounts:
        """What there is to tell of the drafters, for the front."""
        return self._exchange.counts()

    def _note_sources(self, batch_rows: list[int], lengths: list[int], limits: list[int]) -> list[int]:
        """Remember whose draft each row verifies; returns the entries that got none and could have one."""
        missing: list[int] = []
        for entry, (row, length, most) in enumerate(zip(batch_rows, lengths, limits, strict=True)):
            if most == 0:  # a prefill, perhaps of a row that we have yet to hear of
                continue
            self._exchange.note_draft(row, self._exchange.drafter_of(row) if length else None, length)
            if not length:
                missing.append(entry)
        self.stats.num_branches_used += sum(map(bool, lengths))
        self.stats.num_fallbacks += len(missing)
        return missing

    def _fall_back(
        self, rows: RowState, idx_mapping: Tensor, max_draft_tokens: Tensor, draft_len: Tensor, missing: list[int]
    ) -> None:
        entries = torch.tensor(missing, device=draft_len.device)
        found = self._fallback.propose(rows, idx_mapping[entries], max_draft_tokens[entries])
        draft_len[entries] = found
        self.stats.num_fallback_drafts += int((found > 0).sum())
