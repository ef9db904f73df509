"""What a verifier tells a drafter, and what a drafter claims. The same values over every transport.

A claim speaks of absolute positions: "if the first `base_len` tokens of the row are what I saw, the next ones are
these". So a branch that is late is still right or plainly wrong, and never needs a clock to tell.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

PROTOCOL_VERSION = 1
"""Of protos/outrider/v1/drafter.proto."""

IntArray = NDArray[np.signedinteger[Any]]


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


@dataclass(frozen=True, slots=True)
class BranchBatch:
    """Branches in columns: a batch of 64 is five arrays and not 64 objects. B branches, T tokens in total."""

    row: IntArray  # [B] int32
    generation: IntArray  # [B] int64
    base_len: IntArray  # [B] int32
    num_tokens: IntArray  # [B] int32, at least 1
    token_ids: IntArray  # [T] int32, end to end

    @classmethod
    def of(cls, branches: Iterable[Branch]) -> BranchBatch:
        """The same branches in columns; those without tokens are left out."""
        kept = [branch for branch in branches if branch.token_ids]
        return cls(
            np.array([branch.row for branch in kept], np.int32),
            np.array([branch.generation for branch in kept], np.int64),
            np.array([branch.base_len for branch in kept], np.int32),
            np.array([len(branch.token_ids) for branch in kept], np.int32),
            np.array([token for branch in kept for token in branch.token_ids], np.int32),
        )

    def __len__(self) -> int:
        return len(self.row)

    def to_list(self) -> list[Branch]:
        """One object a branch: for tests and for those who need no speed."""
        tokens: list[int] = self.token_ids.tolist()
        columns = (self.row.tolist(), self.generation.tolist(), self.base_len.tolist(), self.num_tokens.tolist())
        branches: list[Branch] = []
        start = 0
        for row, generation, base_len, count in zip(*columns, strict=True):
            branches.append(Branch(row, generation, base_len, tokens[start : start + count]))
            start += count
        return branches


NO_BRANCHES = BranchBatch.of([])


@dataclass(frozen=True, slots=True)
class DraftReply:
    """What a drafter says about everything it was told up to update `answered_sequence`."""

    answered_sequence: int
    """A row of these updates without a branch got none: there is nothing left to wait for."""
    branches: BranchBatch
    row_errors: list[RowError]


@dataclass(frozen=True, slots=True)
class ModelIdentity:
    """Which model tokens come from. Empty fields are not known, and fit any."""

    model_fingerprint: str = ""
    vocabulary_fingerprint: str = ""
    vocab_size: int = 0


@dataclass(frozen=True, slots=True)
class DrafterLimits:
    """What one verifier may ask of a drafter."""

    max_rows: int
    """Rows open at the same time, of all verifiers together."""
    max_model_len: int
    max_frame_tokens: int
    max_branch_len: int


@dataclass(frozen=True, slots=True)
class VerifierHello:
    """How a verifier introduces itself: what its rows can be, and the branches it wants."""

    verifier_id: str
    model: ModelIdentity
    max_model_len: int
    max_rows: int
    branch_budget: int
    """Branches for a row and update at most."""
    branch_len: int
    """Tokens of a branch at most. More than a step can use keeps a late branch useful."""
    protocol_version: int = PROTOCOL_VERSION
    shared_memory_host: str = ""
    """Boot id of the host, of a verifier that would rather use shared memory."""


@dataclass(frozen=True, slots=True)
class DrafterHello:
    """How a drafter answers. Another incarnation is another process, which remembers nothing."""

    incarnation_id: str
    model: ModelIdentity
    method: str
    limits: DrafterLimits
    protocol_version: int = PROTOCOL_VERSION
    shared_memory_name: str = ""
    """Files that are offered to a verifier on the same host."""


@dataclass(frozen=True, slots=True)
class DrafterLoad:
    """How busy a drafter is."""

    num_rows: int
    max_rows: int
    num_streams: int
    num_waiting_frames: int
