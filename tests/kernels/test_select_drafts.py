"""The choice of drafts on the device against its reference, and against the methods that a CPU uses."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from torch import Tensor

from common.draft_exchange import Branch, BranchBatch
from drafter_svc.methods.ngram import NgramMethod
from model_executor.kernels.ngram_search import ngram_search
from model_executor.kernels.select_drafts import select_drafts, select_drafts_ref
from model_executor.landing_tensors import (
    BASE_LEN,
    FROM_BRANCH,
    FROM_NGRAM,
    GENERATION,
    HEADER,
    LENGTH,
    NO_DRAFT,
    LandingTensors,
    make_landing_tensors,
)
from model_executor.row_state import RowState
from verifier_svc.drafts.landing import LandingBuffer

NUM_ROWS, MAX_LEN, NUM_DRAFT, NUM_BRANCHES, BRANCH_LEN = 11, 96, 4, 3, 10
LONGEST, SHORTEST = 3, 2  # the longest is shorter than a draft, so that a draft can be longer than its match
PAD_ROW = NUM_ROWS  # fills unused entries; the landing buffer does not know it


@dataclass(frozen=True)
class Inputs:
    """The part of a step's inputs that drafts are chosen from."""

    width: int
    idx_mapping: Tensor
    num_tokens: Tensor
    max_draft_tokens: Tensor
    best_match: Tensor
    period: Tensor
    draft_len: Tensor


class Setup:
    """Rows of two tokens only, so that branches and n-grams are often right for a while.

    One row has finished, one is in the middle of its prefill, and the last two entries are not used.
    """

    def __init__(self, seed: int, device: torch.device, num_branches: int = NUM_BRANCHES) -> None:
        self.rng = np.random.default_rng(seed)
        self.device = device
        self.rows = RowState(NUM_ROWS + 1, MAX_LEN, 16, device)
        self.rows.token_ids.fill_(7)
        self.rows.committed_len[PAD_ROW] = 1
        for row in range(NUM_ROWS):
            length = int(self.rng.integers(1, 81))
            text: list[int] = self.rng.integers(0, 2, length).tolist()
            max_len = min(MAX_LEN, length + int(self.rng.integers(1, 9)))
            self.rows.set_row(row, text, length, length - 1, max_len, generation=int(self.rng.integers(0, 2)))
        self.rows.finished[3] = True
        self.rows.num_computed_tokens[5] = 0  # it has a prompt of more than one token below
        if int(self.rows.committed_len[5]) == 1:
            self.rows.committed_len[5] = 2
        order: list[int] = self.rng.permutation(NUM_ROWS).tolist()

        def column(values: list[int]) -> Tensor:
            return torch.tensor(values, dtype=torch.int64, device=device)

        count = NUM_ROWS + 2
        self.inputs = Inputs(
            width=NUM_DRAFT + 1,
            idx_mapping=column([*order, PAD_ROW, PAD_ROW]),
            num_tokens=column([1] * NUM_ROWS + [0, 0]),
            max_draft_tokens=column([*self.rng.integers(0, NUM_DRAFT + 1, NUM_ROWS).tolist(), 0, 0]),
            best_match=column([-1] * count),
            period=column([-7] * count),
            draft_len=column([-7] * count),
        )
        self.source = torch.full((count,), -7, dtype=torch.int32, device=device)
        self.branches = self._branches()
        self.landing = _landed(self.branches, num_branches, device)

    def search(self) -> None:
        rows, inputs = self.rows, self.inputs
        ngram_search(
            rows.token_ids, rows.committed_len, rows.finished, inputs.idx_mapping, inputs.best_match, LONGEST, SHORTEST
        )

    def limits(self) -> Tensor:
        """Draft tokens that each entry may have, [B] int64."""
        rows, index = self.rows, self.inputs.idx_mapping
        room = (rows.max_len - rows.committed_len - 1)[index]
        samples = rows.num_computed_tokens[index] + self.inputs.num_tokens >= rows.committed_len[index]
        return torch.minimum(self.inputs.max_draft_tokens, room).clamp(min=0) * samples * ~rows.finished[index]

    def _branches(self) -> list[Branch]:
        """Most go on with the row's text for a while; all kinds of base_len, also in the future."""
        branches: list[Branch] = []
        for row in range(NUM_ROWS - 1):  # one row has none
            length = int(self.rows.committed_len[row])
            text: list[int] = self.rows.token_ids[row, :length].tolist()
            for _ in range(int(self.rng.integers(0, 5))):
                base_len = max(0, length + int(self.rng.integers(-6, 3)))
                tokens = (text[base_len:] + self.rng.integers(0, 2, 12).tolist())[: int(self.rng.integers(1, 13))]
                if self.rng.random() < 0.2:
                    tokens[0] = 1 - tokens[0]
                branches.append(Branch(row, int(self.rng.integers(0, 2)), base_len, tokens))
        branches.append(Branch(0, int(self.rows.generation[0]), 2**31 - 1, [1]))
        return branches


def _landed(branches: list[Branch], num_branches: int, device: torch.device) -> LandingTensors:
    """Written out in plain Python: the last F branches of each row, in slots in turn."""
    landing = make_landing_tensors(NUM_ROWS, num_branches, BRANCH_LEN, device)
    count = [0] * NUM_ROWS
    for branch in branches:
        tokens = branch.token_ids[:BRANCH_LEN]
        record = landing.records[branch.row, count[branch.row] % num_branches]
        record[BASE_LEN], record[LENGTH], record[GENERATION] = branch.base_len, len(tokens), branch.generation
        record[HEADER : HEADER + len(tokens)] = torch.tensor(tokens)
        count[branch.row] += 1
    return landing


@pytest.mark.parametrize("num_branches", [1, 3, 4])
@pytest.mark.parametrize("has_branches", [True, False])
@pytest.mark.parametrize("seed", range(8))
def test_equals_the_reference(device: torch.device, seed: int, has_branches: bool, num_branches: int) -> None:
    expected, found = Setup(seed, device, num_branches), Setup(seed, device, num_branches)
    for setup, select in ((expected, select_drafts_ref), (found, select_drafts)):
        setup.search()
        select(setup.rows, setup.inputs, LONGEST, setup.landing if has_branches else None, setup.source)
    assert torch.equal(found.inputs.draft_len, expected.inputs.draft_len)
    assert torch.equal(found.inputs.period, expected.inputs.period)
    assert torch.equal(found.inputs.best_match, expected.inputs.best_match)
    assert torch.equal(found.source, expected.source)
    assert torch.equal(found.rows.token_ids, expected.rows.token_ids)
    assert (found.inputs.best_match == -1).all()
    assert FROM_NGRAM in found.source
    assert has_branches or FROM_BRANCH not in found.source


@pytest.mark.parametrize("has_fallback", [True, False])
@pytest.mark.parametrize("seed", range(12))
def test_equals_the_methods_of_a_cpu(device: torch.device, seed: int, has_fallback: bool) -> None:
    """Drafts and their sources are what the landing buffer and, where it has nothing, the n-gram method claim."""
    cpu = Setup(seed, torch.device("cpu"))
    rows, index, limits = cpu.rows, cpu.inputs.idx_mapping[:NUM_ROWS], cpu.limits()[:NUM_ROWS]
    buffer = LandingBuffer(NUM_ROWS, NUM_BRANCHES, BRANCH_LEN, NUM_DRAFT, torch.device("cpu"))
    buffer.put(BranchBatch.of(cpu.branches))
    draft_len = buffer.match(rows, index, limits)
    source = torch.where(draft_len > 0, FROM_BRANCH, NO_DRAFT)
    missing = (draft_len == 0).nonzero().squeeze(-1)
    if has_fallback:
        draft_len[missing] = NgramMethod(LONGEST, SHORTEST).propose(rows, index[missing], limits[missing])
        source[missing] = torch.where(draft_len[missing] > 0, FROM_NGRAM, NO_DRAFT)

    setup = Setup(seed, device)
    if has_fallback:
        setup.search()
    select_drafts(setup.rows, setup.inputs, LONGEST, setup.landing, setup.source)
    assert setup.inputs.draft_len.tolist() == [*draft_len.tolist(), 0, 0]
    assert setup.source.tolist() == [*source.tolist(), NO_DRAFT, NO_DRAFT]
    assert torch.equal(setup.rows.token_ids[:NUM_ROWS].cpu(), rows.token_ids[:NUM_ROWS])
    entry_of_finished = setup.inputs.idx_mapping.tolist().index(3)
    assert setup.inputs.draft_len[entry_of_finished] == 0


def test_every_kind_of_entry_is_among_the_tested_ones(device: torch.device) -> None:
    sources: list[int] = []
    for seed in range(12):
        setup = Setup(seed, device)
        setup.search()
        select_drafts_ref(setup.rows, setup.inputs, LONGEST, setup.landing, setup.source)
        sources += setup.source.tolist()
    assert min(sources.count(kind) for kind in (NO_DRAFT, FROM_BRANCH, FROM_NGRAM)) >= 12


def test_a_step_of_one_token_a_row_has_no_drafts(device: torch.device) -> None:
    setup = Setup(1, device)
    inputs = setup.inputs
    setup.search()
    inputs.max_draft_tokens.zero_()
    before = setup.rows.token_ids.clone()
    select_drafts(setup.rows, replace(inputs, width=1), LONGEST, setup.landing, setup.source)
    assert (inputs.draft_len == 0).all()
    assert (setup.source == NO_DRAFT).all()
    assert torch.equal(setup.rows.token_ids, before)
