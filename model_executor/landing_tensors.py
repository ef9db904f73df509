"""Branches of drafters in device memory, one record a branch, so that a row's branches arrive in one write."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

BASE_LEN, LENGTH, GENERATION, HEADER = 0, 1, 2, 3
"""Where a record holds what: its tokens begin at HEADER."""

NO_DRAFT, FROM_BRANCH, FROM_NGRAM = 0, 1, 2
"""Where the draft of an entry comes from."""


@dataclass(frozen=True, slots=True)
class LandingTensors:
    """The latest F branches of each row, of at most L tokens, at an address that stays."""

    records: Tensor  # [R, F, HEADER + L] int64; a length of 0 is no branch

    @property
    def num_branches(self) -> int:
        """F."""
        return self.records.shape[1]

    @property
    def branch_len(self) -> int:
        """L."""
        return self.records.shape[2] - HEADER


def make_landing_tensors(max_num_seqs: int, num_branches: int, branch_len: int, device: torch.device) -> LandingTensors:
    """Records without a branch for `max_num_seqs` rows."""
    shape = (max_num_seqs, num_branches, HEADER + branch_len)
    return LandingTensors(torch.zeros(shape, dtype=torch.int64, device=device))
