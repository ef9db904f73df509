"""Log probabilities on the device against those in torch."""

from __future__ import annotations

import pytest
import torch

from model_executor.kernels.token_logprobs import PACKED_WIDTH, make_logprob_scratch, token_logprobs
from tests.kernels.sampling_rows import VOCAB_SIZE, StepPlaces, random_logits
from verifier_svc.sampling.device_sampler import unpack_logprobs
from verifier_svc.sampling.logprobs import gather_logprobs

NUM_REQS, WIDTH, HEADER = 6, 2, 4


@pytest.mark.parametrize("seed", range(4))
def test_drawn_and_best_tokens(device: torch.device, dtype: torch.dtype, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = random_logits(NUM_REQS * WIDTH, generator).to(device, dtype)
    num_logprobs = [0, 20, -1, 5, 1, 20]
    outcome = torch.randint(0, VOCAB_SIZE, (NUM_REQS, HEADER + WIDTH), generator=generator, dtype=torch.int32)
    num_samples = torch.tensor([2, 1, 2, 2, 0, 2])
    inputs = StepPlaces(WIDTH, torch.randperm(NUM_REQS, generator=generator).to(device), num_samples.to(device))
    # Drawn are tokens of any rank, and at the first place the best one.
    outcome[0, HEADER] = logits[0].argmax()
    packed = torch.full((NUM_REQS * WIDTH, PACKED_WIDTH), -7, dtype=torch.int32, device=device)
    token_logprobs(
        logits,
        inputs,
        torch.tensor(num_logprobs, dtype=torch.int32, device=device),
        outcome.to(device)[:, HEADER:],
        make_logprob_scratch(NUM_REQS * WIDTH, VOCAB_SIZE, device),
        packed,
    )
    host = packed.cpu().numpy()
    num_checked = 0
    for entry, row in enumerate(inputs.idx_mapping.tolist()):
        for offset in range(WIDTH):
            place, count = entry * WIDTH + offset, num_logprobs[row]
            if offset >= num_samples[entry] or count < 0:
                assert (host[place] == -7).all()
                continue
            chosen = outcome[entry, HEADER + offset].long().reshape(1).to(device)
            expected = gather_logprobs(logits[place : place + 1].float(), chosen, count)[0]
            found = unpack_logprobs(host, place, count, VOCAB_SIZE)
            assert found.rank == expected.rank
            assert found.token_ids == expected.token_ids
            torch.testing.assert_close(found.logprobs, expected.logprobs, rtol=1e-5, atol=1e-5)
            num_checked += 1
    assert num_checked >= 5


def test_a_list_ends_with_the_vocabulary(device: torch.device) -> None:
    logits = torch.tensor([[0.5, 2.0, 0.5]], device=device)
    inputs = StepPlaces(
        1, torch.zeros(1, dtype=torch.int64, device=device), torch.ones(1, dtype=torch.int64).to(device)
    )
    packed = torch.zeros(1, PACKED_WIDTH, dtype=torch.int32, device=device)
    counts = torch.tensor([20], dtype=torch.int32, device=device)
    drawn = torch.tensor([[2]], dtype=torch.int32, device=device)
    token_logprobs(logits, inputs, counts, drawn, make_logprob_scratch(1, 3, device), packed)
    found = unpack_logprobs(packed.cpu().numpy(), 0, 20, 3)
    assert found.token_ids == [2, 1, 0, 2]
    assert found.rank == 2
