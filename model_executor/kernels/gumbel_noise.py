"""The Gumbel noise of `model_executor.kernels.philox` inside kernels: the same integers and uniforms, two logarithms of
the device's own."""

# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false, reportOptionalMemberAccess=false
# Triton's launch syntax and its constexpr values have no types that pyright follows.
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def noise_words(seed, position, groups):
    """Random words of the tokens 4 * groups + lane, for the token drawn at `position`: [G] -> [G, 4] uint32."""
    group = groups.to(tl.uint32)
    zero = group * 0
    w0, w1, w2, w3 = tl.philox(seed.to(tl.uint64), group, zero + position.to(tl.uint32), zero, zero)
    lane = tl.arange(0, 4)[None, :]
    return tl.where(
        lane < 2,
        tl.where(lane == 0, w0[:, None], w1[:, None]),
        tl.where(lane == 2, w2[:, None], w3[:, None]),
    )


@triton.jit
def uniform_of(word):
    """Uniform in (0, 1) of a 32-bit word; see `philox.uniform`."""
    return tl.minimum((word.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 0.999999940395355224609375)


@triton.jit
def gumbel_of(uniform):
    """Standard Gumbel noise of a uniform; see `philox.gumbel_noise_ref`."""
    # log1p(-u) = log(w) * -u / (w - 1) with w = 1 - u rounded: exact where 1 - u would lose the small u.
    w = 1.0 - uniform
    rest = w - 1.0
    exponential = -tl.where(rest == 0.0, -uniform, tl.log(w) * (-uniform / tl.where(rest == 0.0, 1.0, rest)))
    return -tl.log(exponential)
