"""Philox noise: exact integers, a sound tail, and no dependence on the batch."""

from __future__ import annotations

import pytest
import torch

from model_executor.kernels.philox import (
    _to_gumbel_,  # pyright: ignore[reportPrivateUsage]
    _to_uniform_,  # pyright: ignore[reportPrivateUsage]
    gumbel_noise_at_ref,
    gumbel_noise_ref,
    philox4x32_ref,
    random_words,
    uniform,
)

MASK = 0xFFFFFFFF


def philox_in_python(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """The definition of the paper, one word at a time, with Python's unbounded integers."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        low0, high0 = (c0 * 0xD2511F53) & MASK, (c0 * 0xD2511F53) >> 32
        low1, high1 = (c2 * 0xCD9E8D57) & MASK, (c2 * 0xCD9E8D57) >> 32
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B9) & MASK, (k1 + 0xBB67AE85) & MASK
    return c0, c1, c2, c3


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ],
)
def test_known_answers_of_random123(counter: str, key: str, expected: str) -> None:
    def words(text: str) -> list[int]:
        return [int(word, 16) for word in text.split()]

    assert philox4x32_ref(torch.tensor(words(counter)), torch.tensor(words(key))).tolist() == words(expected)


def test_words_follow_the_counter_layout() -> None:
    """Key = seed (low, high); counter = (v // 4, p, 0, 0); token v takes lane v % 4."""
    seeds = [0, 1, 2**32, 2**63 - 1, 2**64 - 1, 0x0123456789ABCDEF]
    positions = [0, 1, 7, 2**31, 2**32 - 1, 12345]
    vocab_size = 11  # not a multiple of four
    signed = [seed - 2**64 if seed >= 2**63 else seed for seed in seeds]
    words = random_words(torch.tensor(signed), torch.tensor(positions), vocab_size)
    assert words.shape == (6, vocab_size)
    for row, (seed, position) in enumerate(zip(seeds, positions, strict=True)):
        for token in range(vocab_size):
            lanes = philox_in_python((token // 4, position, 0, 0), (seed & MASK, seed >> 32))
            assert words[row, token].item() == lanes[token % 4]


def test_uniform_is_the_stated_function_of_the_word() -> None:
    seeds, positions = torch.arange(5), torch.arange(5) * 17
    words = random_words(seeds, positions, 1001)
    expected = ((words.float() + 0.5) * 2.0**-32).clamp(max=1 - 2.0**-24)
    assert torch.equal(uniform(seeds, positions, 1001), expected)


@pytest.mark.parametrize("vocab_size", [16, 37, 512])
def test_noise_does_not_depend_on_the_batch(vocab_size: int) -> None:
    """Bit for bit, for every batch size from 1 to 70 and every place in it."""
    generator = torch.Generator().manual_seed(0)
    seeds = torch.randint(-(2**62), 2**62, (70,), generator=generator)
    positions = torch.randint(0, 2**20, (70,), generator=generator)
    alone = torch.cat([gumbel_noise_ref(seeds[i : i + 1], positions[i : i + 1], vocab_size) for i in range(70)])
    for n in range(1, 71):
        assert torch.equal(gumbel_noise_ref(seeds[-n:], positions[-n:], vocab_size), alone[-n:])


def test_noise_at_chosen_tokens_is_the_noise_of_the_vocabulary() -> None:
    generator = torch.Generator().manual_seed(1)
    seeds, positions = torch.arange(9), torch.arange(9) + 100
    token_ids = torch.randint(0, 1003, (9, 33), generator=generator)
    expected = gumbel_noise_ref(seeds, positions, 1003).gather(1, token_ids)
    assert torch.equal(gumbel_noise_at_ref(seeds, positions, token_ids), expected)


def test_a_shorter_vocabulary_is_a_prefix() -> None:
    seeds, positions = torch.arange(3), torch.arange(3)
    longer = gumbel_noise_ref(seeds, positions, 1024)
    assert torch.equal(gumbel_noise_ref(seeds, positions, 13), longer[:, :13])


def test_noise_is_finite_at_both_ends() -> None:
    """Words 0 and 2^32 - 1: no infinity, and the large end reaches 22.9, not 16.6."""
    ends = torch.tensor([0, 1, MASK - 1, MASK], dtype=torch.float32)
    noise = _to_gumbel_(_to_uniform_(ends))
    assert torch.isfinite(noise).all()
    assert noise[0].item() == pytest.approx(22.874, abs=1e-3)
    assert noise[1].item() == pytest.approx(21.775, abs=1e-3)
    assert noise[3].item() == pytest.approx(-2.8115, abs=1e-3)


def test_noise_is_gumbel_also_far_in_the_tail() -> None:
    """Of 6.4e6 draws: mean and variance of a standard Gumbel, and as many beyond g = 10 as there must be."""
    noise = gumbel_noise_ref(torch.arange(50), torch.arange(50), 128_000).double()
    num_draws = noise.numel()
    assert noise.mean().item() == pytest.approx(0.5772157, abs=5 * 1.2825 / num_draws**0.5)
    assert noise.var().item() == pytest.approx(1.6449341, rel=0.01)
    for threshold in (5.0, 8.0, 10.0):
        expected = num_draws * -torch.expm1(-torch.exp(torch.tensor(-threshold, dtype=torch.float64))).item()
        assert abs((noise > threshold).sum().item() - expected) < 5 * expected**0.5


def test_neighbouring_seeds_positions_and_tokens_share_no_word() -> None:
    words = random_words(torch.arange(64), torch.zeros(64, dtype=torch.int64), 64)
    shifted = random_words(torch.zeros(64, dtype=torch.int64), torch.arange(64), 64)
    assert words.unique().numel() > 64 * 64 - 8  # 4096 words of 2^32: a collision is a 0.2% event
    assert torch.cat([words[1:], shifted[1:]]).unique().numel() > 2 * 63 * 64 - 8
