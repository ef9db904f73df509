"""Draws from a nucleus that nobody has looked for, against the best of the tokens that the ranking keeps."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from model_executor.kernels.gumbel_argmax import BLOCK, gumbel_argmax
from model_executor.kernels.philox import gumbel_noise_ref
from model_executor.kernels.top_k_cut import SHORT, top_k_cut
from model_executor.kernels.top_p_draw import top_p_draw
from model_executor.kernels.truncation import TruncationParams, make_truncation_scratch
from model_executor.sampling_flags import TOP_P
from tests.kernels.sampling_rows import VOCAB_SIZE, drawn_tokens, random_logits
from tests.kernels.truncation_rows import (
    LARGE_VOCAB_SIZE,
    TOP_PS,
    flat_logits,
    kept_by_reference,
    make_params,
    near_limit,
    peaked_logits,
    places_of,
    random_params,
    rows_of,
    scaled_by,
)

# Redraws over lists, short lists of top_k cut at once; all of top_k searched; and redraws over all tokens.
SIZES = [(SHORT, 4096), (1, 4096), (1, 20)]


@dataclass(frozen=True, slots=True)
class Noise:
    """What keys the noise of every place."""

    seed: Tensor  # [P] int64
    position: Tensor  # [P] int64

    @classmethod
    def random(cls, num_places: int, generator: torch.Generator, device: torch.device) -> Noise:
        seed = torch.randint(-(2**62), 2**62, (num_places,), generator=generator)
        return cls(seed.to(device), torch.randint(0, 9999, (num_places,), generator=generator).to(device))

    def values(self, vocab_size: int) -> Tensor:
        """[P, vocab_size] float32."""
        return gumbel_noise_ref(self.seed, self.position, vocab_size)


def draw(
    logits: Tensor, params: TruncationParams, noise: Noise, short: int = SHORT, capacity: int = 4096
) -> tuple[Tensor, Tensor]:
    """Tokens before and after `top_p_draw`, [P] int64 each."""
    (num_places, vocab_size), device = logits.shape, logits.device
    inputs, scores = places_of(logits, params)
    scratch = make_truncation_scratch(num_places, vocab_size, device, capacity)
    values = torch.empty(num_places, -(-vocab_size // BLOCK), device=device)
    tokens = torch.empty_like(values, dtype=torch.int32)
    seed, position = noise.seed, noise.position
    top_k_cut(logits, inputs, params, scores, scratch, short)
    gumbel_argmax(
        logits, params.temperature, seed, position, inputs.idx_mapping, inputs.num_samples, values, tokens, scores
    )
    first = drawn_tokens(values, tokens)
    top_p_draw(logits, inputs, params, seed, position, scores, scratch, values, tokens)
    return first, drawn_tokens(values, tokens)


def expected_draw(logits: Tensor, params: TruncationParams, noise: Noise) -> Tensor:
    """The best of what the ranking keeps, [P] int64."""
    scaled = scaled_by(logits, params)
    values = scaled + noise.values(scaled.shape[1])
    return values.masked_fill(~kept_by_reference(scaled, params), -math.inf).argmax(-1)


def num_redraws(scaled: Tensor, noise: Tensor, num_kept: int) -> int:
    """How often a draw among what stands before the last one is needed until one is among the `num_kept` first."""
    order = torch.sort(scaled, descending=True, stable=True).indices  # [VOCAB_SIZE]
    values = (scaled + noise)[order]
    length, rounds = VOCAB_SIZE, -1
    while True:
        length = int(values[:length].argmax())
        rounds += 1
        if length < num_kept:
            return rounds


@pytest.mark.parametrize(("short", "capacity"), SIZES)
@pytest.mark.parametrize("seed", range(4))
def test_draws_the_best_of_the_kept(
    device: torch.device, dtype: torch.dtype, seed: int, short: int, capacity: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = random_logits(60, generator).to(device, dtype)
    params = random_params(60, generator, device, TOP_PS[1:])
    noise = Noise.random(60, generator, device)
    first, found = draw(logits, params, noise, short, capacity)
    differs = found != expected_draw(logits, params, noise)
    assert not (differs & ~near_limit(scaled_by(logits, params), params)).any()
    assert int(differs.sum()) <= 1
    has_top_p = params.flags & TOP_P != 0
    assert (first != found)[has_top_p].sum() >= 4
    assert torch.equal(first[~has_top_p], found[~has_top_p])


@pytest.mark.parametrize("capacity", [4096, 20])
def test_draws_again_and_again(device: torch.device, dtype: torch.dtype, capacity: int) -> None:
    generator = torch.Generator().manual_seed(1)
    logits = 0.05 * torch.randn(24, VOCAB_SIZE, generator=generator).to(device, dtype)
    logits[12:] = 0.0  # all equal: ranked by id
    params = make_params(24, device, top_p=0.05)
    noise = Noise.random(24, generator, device)
    first, found = draw(logits, params, noise, capacity=capacity)
    kept = kept_by_reference(scaled_by(logits, params), params)
    num_kept = kept.sum(-1)
    near = near_limit(scaled_by(logits, params), params)  # all that are equal are: 75 of 1500 are 0.05
    assert (num_kept[12:] - 75).abs().max() <= 1
    assert not near[:12].all()
    rounds = [num_redraws(logits[p].float(), noise.values(VOCAB_SIZE)[p], int(num_kept[p])) for p in range(24)]
    assert max(rounds[:12]) >= 3
    assert max(rounds[12:]) >= 3
    assert not kept.gather(1, first[:, None]).all()
    expected = expected_draw(logits, params, noise)
    assert found[~near].tolist() == expected[~near].tolist()
    # One more or one less of equal tokens is kept by rounding, and is hardly ever the one that is drawn.
    assert found[12:].tolist() == expected[12:].tolist()


@pytest.mark.parametrize("capacity", [4096, 10_000])
def test_a_vocabulary_that_takes_several_turns(device: torch.device, dtype: torch.dtype, capacity: int) -> None:
    """Flat rows, with top_k too, and peaked ones: lists and all tokens are gone through in turns."""
    generator = torch.Generator().manual_seed(6)
    logits = torch.cat([flat_logits(4, generator), peaked_logits(2, generator)]).to(device, dtype)
    params = make_params(
        6,
        device,
        top_k=torch.tensor([LARGE_VOCAB_SIZE] * 3 + [30_000] + [LARGE_VOCAB_SIZE] * 2),
        top_p=torch.tensor([0.05, 0.5, 0.5, 0.3, 0.2, 0.2]),
        vocab_size=LARGE_VOCAB_SIZE,
    )
    noise = Noise.random(6, generator, device)
    first, found = draw(logits, params, noise, capacity=capacity)
    assert (first != found).sum() >= 4
    # A flat nucleus may end one token earlier or later by rounding; that one is not drawn here.
    assert found.tolist() == expected_draw(logits, params, noise).tolist()


def test_half_of_two_equal_tokens_is_one(device: torch.device) -> None:
    logits = torch.full((30, VOCAB_SIZE), -math.inf, device=device)
    logits[:, [7, 1400]] = 1.0
    noise = Noise.random(30, torch.Generator().manual_seed(2), device)
    first, found = draw(logits, make_params(30, device, top_p=0.5), noise)
    assert set(first.tolist()) == {7, 1400}
    assert set(found.tolist()) == {7}


@pytest.mark.parametrize("capacity", [4096, 20])
def test_a_place_does_not_depend_on_its_company(device: torch.device, dtype: torch.dtype, capacity: int) -> None:
    generator = torch.Generator().manual_seed(9)
    logits = random_logits(8, generator).to(device, dtype)
    params = random_params(8, generator, device)
    noise = Noise.random(8, generator, device)
    _, together = draw(logits, params, noise, capacity=capacity)
    for place in range(8):
        one = slice(place, place + 1)
        alone = Noise(noise.seed[one], noise.position[one])
        _, found = draw(logits[one], rows_of(params, one), alone, capacity=capacity)
        assert found.item() == together[place].item()


@pytest.mark.filterwarnings("ignore:All-NaN")  # of the interpreter
@pytest.mark.parametrize("top_k", [VOCAB_SIZE, 5, VOCAB_SIZE - 1])
def test_rows_without_a_number_end(device: torch.device, dtype: torch.dtype, top_k: int) -> None:
    logits = torch.full((6, VOCAB_SIZE), -math.inf, device=device, dtype=dtype)
    logits[1::3] = torch.nan
    logits[2::3, ::2] = torch.nan
    params = make_params(6, device, top_k=top_k, top_p=0.3)
    _, found = draw(logits, params, Noise.random(6, torch.Generator(), device))
    assert ((found >= 0) & (found < VOCAB_SIZE)).all()


def test_a_number_among_others_that_are_none_is_drawn(device: torch.device) -> None:
    logits = torch.full((2, VOCAB_SIZE), torch.nan, device=device)
    logits[:, [40, 900]] = torch.tensor([5.0, -5.0], device=device)
    _, found = draw(logits, make_params(2, device, top_p=0.5), Noise.random(2, torch.Generator(), device))
    assert found.tolist() == [40, 40]
