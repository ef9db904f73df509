"""The drafter without its wires: verifiers come, tell what their rows hold, and get branches."""

from __future__ import annotations

import uuid
from collections.abc import Iterable

import numpy as np
import torch

from common.draft_codec import MAX_FRAME_ROWS
from common.draft_exchange import (
    NO_BRANCHES,
    PROTOCOL_VERSION,
    BranchBatch,
    DrafterHello,
    DrafterLimits,
    DrafterLoad,
    ModelIdentity,
    RowError,
    SessionUpdate,
    VerifierHello,
)
from common.errors import InvalidArgumentError, OutriderError
from drafter_svc.sessions import RowPool, Session, SessionStats, VerifierSessions
from model_executor.drafting import DraftMethod


class MismatchError(OutriderError):
    """A verifier and this drafter cannot work together; the message names what differs, and both values."""

    status = "FAILED_PRECONDITION"


class DrafterCore:
    """Drafts for any number of verifiers. Not thread-safe: one thread owns it.

    Args:
        method: what drafts.
        method_name: for those who ask.
        pool: rows, shared by all verifiers.
        limits: what one verifier may ask for.
        model: what is drafted with; empty fields fit any verifier.
    """

    def __init__(
        self, method: DraftMethod, method_name: str, pool: RowPool, limits: DrafterLimits, model: ModelIdentity
    ) -> None:
        self._method = method
        self._pool = pool
        self._verifiers: set[int] = set()
        self.stats = SessionStats()
        self.hello = DrafterHello(uuid.uuid4().hex, model, method_name, limits)

    def connect(self, hello: VerifierHello) -> VerifierSessions:
        """Take on a verifier.

        Raises:
            MismatchError: another version or vocabulary.
            InvalidArgumentError: it asks for more than the limits.
        """
        self._check(hello)
        sessions = VerifierSessions(hello, self._pool, self.stats)
        self._verifiers.add(id(sessions))
        return sessions

    def disconnect(self, sessions: VerifierSessions) -> None:
        """Let go of a verifier and all its rows. A second call changes nothing."""
        sessions.close()
        self._verifiers.discard(id(sessions))

    @torch.inference_mode()
    def draft(self, verifiers: Iterable[VerifierSessions]) -> list[BranchBatch]:
        """Branches for the rows whose text has changed, in one call of the method for all of these verifiers."""
        groups = [(sessions, sessions.take_changed()) for sessions in verifiers]
        pool_rows = [session.pool_row for _, group in groups for session in group]
        if not pool_rows:
            return [NO_BRANCHES] * len(groups)
        rows = self._pool.rows
        room = [
            max(0, min(sessions.hello.branch_len, session.max_len - session.committed_len))
            for sessions, group in groups
            for session in group
        ]
        idx_mapping = np.array(pool_rows)  # [num_reqs]
        limit = torch.from_numpy(np.array(room))  # [num_reqs]
        lengths = self._method.propose(rows, torch.from_numpy(idx_mapping), limit).numpy()  # [num_reqs]
        widest = int(lengths.max())
        if widest == 0:
            return [NO_BRANCHES] * len(groups)
        ends = np.array([session.committed_len for _, group in groups for session in group])
        tokens = self._pool.read(idx_mapping, ends, widest)  # [num_reqs, widest]
        batches: list[BranchBatch] = []
        start = 0
        for _, group in groups:
            end = start + len(group)
            batches.append(_to_branches(group, lengths[start:end], tokens[start:end]))
            start = end
        return batches

    def load(self, num_waiting_frames: int = 0) -> DrafterLoad:
        """How busy the drafter is."""
        return DrafterLoad(self._pool.num_used, self._pool.max_rows, len(self._verifiers), num_waiting_frames)

    def close(self) -> None:
        self._method.close()

    def _check(self, hello: VerifierHello) -> None:
        if hello.protocol_version != PROTOCOL_VERSION:
            raise MismatchError(
                f"protocol version: the drafter speaks {PROTOCOL_VERSION}, the verifier {hello.protocol_version}"
            )
        ours, theirs = self.hello.model, hello.model
        if theirs.vocab_size == 0:
            raise InvalidArgumentError("hello.model.vocab_size", 0, "the number of token ids")
        if ours.vocab_size not in (0, theirs.vocab_size):
            raise MismatchError(f"vocab_size: the drafter has {ours.vocab_size}, the verifier {theirs.vocab_size}")
        prints = (ours.vocabulary_fingerprint, theirs.vocabulary_fingerprint)
        if all(prints) and prints[0] != prints[1]:
            raise MismatchError(f"vocabulary: the drafter has {prints[0]}, the verifier {prints[1]}")
        limits = self.hello.limits
        for field, value, limit in (
            # Numbers of rows, not open rows: a verifier may have more than the drafter has room for.
            ("max_rows", hello.max_rows, MAX_FRAME_ROWS),
            ("branch_len", hello.branch_len, limits.max_branch_len),
            ("branch_budget", hello.branch_budget, limits.max_frame_tokens),
            ("max_model_len", hello.max_model_len, 1 << 31),
        ):
            if not 1 <= value <= limit:
                raise InvalidArgumentError(f"hello.{field}", value, f"a value from 1 to {limit}")


def _to_branches(group: list[Session], counts: np.ndarray, tokens: np.ndarray) -> BranchBatch:
    """One branch for each session that got draft tokens: `counts` [n], `tokens` [n, widest]."""
    has_any = counts > 0
    kept = [session for session, has in zip(group, has_any.tolist(), strict=True) if has]
    if not kept:
        return NO_BRANCHES
    counts = counts[has_any]
    filled = np.arange(tokens.shape[1]) < counts[:, None]
    return BranchBatch(
        np.array([session.row for session in kept], np.int32),
        np.array([session.generation for session in kept], np.int64),
        np.array([session.committed_len for session in kept], np.int32),
        counts.astype(np.int32),
        tokens[has_any][filled],
    )


class LocalDrafter:
    """A drafter for one verifier in the same process.

    Args:
        core: used by this verifier alone, and closed with it.
        hello: what the verifier is.
    """

    def __init__(self, core: DrafterCore, hello: VerifierHello) -> None:
        self._core = core
        self._sessions = core.connect(hello)
        self.hello = core.hello

    def exchange(self, update: SessionUpdate) -> tuple[BranchBatch, list[RowError]]:
        """Take in an update, and draft for the rows that it changed."""
        errors = self._sessions.apply(update)
        (branches,) = self._core.draft([self._sessions])
        return branches, errors

    def close(self) -> None:
        self._core.disconnect(self._sessions)
        self._core.close()
