"""The whole chain of sampling kernels against the torch sampler, on random rows of every mix of features."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from model_executor.kernels.philox import gumbel_noise_ref
from model_executor.sampling_flags import RANDOM, TOP_P
from tests.kernels.sampling_rows import VOCAB_SIZE, SamplingStep, drawn_tokens
from tests.sampling_reference import make_request
from verifier_svc.sampling.device_sampler import DeviceSampler
from verifier_svc.sampling.sampler import Sampler


def sampler_of(step: SamplingStep) -> DeviceSampler:
    return DeviceSampler(step.state, step.rows, step.logits.shape[0] + 5)


def reference_tokens(step: SamplingStep) -> Tensor:
    place = step.in_use
    return Sampler(step.reference).sample(
        step.logits[place].float(), step.row_of[place], step.position[place], step.rows.token_ids, step.rows.prompt_len
    )


@pytest.mark.parametrize("seed", range(12))
def test_same_tokens_as_the_torch_sampler(device: torch.device, dtype: torch.dtype, seed: int) -> None:
    step = SamplingStep(100 + seed, device, dtype, num_rows=24)
    draws = sampler_of(step).processed(step.logits, step.inputs)
    found = drawn_tokens(draws.values, draws.tokens)[step.in_use]
    expected = reference_tokens(step)
    assert len(expected) > 10
    # A nucleus may end one token earlier or later where its weight is top_p to within rounding; no seed here has that.
    flags = torch.tensor(step.reference.flags, device=device)[step.row_of[step.in_use]]
    assert (flags & TOP_P != 0).any()
    assert found.tolist() == expected.tolist()


@pytest.mark.parametrize("seed", range(3))
def test_plain_rows_draw_the_same_in_both_variants(device: torch.device, dtype: torch.dtype, seed: int) -> None:
    step = SamplingStep(seed, device, dtype, num_rows=12, features=("temperature",))
    assert step.state.is_plain(range(12))
    sampler = sampler_of(step)
    plain = sampler.plain(step.logits, step.inputs)
    values, tokens = plain.values[step.in_use].clone(), plain.tokens[step.in_use].clone()  # the buffers are shared
    draws = sampler.processed(step.logits, step.inputs)
    assert torch.equal(draws.values[step.in_use], values)
    assert torch.equal(draws.tokens[step.in_use], tokens)
    assert drawn_tokens(draws.values, draws.tokens)[step.in_use].tolist() == reference_tokens(step).tolist()


@pytest.mark.filterwarnings("ignore:All-NaN")  # of the interpreter
def test_rows_without_a_number_draw_some_token(device: torch.device, dtype: torch.dtype) -> None:
    step = SamplingStep(4, device, dtype)
    step.logits[0::3] = torch.nan
    step.logits[1::3] = -torch.inf
    draws = sampler_of(step).processed(step.logits, step.inputs)
    tokens = draws.tokens[step.in_use]
    assert ((tokens >= 0) & (tokens < VOCAB_SIZE)).all()


def test_noise_reaches_the_draw(device: torch.device, dtype: torch.dtype) -> None:
    """What the comparison above would miss if both sides left the noise out."""
    step = SamplingStep(5, device, dtype, features=("temperature",))
    flags = torch.tensor(step.reference.flags, device=device)[step.row_of]
    is_random = (flags & RANDOM != 0) & step.in_use
    assert is_random.any()
    draws = sampler_of(step).plain(step.logits, step.inputs)
    scaled = step.logits.float() / step.state.temperature[step.row_of].clamp(min=0.1)[:, None]
    noise = gumbel_noise_ref(step.state.seed[step.row_of], step.position, VOCAB_SIZE)
    best = (scaled + noise).amax(dim=-1)
    torch.testing.assert_close(draws.values.amax(dim=-1)[is_random], best[is_random], rtol=1e-5, atol=1e-5)


def test_of_equal_tokens_those_behind_the_cut_are_never_drawn(device: torch.device, dtype: torch.dtype) -> None:
    step = SamplingStep(6, device, dtype, num_rows=24)
    for row in range(24):
        step.give(row, make_request([0], seed=row, temperature=1.0, top_k=2))
    step.logits.zero_()
    draws = sampler_of(step).processed(step.logits, step.inputs)
    found = drawn_tokens(draws.values, draws.tokens)[step.in_use]
    assert set(found.tolist()) == {0, 1}
