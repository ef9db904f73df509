"""Draft methods for tests: they know too much, or nothing at all."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from torch import Tensor

from common.draft_exchange import SessionUpdate
from model_executor.row_state import RowState


class _Deaf:
    """Needs to know nothing but the row state."""

    def observe(self, update: SessionUpdate) -> None:
        pass

    def close(self) -> None:
        pass


class RandomDrafts(_Deaf):
    """An adversary: any number of any tokens, as the row state would take them."""

    def __init__(self, seed: int, vocab_size: int) -> None:
        self._rng = random.Random(seed)
        self._vocab_size = vocab_size

    def propose(self, rows: RowState, idx_mapping: Tensor, max_draft_tokens: Tensor) -> Tensor:
        counts: list[int] = []
        for row, limit in zip(idx_mapping.tolist(), max_draft_tokens.tolist(), strict=True):
            count = self._rng.randint(0, limit)
            start = int(rows.committed_len[row])
            tokens = [self._rng.randrange(self._vocab_size) for _ in range(count)]
            rows.token_ids[row, start : start + count] = torch.tensor(tokens, dtype=torch.int32)
            counts.append(count)
        return torch.tensor(counts)


class NoisyOracle(_Deaf):
    """Knows the right outputs, and lies about each token with a given chance: every pattern of acceptance comes up.

    Args:
        texts: prompt + output of every request; a row is recognised by what it holds so far.
        lie: chance of a wrong token, 0 to 1.
    """

    def __init__(self, texts: Sequence[list[int]], lie: float, seed: int, vocab_size: int) -> None:
        self._texts = texts
        self._lie = lie
        self._rng = random.Random(seed)
        self._vocab_size = vocab_size

    def propose(self, rows: RowState, idx_mapping: Tensor, max_draft_tokens: Tensor) -> Tensor:
        counts: list[int] = []
        for row, limit in zip(idx_mapping.tolist(), max_draft_tokens.tolist(), strict=True):
            start = int(rows.committed_len[row])
            so_far = rows.token_ids[row, :start].tolist()
            known = [text for text in self._texts if text[:start] == so_far]
            tokens = self._rng.choice(known)[start : start + limit] if known else []
            tokens = [self._rng.randrange(self._vocab_size) if self._rng.random() < self._lie else t for t in tokens]
            rows.token_ids[row, start : start + len(tokens)] = torch.tensor(tokens, dtype=torch.int32)
            counts.append(len(tokens))
        return torch.tensor(counts)
