"""The logit processors on the device against those in torch."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from model_executor.kernels.process_logits import ProcessorParams, process_logits
from model_executor.sampling_flags import PROCESSED
from tests.kernels.sampling_rows import VOCAB_SIZE, SamplingStep, random_request
from tests.sampling_reference import make_request
from verifier_svc.sampling import processors


def run_kernels(step: SamplingStep) -> Tensor:
    state = step.state
    processed = torch.full(step.logits.shape, torch.nan, dtype=torch.float32, device=step.logits.device)
    params = ProcessorParams(
        state.row_flags,
        state.repetition_penalty,
        state.presence_penalty,
        state.frequency_penalty,
        state.min_len,
        state.stop_token_ids,
    )
    assert state.tables is not None
    process_logits(step.logits, step.inputs, step.rows, params, state.tables, processed)
    return processed


def run_reference(step: SamplingStep) -> Tensor:
    rows, place = step.rows, step.in_use
    at = processors.Positions(
        step.row_of[place], step.row_of[place].tolist(), step.position[place], rows.token_ids, rows.prompt_len
    )
    return processors.process_logits(step.logits[place].float(), step.reference, at)


def check(step: SamplingStep) -> int:
    """Compare; returns how many places were processed."""
    found, expected = run_kernels(step)[step.in_use], run_reference(step)
    flags = torch.tensor(step.reference.flags, device=found.device)[step.row_of[step.in_use]]
    is_processed = flags & PROCESSED != 0
    torch.testing.assert_close(found[is_processed], expected[is_processed], rtol=1e-6, atol=1e-5)
    assert found[~is_processed].isnan().all()  # rows that ask for nothing are left alone
    return int(is_processed.sum())


@pytest.mark.parametrize("seed", range(8))
def test_every_mix_of_processors(device: torch.device, dtype: torch.dtype, seed: int) -> None:
    step = SamplingStep(seed, device, dtype)
    assert check(step) > 0
    unused = run_kernels(step)[~step.in_use]
    assert unused.isnan().all()


@pytest.mark.parametrize("seed", range(3))
def test_counts_follow_the_commits_and_the_requests(device: torch.device, dtype: torch.dtype, seed: int) -> None:
    """Commit what stood as drafts, step after step; then give the rows to other requests."""
    step = SamplingStep(seed, device, dtype, features=("penalties",))
    rng = random.Random(seed)
    for _ in range(3):
        check(step)
        step.rows.committed_len += torch.randint(0, 3, step.rows.committed_len.shape).to(device)
        step.position = (
            step.rows.committed_len[step.inputs.idx_mapping][:, None] + torch.arange(step.inputs.width, device=device)
        ).flatten()
    for row in range(len(step.state.flags)):
        text = [rng.randrange(40) for _ in range(rng.randint(3, 40))]
        step.rows.set_row(row, text, 2, len(text) - 1, 160)
        step.give(row, random_request(rng, text[:2], ("penalties",)))
    committed = step.rows.committed_len[step.inputs.idx_mapping][:, None]
    step.position = (committed + torch.arange(step.inputs.width, device=device)).flatten()
    assert check(step) > 0
    assert step.state.tables is not None
    assert step.state.tables.token_counts.shape == (len(step.state.flags), VOCAB_SIZE)


def test_a_bad_word_does_not_match_before_the_start_of_the_prompt(device: torch.device, dtype: torch.dtype) -> None:
    """Before a row's text stand the zeros behind another row's."""
    step = SamplingStep(3, device, dtype, features=())
    for row in range(len(step.state.flags) - 1):
        step.rows.set_row(row, [1], 1, 0, 160)
        step.give(row, make_request([1], bad_words=[[0, 1, 6], [1, 7]]))
    step.inputs.num_samples.clamp_(max=1)
    step.logits.zero_()
    processed = run_kernels(step)[0 :: step.inputs.width][step.inputs.num_samples > 0]
    assert len(processed) > 3
    assert (processed[:, 6] == 0).all()
    assert (processed[:, 7] == -torch.inf).all()
