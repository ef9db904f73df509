"""Philox4x32-10 and the Gumbel noise made from it, in plain torch on any device.

The noise of token v at absolute position p of a request is a function of (seed, p, v) alone, never of a step or of a
place in a batch. Verifier and draft model therefore see the same noise, and a sampled token does not depend on who else
is in the batch.

Key = the 64-bit seed (low word, high word). Counter = (v // 4, p, 0, 0), and token v takes lane v % 4 of the four
output words, so that one call serves four tokens (docs/adr/0001-philox-lanes.md).

The integers and the uniforms are exact: another implementation must produce the same bits. The two logarithms may
differ between devices in the last bit.

Source: Salmon, Moraes, Dror, Shaw: Parallel random numbers: as easy as 1, 2, 3 (SC 2011).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

LANES: Final = 4
NUM_ROUNDS: Final = 10
WORD_MASK: Final = 0xFFFFFFFF

_MULTIPLIERS: Final = (0xD2511F53, 0xCD9E8D57)  # of words 0 and 2
_KEY_STEPS: Final = (0x9E3779B9, 0xBB67AE85)  # golden ratio, sqrt(3) - 1

# Rows are done in chunks of at most this many counters: the scratch of the rounds stays below 1 MiB at any batch, and a
# call stays below the size at which torch splits it over threads, which at this size costs more than it gives.
_CHUNK_WORDS: Final = 16384

_UNIFORM_SCALE: Final = 2.0**-32
_UNIFORM_MAX: Final = 1.0 - 2.0**-24  # the float32 below 1


def philox4x32_ref(counter: Tensor, key: Tensor) -> Tensor:
    """Philox4x32-10.

    Args:
        counter: four 32-bit words in the last dimension, [..., 4] int64, each in [0, 2^32).
        key: two 32-bit words in the last dimension, [..., 2] int64; leading dimensions broadcast with `counter`'s.

    Returns:
        Four 32-bit words, [..., 4] int64.
    """
    shape = torch.broadcast_shapes(counter.shape[:-1], key.shape[:-1])
    words = counter.expand(*shape, 4).reshape(-1, 4).T.unsqueeze(1)  # [4, 1, N]
    keys = _round_keys(key.expand(*shape, 2).reshape(-1, 2).T.unsqueeze(1))  # ten of [2, 1, N]
    lanes = _rounds(words[0::2].clone(), words[1::2].clone(), keys)  # four of [1, N]
    return torch.cat(lanes).T.reshape(*shape, 4)


def random_words(seeds: Tensor, positions: Tensor, vocab_size: int) -> Tensor:
    """Random 32-bit words of every token of the vocabulary.

    Args:
        seeds: unsigned 64-bit seeds kept in int64, [n].
        positions: index in prompt + output of the token to draw, [n] int64, each in [0, 2^32).
        vocab_size: V.

    Returns:
        [n, V] int64, each in [0, 2^32).
    """
    return _vocabulary_words(seeds, positions, vocab_size, torch.int64)


def uniform(seeds: Tensor, positions: Tensor, vocab_size: int) -> Tensor:
    """Uniforms in (0, 1) of every token of the vocabulary, [n, V] float32; arguments as in `random_words`.

    A word x becomes (x + 0.5) * 2^-32 in float32. Small values keep 24 significant bits, and they are the ones that
    become large noise; values that would round to 1 become 1 - 2^-24.
    """
    return _to_uniform_(_vocabulary_words(seeds, positions, vocab_size, torch.float32))


def gumbel_noise_ref(seeds: Tensor, positions: Tensor, vocab_size: int) -> Tensor:
    """Standard Gumbel noise of every token of the vocabulary, [n, V] float32; arguments as in `random_words`.

    g = -log(E) with E = -log1p(-u), an exponential. The usual -log(-log(u)) would take its large values from u near 1,
    where float32 has steps of 2^-24 and the noise could not pass 16.6; here they come from u near 0, where float32 is
    dense, and the largest value is 22.9. A wide vocabulary draws from that tail at every position.
    """
    return _to_gumbel_(uniform(seeds, positions, vocab_size))


def gumbel_noise_at_ref(seeds: Tensor, positions: Tensor, token_ids: Tensor) -> Tensor:
    """The noise of `gumbel_noise_ref` at chosen tokens only.

    Args:
        seeds, positions: as in `random_words`.
        token_ids: tokens of each row, [n, C] int64.

    Returns:
        [n, C] float32.
    """
    lanes = torch.stack(_lanes(seeds, positions, token_ids >> 2), dim=-1)  # [n, C, 4]
    words = lanes.gather(-1, (token_ids & 3).unsqueeze(-1)).squeeze(-1)  # [n, C]
    return _to_gumbel_(_to_uniform_(words.to(torch.float32)))


def _vocabulary_words(seeds: Tensor, positions: Tensor, vocab_size: int, dtype: torch.dtype) -> Tensor:
    """The words of every token as `dtype`, [n, V], contiguous: token v is lane v % 4 of group v // 4."""
    num_rows = seeds.shape[0]
    groups = _groups(-(-vocab_size // LANES), seeds.device)  # [1, G]
    words = torch.empty(num_rows, groups.shape[1], LANES, dtype=dtype, device=seeds.device)
    chunk = max(1, _CHUNK_WORDS // groups.shape[1])
    for start in range(0, num_rows, chunk):
        part = slice(start, start + chunk)
        for lane, lane_words in enumerate(_lanes(seeds[part], positions[part], groups)):
            words[part, :, lane] = lane_words
    return words.view(num_rows, -1)[:, :vocab_size].contiguous()


def _lanes(seeds: Tensor, positions: Tensor, groups: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The four words of counter (group, position, 0, 0): groups [n or 1, G] -> four of [n, G] int64.

    The first round is done by hand: with words 2 and 3 zero, one of its products is zero and nothing is left to mix in.
    """
    _, _, shifts, _ = _constants(groups.device)
    keys = _round_keys((seeds.unsqueeze(-1) >> shifts) & WORD_MASK)  # ten of [2, n, 1]
    product = groups * _MULTIPLIERS[0]  # [n or 1, G]; below 2^62, since a group is below 2^30
    even = product.new_empty(2, seeds.shape[0], groups.shape[-1])
    odd = torch.empty_like(even)
    even[0] = positions.unsqueeze(-1) ^ keys[0][0]
    torch.bitwise_xor(product >> 32, keys[0][1], out=even[1])
    odd[0] = 0
    odd[1] = product
    return _rounds(even, odd, keys[1:])


def _rounds(even: Tensor, odd: Tensor, keys: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """One round a key. `even` holds words 0 and 2, `odd` words 1 and 3, both [2, n, G]; both are used up as scratch.

    With words x, multipliers M and round key k, a round makes
    x0, x1, x2, x3 = hi(M1 x2) ^ x1 ^ k0, lo(M1 x2), hi(M0 x0) ^ x3 ^ k1, lo(M0 x0).

    Words stand in int64. A product may pass 2^63: it wraps, and its 64 bits are still the right ones. High bits are
    cleared once a round, where they would reach the next product, and at the end. Two words in one tensor, written in
    place, halve the time of a small vocabulary, where it goes into calls and not into integers (V = 6144, one row, one
    core: 173 us with a tensor a word, 106 us this way).
    """
    multipliers, _, _, (shift, mask) = _constants(even.device)
    even_0, even_2 = even[0], even[1]
    product, spare = torch.empty_like(even), odd
    high = torch.empty_like(even)
    high_0, high_2 = high[0], high[1]
    odd_1, odd_3 = odd[0], odd[1]
    for key in keys:
        torch.mul(even, multipliers, out=product)
        torch.bitwise_right_shift(product, shift, out=high)
        torch.bitwise_xor(high_2, odd_1, out=even_0)
        torch.bitwise_xor(high_0, odd_3, out=even_2)
        even.bitwise_xor_(key).bitwise_and_(mask)
        odd_3, odd_1 = product.unbind(0)
        product, spare = spare, product
    return even_0, odd_1 & mask, even_2, odd_3 & mask


def _to_uniform_(words: Tensor) -> Tensor:
    return words.add_(0.5).mul_(_UNIFORM_SCALE).clamp_(max=_UNIFORM_MAX)


def _to_gumbel_(uniforms: Tensor) -> Tensor:
    return uniforms.neg_().log1p_().neg_().log_().neg_()


@functools.lru_cache(maxsize=16)
def _groups(num_groups: int, device: torch.device) -> Tensor:
    return torch.arange(num_groups, device=device).unsqueeze(0)  # [1, G]


def _round_keys(key: Tensor) -> tuple[Tensor, ...]:
    """The key of each round, ten of [2, ...], from the first one, [2, n, 1]."""
    return ((key + _constants(key.device)[1]) & WORD_MASK).unbind(0)


@functools.lru_cache(maxsize=16)
def _constants(device: torch.device) -> tuple[Tensor, Tensor, Tensor, tuple[Tensor, Tensor]]:
    """Multipliers [2, 1, 1]; what a round adds to the key [10, 2, 1, 1]; shifts that split a seed [2, 1, 1]; and 32 and
    the word mask as tensors without dimensions, which cost 0.5 us a call less than Python numbers."""
    rounds = torch.arange(NUM_ROUNDS).view(-1, 1, 1, 1)
    steps = (rounds * torch.tensor(_KEY_STEPS).view(2, 1, 1)) & WORD_MASK
    multipliers = torch.tensor(_MULTIPLIERS).view(2, 1, 1)
    shifts = torch.tensor([0, 32]).view(2, 1, 1)
    scalars = torch.tensor(32, device=device), torch.tensor(WORD_MASK, device=device)
    return multipliers.to(device), steps.to(device), shifts.to(device), scalars
