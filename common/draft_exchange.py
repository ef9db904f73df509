"""What a verifier tells a drafter, and what a drafter claims. The same values over every transport.

A claim speaks of absolute positions: "if the first `base_len` tokens of the row are what I saw, the next ones are
these". So a branch that is late is still right or plainly wrong, and never needs a clock to tell.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class RowOpened:
    """A row has a new request. Its earlier generation, if any, is closed by this."""

    row: int
    generation: int
    request_id: str
    token_ids: list[int]
    """All committed tokens: the prompt, and after a preemption also the output before it."""
    prompt_len: int
    max_len: int
    """Prompt + output tokens at most; nothing is drafted beyond."""
    num_speculative_tokens: int
    seed: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float


class RowCommitted(NamedTuple):
    """The verifier has committed `token_ids` behind the first `base_len` tokens of the row."""

    row: int
    generation: int
    base_len: int
    token_ids: list[int]


class RowClosed(NamedTuple):
    """The row's request of this generation has ended, for whatever reason."""

    row: int
    generation: int


@dataclass(frozen=True, slots=True)
class SessionUpdate:
    """All that happened to the rows in one step; applied in the order closed, opened, committed."""

    closed: list[RowClosed] = field(default_factory=list[RowClosed])
    opened: list[RowOpened] = field(default_factory=list[RowOpened])
    committed: list[RowCommitted] = field(default_factory=list[RowCommitted])

    def __bool__(self) -> bool:
        return bool(self.closed or self.opened or self.committed)


class Branch(NamedTuple):
    """If the first `base_len` tokens of (row, generation) are what the drafter saw, `token_ids` come next."""

    row: int
    generation: int
    base_len: int
    token_ids: list[int]


class RowError(NamedTuple):
    """The drafter has dropped a row, with the reason; the verifier may open it again."""

    row: int
    generation: int
    reason: str
