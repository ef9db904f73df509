"""The kernels of a decode step, one after the other, against the torch methods that are their references."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from common.sampling_params import SamplingParams
from common.types import Request
from drafter_svc.methods.ngram import NgramMethod
from model_executor.kernels.commit_tokens import OUTCOME_HEADER, commit_tokens
from model_executor.kernels.gumbel_argmax import BLOCK, gumbel_argmax
from model_executor.kernels.ngram_search import ngram_search
from model_executor.kernels.philox import gumbel_noise_ref
from model_executor.kernels.select_drafts import select_drafts
from model_executor.kernels.step_inputs import (
    StepInputs,
    build_step_inputs,
    build_step_inputs_ref,
    make_step_inputs,
)
from model_executor.row_state import RowState
from verifier_svc.sampling.commit import match_and_commit
from verifier_svc.sampling.state import SamplingState

NUM_ROWS, MAX_LEN, VOCAB_SIZE, NUM_DRAFT = 9, 96, 1500, 4
LONGEST, SHORTEST = 4, 2


class Setup:
    """Rows with texts of few tokens, so that n-grams match; the last row has finished."""

    def __init__(self, seed: int, device: torch.device) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.rows = RowState(NUM_ROWS, MAX_LEN, 16, device)
        self.sampling = SamplingState(NUM_ROWS, VOCAB_SIZE, device)
        for row in range(NUM_ROWS):
            length = int(torch.randint(1, 80, (), generator=generator))
            text = torch.randint(0, 3, (length,), generator=generator).tolist()
            max_len = min(MAX_LEN, length + int(torch.randint(1, 9, (), generator=generator)))
            temperature = (0.0, 0.7, 1.3)[row % 3]
            params = SamplingParams(temperature=temperature)
            request = Request(
                f"r{row}", text, params, 2**64 - 1 - row, max_len, stop_token_ids=(1, 7) if row % 2 else ()
            )
            self.rows.set_row(row, text, length, length - 1, max_len)
            self.sampling.set_row(row, request)
        self.rows.finished[NUM_ROWS - 1] = True
        self.idx_mapping = torch.randperm(NUM_ROWS, generator=generator).to(device)
        self.max_draft = torch.randint(0, NUM_DRAFT + 1, (NUM_ROWS,), generator=generator).to(device)
        logits = torch.randn(NUM_ROWS * (NUM_DRAFT + 1), VOCAB_SIZE, generator=generator)
        logits[:, :3] += 6  # so that drafts are accepted
        self.logits = logits.to(device)


def draft_and_build(setup: Setup, device: torch.device) -> StepInputs:
    inputs = make_step_inputs(NUM_ROWS, NUM_DRAFT, device)
    inputs.idx_mapping.copy_(setup.idx_mapping)
    inputs.num_tokens.fill_(1)
    inputs.max_draft_tokens.copy_(setup.max_draft)
    rows = setup.rows
    ngram_search(
        rows.token_ids, rows.committed_len, rows.finished, inputs.idx_mapping, inputs.best_match, LONGEST, SHORTEST
    )
    select_drafts(rows, inputs, LONGEST, None, inputs.source)
    build_step_inputs(rows, inputs)
    return inputs


def reference_drafts(setup: Setup) -> Tensor:
    rows, idx_mapping = setup.rows, setup.idx_mapping
    room = rows.max_len[idx_mapping] - rows.committed_len[idx_mapping] - 1
    limit = torch.minimum(setup.max_draft, room).clamp(min=0) * ~rows.finished[idx_mapping]
    return NgramMethod(LONGEST, SHORTEST).propose(rows, idx_mapping, limit)


@pytest.mark.parametrize("seed", range(6))
def test_drafts_and_inputs(device: torch.device, seed: int) -> None:
    expected, found = Setup(seed, device), Setup(seed, device)
    draft_len = reference_drafts(expected)
    inputs = draft_and_build(found, device)
    assert torch.equal(inputs.draft_len, draft_len)
    rows, idx_mapping = expected.rows, expected.idx_mapping
    for entry, row in enumerate(idx_mapping.tolist()):
        end = int(rows.committed_len[row] + draft_len[entry])
        assert torch.equal(found.rows.token_ids[row, :end], rows.token_ids[row, :end])
        if rows.finished[row]:
            assert inputs.query_len[entry] == 0
            continue
        count = int(draft_len[entry]) + 1
        assert inputs.query_len[entry] == count
        assert inputs.seq_lens[entry] == end
        ids = inputs.input_ids[entry * inputs.width : entry * inputs.width + count]
        assert ids.tolist() == rows.token_ids[row, end - count : end].tolist()
    assert (inputs.best_match == -1).all()
    assert int(draft_len.sum()) > 0


def draw_and_commit(setup: Setup, inputs: StepInputs, device: torch.device, forced: Tensor | None = None) -> Tensor:
    num_blocks = -(-VOCAB_SIZE // BLOCK)
    values = torch.full((setup.logits.shape[0], num_blocks), float("nan"), device=device)
    tokens = torch.zeros(values.shape, dtype=torch.int32, device=device)
    rows, sampling = setup.rows, setup.sampling
    gumbel_argmax(
        setup.logits,
        sampling.temperature,
        sampling.seed,
        rows.committed_len,
        inputs.idx_mapping,
        inputs.num_samples,
        values,
        tokens,
    )
    outcome = torch.full((NUM_ROWS, OUTCOME_HEADER + inputs.width), -7, dtype=torch.int32, device=device)
    commit_tokens(rows, sampling.stop_token_ids, sampling.seed, inputs, values, tokens, outcome, forced)
    return outcome


@pytest.mark.parametrize("seed", range(6))
def test_draw_and_commit(device: torch.device, seed: int) -> None:
    expected, found = Setup(seed, device), Setup(seed, device)
    draft_len = reference_drafts(expected)
    rows, live = expected.rows, ~expected.rows.finished[expected.idx_mapping]
    idx_mapping = expected.idx_mapping
    places = torch.arange(NUM_DRAFT + 1, device=device)
    positions = (rows.committed_len[idx_mapping][:, None] + places).flatten()
    row_of = idx_mapping.repeat_interleave(NUM_DRAFT + 1)
    temperature = expected.sampling.temperature[row_of][:, None]
    noise = gumbel_noise_ref(expected.sampling.seed[row_of], positions, VOCAB_SIZE)
    scores = torch.where(temperature > 0, expected.logits / temperature.clamp(min=1e-6) + noise, expected.logits)
    drawn = scores.argmax(dim=-1).view(NUM_ROWS, NUM_DRAFT + 1)
    drawn = torch.where(places <= draft_len[:, None], drawn, -1)
    samples = torch.ones(int(live.sum()), dtype=torch.bool, device=device)
    result = match_and_commit(rows, expected.sampling, idx_mapping[live], draft_len[live], drawn[live], samples)

    outcome = draw_and_commit(found, draft_and_build(found, device), device)
    assert outcome[live, 0].tolist() == result.num_emitted.tolist()
    assert outcome[live, 1].tolist() == draft_len[live].tolist()
    assert outcome[live, 2].tolist() == result.num_accepted.tolist()
    assert outcome[live, 3].tolist() == result.finished.tolist()
    assert (outcome[~live, 0] == 0).all()
    for name in ("committed_len", "num_computed_tokens", "finished"):
        assert torch.equal(getattr(found.rows, name), getattr(rows, name)), name
    for row in range(NUM_ROWS):
        length = int(rows.committed_len[row])
        assert torch.equal(found.rows.token_ids[row, :length], rows.token_ids[row, :length])


def test_forced_acceptance_goes_on_with_the_claimed_text(device: torch.device) -> None:
    setup = Setup(0, device)
    inputs = draft_and_build(setup, device)
    before = setup.rows.committed_len.clone()
    forced = torch.ones(NUM_DRAFT, device=device)
    outcome = draw_and_commit(setup, inputs, device, forced)
    live = inputs.query_len > 0
    stopped = outcome[:, 3] == 1
    room = (setup.rows.max_len - before)[inputs.idx_mapping]
    whole = torch.minimum(inputs.draft_len + 1, room)
    assert torch.equal(outcome[live & ~stopped, 0].long(), whole[live & ~stopped])


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("is_mixed", [False, True])
def test_step_inputs_equal_their_reference(device: torch.device, seed: int, is_mixed: bool) -> None:
    setup = Setup(seed, device)
    rows = setup.rows
    generator = torch.Generator().manual_seed(seed)
    found, expected = (make_step_inputs(NUM_ROWS, NUM_DRAFT, device, 600 if is_mixed else None) for _ in range(2))
    num_tokens = torch.ones(NUM_ROWS, dtype=torch.int64)
    if is_mixed:  # some rows are in the middle of their prompts, some at their end
        for row in range(0, NUM_ROWS, 2):
            length = int(rows.committed_len[row])
            first = int(torch.randint(0, max(1, length // 2), (), generator=generator))
            rows.num_computed_tokens[row] = first
            entry = setup.idx_mapping.tolist().index(row)
            rest = length - first
            num_tokens[entry] = int(torch.randint((rest + 1) // 2, rest + 1, (), generator=generator))
    rows.block_table.copy_(torch.randint(1, 99, rows.block_table.shape, generator=generator))
    draft_len = torch.randint(0, NUM_DRAFT + 1, (NUM_ROWS,), generator=generator)
    ends = rows.num_computed_tokens[setup.idx_mapping].cpu() + num_tokens
    draft_len *= ends == rows.committed_len[setup.idx_mapping].cpu()
    for inputs in (found, expected):
        inputs.idx_mapping.copy_(setup.idx_mapping)
        inputs.num_tokens.copy_(num_tokens)
        inputs.draft_len.copy_(draft_len)
    build_step_inputs(rows, found)
    build_step_inputs_ref(rows, expected)
    names = ["query_start", "query_len", "seq_lens", "num_samples", "sample_index"]
    used = expected.query_len > 0
    if is_mixed:
        names += ["input_ids", "positions", "slot_mapping"]
        assert int((expected.slot_mapping >= 0).sum()) > 0
    for name in names:
        left, right = getattr(found, name), getattr(expected, name)
        if name == "seq_lens":
            left, right = left[used], right[used]
        assert torch.equal(left, right), name
    for entry in range(NUM_ROWS):
        start, count = int(expected.query_start[entry]), int(expected.query_len[entry])
        part = slice(start, start + count)
        assert torch.equal(found.input_ids[part], expected.input_ids[part])


def test_a_chunk_that_does_not_end_its_prefill_only_moves_on(device: torch.device) -> None:
    setup = Setup(1, device)
    rows = setup.rows
    row = 3
    rows.committed_len[row], rows.num_computed_tokens[row] = 60, 20
    inputs = make_step_inputs(NUM_ROWS, NUM_DRAFT, device, 64)
    inputs.idx_mapping.fill_(NUM_ROWS - 1)
    inputs.idx_mapping[0] = row
    inputs.num_tokens[0] = 30
    before = rows.token_ids.clone()
    build_step_inputs(rows, inputs)
    outcome = draw_and_commit(setup, inputs, device)
    assert (outcome[:, 0] == 0).all()
    assert int(rows.num_computed_tokens[row]) == 50
    assert int(rows.committed_len[row]) == 60
    assert torch.equal(rows.token_ids, before)
