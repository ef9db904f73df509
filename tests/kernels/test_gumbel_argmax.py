"""Draws in slots of several blocks against the argmax of scores and noise; and how many slots there are."""

from __future__ import annotations

import math

import pytest
import torch

from model_executor.kernels.gumbel_argmax import BLOCK, gumbel_argmax, num_slots_for
from model_executor.kernels.philox import gumbel_noise_ref
from model_executor.kernels.sampling_scores import ProcessedScores
from model_executor.sampling_flags import RANDOM, TOP_P
from tests.kernels.sampling_rows import drawn_tokens

NUM_BLOCKS = 10
VOCAB_SIZE = NUM_BLOCKS * BLOCK - 5
NUM_ROWS, WIDTH = 6, 2


@pytest.mark.parametrize("has_cuts", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 0.5])
@pytest.mark.parametrize("num_slots", [1, 3, 5, 10])
def test_the_best_slot_has_the_best_token(
    device: torch.device, dtype: torch.dtype, num_slots: int, temperature: float, has_cuts: bool
) -> None:
    generator = torch.Generator().manual_seed(num_slots)
    num_places = NUM_ROWS * WIDTH
    logits = torch.randn(num_places, VOCAB_SIZE, generator=generator)
    logits[::2] = logits[::2].round()  # many ties
    for place in range(NUM_BLOCKS):  # the largest logit is in every block of some place, and again in the next block
        logits[place, [place * BLOCK + 9, (place * BLOCK + BLOCK + 3) % VOCAB_SIZE]] = 6.0
    logits = logits.to(device, dtype)
    idx_mapping = torch.randperm(NUM_ROWS, generator=generator).to(device)
    row_of = idx_mapping.repeat_interleave(WIDTH)
    seed = torch.randint(-(2**62), 2**62, (NUM_ROWS,), generator=generator).to(device)
    committed_len = torch.randint(0, 9999, (NUM_ROWS,), generator=generator).to(device)
    temperatures = torch.full((NUM_ROWS,), temperature, device=device)
    scores = logits.float() / (temperature or 1.0)
    processed, is_kept = None, torch.ones_like(scores, dtype=torch.bool)
    if has_cuts:
        # Of the tokens at a cut the lower half is kept; above the highest cut most blocks have none.
        ids = torch.arange(VOCAB_SIZE, device=device)
        cut_value = torch.tensor([0.0, 1.0, 3.5], device=device).repeat(num_places // 3) / (temperature or 1.0)
        cut_token = torch.full((num_places,), VOCAB_SIZE // 2, dtype=torch.int32, device=device)
        is_kept = (scores > cut_value[:, None]) | ((scores == cut_value[:, None]) & (ids <= cut_token[:, None]))
        flags = torch.full((NUM_ROWS,), RANDOM | TOP_P, dtype=torch.int32, device=device)
        processed = ProcessedScores(flags, logits.float(), cut_value, cut_token)
    values = torch.empty(num_places, num_slots, device=device)
    tokens = torch.empty(num_places, num_slots, dtype=torch.int32, device=device)
    num_samples = torch.full((NUM_ROWS,), WIDTH, device=device)
    gumbel_argmax(logits, temperatures, seed, committed_len, idx_mapping, num_samples, values, tokens, processed)

    if temperature:
        position = (committed_len[idx_mapping][:, None] + torch.arange(WIDTH, device=device)).flatten()
        scores = scores + gumbel_noise_ref(seed[row_of], position, VOCAB_SIZE)
    scores = scores.masked_fill(~is_kept, -math.inf)
    assert drawn_tokens(values, tokens).tolist() == scores.argmax(dim=-1).tolist()
    torch.testing.assert_close(values.amax(dim=-1), scores.amax(dim=-1), rtol=1e-5, atol=1e-5)
    # Every slot has the best of its own blocks; one without anything to draw has a value below all others.
    slot_len = -(-NUM_BLOCKS // num_slots) * BLOCK
    for slot in range(num_slots):
        expected = scores[:, slot * slot_len : (slot + 1) * slot_len].amax(dim=-1)
        is_drawn = expected > -math.inf
        torch.testing.assert_close(values[is_drawn, slot], expected[is_drawn], rtol=1e-5, atol=1e-5)
        assert (values[~is_drawn, slot] < -3e38).all()


@pytest.mark.parametrize("vocab_size", [1, BLOCK, BLOCK + 1, VOCAB_SIZE, 32_000, 128_256, 151_936])
def test_every_block_is_in_a_slot_and_no_slot_is_empty(vocab_size: int) -> None:
    num_blocks = -(-vocab_size // BLOCK)
    max_places = 300
    num_allocated = max_places * num_slots_for(1, vocab_size)  # by DeviceSampler
    assert num_slots_for(1, vocab_size) == num_blocks
    for num_places in range(1, max_places + 1):
        num_slots = num_slots_for(num_places, vocab_size)
        each = -(-num_blocks // num_slots)  # as `gumbel_argmax` divides them
        assert (num_slots - 1) * each < num_blocks <= num_slots * each
        assert num_places * num_slots <= num_allocated
