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
from typing import Final

import torch
from torch import Tensor

LANES: Final = 4
NUM_ROUNDS: Final = 10
WORD_MASK: Final = 0xFFFFFFFF

_MULTIPLIERS: Final = (0xD2511F53, 0xCD9E8D57)  # of words 0 and 2
_KEY_STEPS: Final = (0x9E3779B9, 0xBB67AE85)  # golden ratio, sqrt(3) - 1

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
    words = counter.expand(*shape, 4).movedim(-1, 0)  # [4, ...]
    even, odd = _rounds(words[0::2], words[1::2], key.expand(*shape, 2).movedim(-1, 0))
    return torch.stack([even[0], odd[0], even[1], odd[1]], dim=-1)


def random_words(seeds: Tensor, positions: Tensor, vocab_size: int) -> Tensor:
    """Random 32-bit words of every token of the vocabulary.

    Args:
        seeds: unsigned 64-bit seeds kept in int64, [n].
        positions: index in prompt + output of the token to draw, [n] int64, each in [0, 2^32).
        vocab_size: V.

    Returns:
        [n, V] int64, each in [0, 2^32).
    """
    groups = _groups(-(-vocab_size // LANES), seeds.device)  # [1, G]
    return _interleave(*_lanes(seeds, positions, groups), torch.int64)[:, :vocab_size]


def uniform(seeds: Tensor, positions: Tensor, vocab_size: int) -> Tensor:
    """Uniforms in (0, 1) of every token of the vocabulary, [n, V] float32; arguments as in `random_words`.

    A word x becomes (x + 0.5) * 2^-32 in float32. Small values keep 24 significant bits, and they are the ones that
    become large noise; values that would round to 1 become 1 - 2^-24.
    """
    groups = _groups(-(-vocab_size // LANES), seeds.device)  # [1, G]
    words = _interleave(*_lanes(seeds, positions, groups), torch.float32)[:, :vocab_size]
    return _to_uniform_(words)


def gumbel_noise_ref(seeds: Tensor, positions: Tensor, vocab_size: int) -> Tensor:
    """Standard Gumbel noise of every token of the vocabulary, [n, V] float32; arguments as in `random_words`.

    g = -log(E) with E = -log1p(-u), an exponential. The usual -log(-log(u)) would take its large values from u near 1,
    where float32 has steps of 2^-24 and the noise could not pass 16.6; here they come from u near 0, where float32 is
    dense, and the largest value is 22.9. A wide vocabulary draws from that tail at every position.
    """
    return _to_gumbel_(uniform(seeds, positions, vocab_size).contiguous())


def gumbel_noise_at_ref(seeds: Tensor, positions: Tensor, token_ids: Tensor) -> Tensor:
    """The noise of `gumbel_noise_ref` at chosen tokens only.

    Args:
        seeds, positions: as in `random_words`.
        token_ids: tokens of each row, [n, C] int64.

    Returns:
        [n, C] float32.
    """
    words = _interleave(*_lanes(seeds, positions, token_ids >> 2), torch.float32)  # [n, C * 4]
    words = words.view(*token_ids.shape, LANES).gather(-1, (token_ids & 3).unsqueeze(-1)).squeeze(-1)  # [n, C]
    return _to_gumbel_(_to_uniform_(words))


def _lanes(seeds: Tensor, positions: Tensor, groups: Tensor) -> tuple[Tensor, Tensor]:
    """Words of counter (group, position, 0, 0): lanes (0, 2) and lanes (1, 3), each [2, n, G]."""
    shape = (2, seeds.shape[0], groups.shape[-1])
    even = groups.new_zeros(shape)
    even[0] = groups
    odd = groups.new_zeros(shape)
    odd[0] = positions.unsqueeze(-1)
    shifts = _constants(groups.device)[2]
    key = (seeds.unsqueeze(-1) >> shifts) & WORD_MASK  # [2, n, 1]
    return _rounds(even, odd, key)


def _rounds(even: Tensor, odd: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    """Ten rounds. `even` holds words 0 and 2, `odd` words 1 and 3, both [2, ...]; `key` broadcasts to them.

    Per round (words x, key k): x0, x1, x2, x3 = hi(M1 x2) ^ x1 ^ k0, lo(M1 x2), hi(M0 x0) ^ x3 ^ k1, lo(M0 x0).
    Words stand in int64. A product may pass 2^63: it wraps, and its low 64 bits are still right. High bits are
    cleared once a round, where they would reach the next product. Stacking both products halves the torch calls, which
    are what a small vocabulary pays for.
    """
    multipliers, key_steps, _ = _constants(even.device)
    multipliers = multipliers.view(2, *[1] * (even.dim() - 1))
    steps = key_steps.view(NUM_ROUNDS, 2, *[1] * (even.dim() - 1))
    keys = ((key + steps) & WORD_MASK).unbind(0)  # ten of [2, ...]
    even = even.contiguous()
    for round_key in keys:
        product = even * multipliers  # [2, ...]: of x0, of x2
        high = product >> 32
        even = torch.empty_like(product)
        torch.bitwise_xor(high[1], odd[0], out=even[0])
        torch.bitwise_xor(high[0], odd[1], out=even[1])
        even.bitwise_xor_(round_key).bitwise_and_(WORD_MASK)
        odd = product.flip(0)
    return even, odd & WORD_MASK


def _interleave(even: Tensor, odd: Tensor, dtype: torch.dtype) -> Tensor:
    """Lanes side by side: token v of row i is lane v % 4 of group v // 4. Returns [n, G * 4] of `dtype`."""
    _, num_rows, num_groups = even.shape
    words = torch.empty(num_rows, num_groups, 2, 2, dtype=dtype, device=even.device)
    words[..., 0] = even.permute(1, 2, 0)
    words[..., 1] = odd.permute(1, 2, 0)
    return words.view(num_rows, num_groups * LANES)


def _to_uniform_(words: Tensor) -> Tensor:
    return words.add_(0.5).mul_(_UNIFORM_SCALE).clamp_(max=_UNIFORM_MAX)


def _to_gumbel_(uniforms: Tensor) -> Tensor:
    return uniforms.neg_().log1p_().neg_().log_().neg_()


@functools.lru_cache(maxsize=16)
def _groups(num_groups: int, device: torch.device) -> Tensor:
    return torch.arange(num_groups, device=device).unsqueeze(0)  # [1, G]


@functools.lru_cache(maxsize=16)
def _constants(device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Multipliers [2], what each round adds to the key [10, 2], shifts that split a seed [2, 1, 1]."""
    rounds = torch.arange(NUM_ROUNDS, dtype=torch.int64).unsqueeze(-1)
    steps = (rounds * torch.tensor(_KEY_STEPS)) & WORD_MASK
    multipliers = torch.tensor(_MULTIPLIERS, dtype=torch.int64)
    shifts = torch.tensor([0, 32]).view(2, 1, 1)
    return multipliers.to(device), steps.to(device), shifts.to(device)
