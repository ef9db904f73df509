"""Gumbel noise that the target and the draft model share, so that both choose alike where they agree."""

import torch
from torch import Tensor


def gumbel_noise(like: Tensor, seed: int, position: int) -> Tensor:
    """Noise [rows, vocab] float32, fixed by (seed, position) on one kind of device.

    The engine keys its noise by Philox counters instead; for measuring acceptance only the sharing matters.
    """
    generator = torch.Generator(like.device).manual_seed(seed * 1_000_003 + position)
    # 1e-20 keeps both logarithms finite.
    uniform = torch.rand(like.shape, generator=generator, device=like.device).clamp_(1e-20, 1 - 1e-7)
    return -torch.log(-torch.log(uniform))
