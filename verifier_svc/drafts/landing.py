"""Where branches land, and how a step takes from them whatever is still consistent with the committed tokens."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from common.draft_exchange import BranchBatch
from model_executor.row_state import RowState

Int64Array = NDArray[np.int64]


class Landing(Protocol):
    """Where the exchange puts branches."""

    def put(self, branches: BranchBatch) -> None:
        """Let branches land; of one that is too long the beginning is kept. Rows and tokens have been checked."""
        ...

    def clear(self, rows: list[int]) -> None:
        """Forget the branches of these rows: those of a drafter that is gone."""
        ...


class PlacedBranches(NamedTuple):
    """Branches and the slots that they take, sorted by row. N branches: of each row the last F at most."""

    row: Int64Array  # [N]
    slot: Int64Array  # [N]
    base_len: Int64Array  # [N]
    length: Int64Array  # [N], at most L
    generation: Int64Array  # [N]
    token_ids: NDArray[np.int32]  # [N, L], beyond `length` anything


class BranchSlots:
    """Says which of its row's F slots each branch takes: that of the oldest one.

    Args:
        max_num_seqs: R, rows.
        num_branches: F.
        branch_len: L, tokens that are kept of a branch.
    """

    def __init__(self, max_num_seqs: int, num_branches: int, branch_len: int) -> None:
        self._num_branches = num_branches
        self._branch_len = branch_len
        self._num_landed = np.zeros(max_num_seqs, dtype=np.int64)  # [R], branches so far: says which slot is the oldest

    def place(self, branches: BranchBatch) -> PlacedBranches:
        """Slots for branches, of which there is at least one."""
        row = branches.row
        # The branches of a row take its next slots in their order: rank within the row, found by a stable sort.
        order = np.argsort(row, kind="stable")
        ordered = row[order]
        first = np.searchsorted(ordered, ordered)  # [B], where the row's branches begin in the order
        rank = np.arange(len(branches)) - first
        number = np.bincount(row, minlength=0)[ordered]
        fresh = rank >= number - self._num_branches  # more than F at once: the last F
        order, ordered, rank = order[fresh], ordered[fresh], rank[fresh]
        slot = (self._num_landed[ordered] + rank) % self._num_branches
        np.add.at(self._num_landed, row, 1)

        ends = branches.num_tokens.cumsum(dtype=np.int64)
        starts = (ends - branches.num_tokens)[order]
        columns = starts[:, None] + np.arange(self._branch_len)  # [N, L]
        tokens = branches.token_ids[np.minimum(columns, len(branches.token_ids) - 1)]
        return PlacedBranches(
            row=ordered.astype(np.int64),
            slot=slot.astype(np.int64),
            base_len=branches.base_len[order].astype(np.int64),
            length=np.minimum(branches.num_tokens[order], self._branch_len).astype(np.int64),
            generation=branches.generation[order].astype(np.int64),
            token_ids=tokens.astype(np.int32, copy=False),
        )


class LandingBuffer:
    """The latest F branches of each row, tensors made once.

    Args:
        max_num_seqs: R, rows.
        num_branches: F, branches that are kept of a row; a new one takes the place of the oldest.
        branch_len: L, tokens that are kept of a branch.
        max_draft_tokens: K, tokens that a step takes at most.
        device: where the row state lives.
    """

    def __init__(
        self, max_num_seqs: int, num_branches: int, branch_len: int, max_draft_tokens: int, device: torch.device
    ) -> None:
        shape = (max_num_seqs, num_branches)
        self.branch_len = branch_len
        self._token_ids = torch.zeros(*shape, branch_len, dtype=torch.int32, device=device)  # [R, F, L]
        self._base_len = torch.zeros(shape, dtype=torch.int64, device=device)  # [R, F]
        self._length = torch.zeros(shape, dtype=torch.int64, device=device)  # [R, F], 0: no branch
        self._generation = torch.full(shape, -1, dtype=torch.int64, device=device)  # [R, F]
        self._slots = BranchSlots(max_num_seqs, num_branches, branch_len)
        self._branch_offsets = torch.arange(branch_len, device=device)  # [L]
        self._draft_offsets = torch.arange(max_draft_tokens, device=device)  # [K]

    def put(self, branches: BranchBatch) -> None:
        """See `Landing.put`."""
        if len(branches) == 0:
            return
        placed = self._slots.place(branches)
        where = (torch.from_numpy(placed.row), torch.from_numpy(placed.slot))
        self._token_ids[where] = torch.from_numpy(placed.token_ids)
        self._base_len[where] = torch.from_numpy(placed.base_len)
        self._length[where] = torch.from_numpy(placed.length)
        self._generation[where] = torch.from_numpy(placed.generation)

    def clear(self, rows: list[int]) -> None:
        """See `Landing.clear`."""
        if rows:
            self._length[torch.tensor(rows)] = 0

    def match(self, rows: RowState, idx_mapping: Tensor, max_draft_tokens: Tensor) -> Tensor:
        """Write drafts behind the committed tokens, from the branches that are still consistent with these.

        A branch is usable if it is of the row's generation, begins at or before the end of the committed tokens, goes
        on beyond it, and agrees with the tokens committed since. The one that goes on for longest is taken, and of
        equals the youngest. No loop over rows, and no shape that depends on what matches.

        Args:
            rows: token_ids receives the drafts; everything else is only read.
            idx_mapping: row of each entry, [num_reqs] int64; each row once.
            max_draft_tokens: at most this many for each entry, [num_reqs] int64, at most K, within the row's max_len.

        Returns:
            Draft tokens of each entry, [num_reqs] int64.
        """
        committed_len = rows.committed_len[idx_mapping]  # [num_reqs]
        tokens = self._token_ids[idx_mapping]  # [num_reqs, F, L]
        base_len = self._base_len[idx_mapping]  # [num_reqs, F]
        length = self._length[idx_mapping]  # [num_reqs, F]
        skip = committed_len[:, None] - base_len  # [num_reqs, F] tokens of the branch that are committed by now
        usable = (self._generation[idx_mapping] == rows.generation[idx_mapping][:, None]) & (skip >= 0)
        last = rows.max_model_len - 1
        columns = (base_len[:, :, None] + self._branch_offsets).clamp(max=last)  # [num_reqs, F, L]
        standing = rows.token_ids[idx_mapping[:, None, None], columns]  # [num_reqs, F, L]
        agrees = (standing == tokens) | (self._branch_offsets >= skip[:, :, None])
        usable &= agrees.all(dim=-1)
        remaining = torch.where(usable, length - skip, 0).clamp(min=0)  # [num_reqs, F]
        best = (remaining * (rows.max_model_len + 1) + base_len.clamp(max=rows.max_model_len)).argmax(dim=-1)
        best = torch.where((remaining > 0).any(dim=-1), best, 0)[:, None]  # [num_reqs, 1]
        draft_len = torch.minimum(remaining.gather(1, best).squeeze(1), max_draft_tokens)  # [num_reqs]

        # Places behind a draft are written with what they hold, so that the shape stays [num_reqs, K].
        source = (skip.gather(1, best) + self._draft_offsets).clamp(min=0, max=self.branch_len - 1)  # [num_reqs, K]
        target = (committed_len[:, None] + self._draft_offsets).clamp(max=last)  # [num_reqs, K]
        chosen = tokens.gather(1, best[:, :, None].expand(-1, 1, self.branch_len)).squeeze(1)  # [num_reqs, L]
        row_index = idx_mapping[:, None]  # [num_reqs, 1]
        kept = rows.token_ids[row_index, target]  # [num_reqs, K]
        written = torch.where(self._draft_offsets < draft_len[:, None], chosen.gather(1, source), kept)
        rows.token_ids[row_index, target] = written
        return draft_len
