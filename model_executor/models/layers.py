"""Linear layers and norms of the decoder, in the form that is fastest on the device at hand."""

from __future__ import annotations

import math
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor


class Linear(Protocol):
    """x @ weight.T + bias, for a weight that is fixed after loading."""

    def __call__(self, x: Tensor) -> Tensor:
        """[num_tokens, in_features] -> [num_tokens, out_features], of the weight's dtype."""
        ...


class PlainLinear:
    """torch's own linear layer: for every device and every build of torch."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight = weight  # [out_features, in_features]
        self._bias = bias  # [out_features]

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self._weight, self._bias)


class PackedLinear:
    """A weight in oneDNN's blocked layout, on a CPU.

    Two things make it worth it, both measured on two Zen 5 cores. In float32, for a weight [6144, 384], 4 rows cost
    what 1 row costs (60 us), where F.linear takes 125 us for 1 row and 340 us for 4, and speculation lives on that
    ratio. And a row comes out bit for bit the same among 1 to 64 rows, so that a verify step adds no rounding of its
    own here.
    """

    # The weight is packed as for this many rows. Packed for 1 row, oneDNN takes another layout, in which 1 row comes
    # out in another order of sums and 4 rows of a large weight cost 2.4 times as much.
    _ROWS = 16

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, self._ROWS)
        self._bias = bias  # [out_features]
        self._linear = torch.ops.mkldnn._linear_pointwise.default

    def __call__(self, x: Tensor) -> Tensor:
        return self._linear(x, self._weight, self._bias, "none", [], "")


def build_linear(weight: Tensor, bias: Tensor | None) -> Linear:
    """The fastest linear layer for `weight` [out_features, in_features], which the caller should drop afterwards."""
    if _can_pack(weight):
        return PackedLinear(weight, bias)
    return PlainLinear(weight, bias)


def _can_pack(weight: Tensor) -> bool:
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if weight.dtype == torch.bfloat16:
        return torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return weight.dtype == torch.float32


class RMSNorm:
    """Root mean square norm over the last dimension (Zhang and Sennrich 2019, arXiv 1910.07467).

    x * weight / sqrt(mean(x^2) + eps), computed in float32, as x / hypot(|x|, sqrt(n * eps)) * (weight * sqrt(n)): on a
    CPU these four operations take 5 us for [1, 384], where F.rms_norm takes 8 us, and a decoder has two norms a layer.
    """

    def __init__(self, weight: Tensor, eps: float) -> None:
        size = weight.shape[-1]
        self._scaled_weight = weight.float() * math.sqrt(size)  # [..., n]
        self._floor = torch.tensor(math.sqrt(size * eps), device=weight.device)  # []

    def __call__(self, x: Tensor) -> Tensor:
        """[..., n] -> the same shape and dtype; the weight broadcasts against x."""
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
        return torch.div(x, length.hypot_(self._floor)).mul_(self._scaled_weight).to(x.dtype)
