"""A row draws the same token alone and among 63 others that need anything else."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from tests.sampling_reference import CPU, make_request
from verifier_svc.sampling.sampler import Sampler
from verifier_svc.sampling.state import SamplingState

NUM_ROWS = 64
MAX_LEN = 48


def random_parameters(rng: random.Random, vocab_size: int) -> dict[str, Any]:
    """Each feature on or off on its own."""
    params: dict[str, Any] = {"temperature": rng.choice([0.0, 0.0, 0.3, 0.8, 1.0, 1.7])}
    choices: dict[str, Any] = {
        "top_k": rng.randint(1, 12),
        "top_p": rng.uniform(0.2, 0.99),
        "min_p": rng.uniform(0.01, 0.3),
        "repetition_penalty": rng.uniform(0.8, 1.5),
        "presence_penalty": rng.uniform(-1, 1),
        "frequency_penalty": rng.uniform(-1, 1),
        "logit_bias": {rng.randrange(vocab_size): rng.uniform(-5, 5) for _ in range(3)},
        "bad_words": [[rng.randrange(vocab_size) for _ in range(rng.randint(1, 3))] for _ in range(4)],
        "min_tokens": 15,
    }
    chosen = {name: value for name, value in choices.items() if rng.random() < 0.35}
    return params | chosen | {"stop": [1, 2, 3], "max_tokens": None}


@pytest.mark.parametrize("vocab_size", [37, 512, 6144])
def test_row_alone_and_in_a_batch(vocab_size: int) -> None:
    rng = random.Random(vocab_size)
    generator = torch.Generator().manual_seed(vocab_size)
    state = SamplingState(NUM_ROWS, vocab_size, CPU)
    for row in range(NUM_ROWS):
        params = random_parameters(rng, vocab_size)
        state.set_row(row, make_request([0] * rng.randint(1, 20), rng.randrange(2**64), **params))
    token_ids = torch.randint(0, vocab_size, (NUM_ROWS, MAX_LEN), generator=generator, dtype=torch.int32)
    prompt_len = torch.randint(1, 20, (NUM_ROWS,), generator=generator)
    # Rounded as a bf16 model's logits are, so that equal values at a cut are common.
    logits = (torch.randn(NUM_ROWS, vocab_size, generator=generator) * 3).bfloat16().float()
    rows = torch.randperm(NUM_ROWS, generator=generator)
    positions = torch.randint(20, MAX_LEN, (NUM_ROWS,), generator=generator)
    sampler = Sampler(state)

    together = sampler.sample(logits, rows, positions, token_ids, prompt_len)
    for t in range(NUM_ROWS):
        one = slice(t, t + 1)
        assert torch.equal(sampler.sample(logits[one], rows[one], positions[one], token_ids, prompt_len), together[one])
    for size in (2, 3, 5, 17, 40):
        part = torch.randperm(NUM_ROWS, generator=generator)[:size]
        drawn = sampler.sample(logits[part], rows[part], positions[part], token_ids, prompt_len)
        assert torch.equal(drawn, together[part])


def test_repeating_a_call_repeats_its_tokens_and_leaves_the_logits() -> None:
    state = SamplingState(2, 64, CPU)
    state.set_row(0, make_request(repetition_penalty=1.3, logit_bias={3: 2.0}, top_p=0.9, min_p=0.01, bad_words=[[5]]))
    state.set_row(1, make_request(temperature=0.5, seed=9))
    logits = torch.randn(2, 64, generator=torch.Generator().manual_seed(0))
    before = logits.clone()
    token_ids = torch.arange(32, dtype=torch.int32).reshape(2, 16)
    arguments = (logits, torch.tensor([0, 1]), torch.tensor([7, 7]), token_ids, torch.tensor([3, 3]))
    first = Sampler(state).sample(*arguments)
    assert torch.equal(Sampler(state).sample(*arguments), first)
    assert torch.equal(logits, before)


def test_a_reused_row_keeps_nothing_of_its_last_request() -> None:
    rng = random.Random(3)
    used, fresh = SamplingState(1, 64, CPU), SamplingState(1, 64, CPU)
    for _ in range(20):
        used.set_row(0, make_request([0] * 9, **random_parameters(rng, 64)))
    for request in (make_request(seed=4), make_request(seed=5, temperature=0.0)):
        used.set_row(0, request)
        fresh.set_row(0, request)
        assert used.flags == fresh.flags
        for name, value in vars(fresh).items():
            if isinstance(value, torch.Tensor):
                assert torch.equal(getattr(used, name), value), name
        assert used.logit_bias == [None]
        assert used.bad_words == [None]
