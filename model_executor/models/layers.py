"""Linear layers and norms of the decoder, in the form that is fastest on the device at hand."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor


class Linear(Protocol):
    """x @ weight.T + bias, for a weight that is fixed after loading."""

    def __call__(self, x: Tensor) -> Tensor:
        """[num_tokens, in_features] -> [num_tokens, out_features], of the weight's dtype."""
        ...

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """residual [num_tokens, out_features] + the layer's output for x."""
        ...


class PlainLinear:
    """torch's own linear layer: for every device and every build of torch."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight = weight  # [out_features, in_features]
        self._bias = bias  # [out_features]

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self._weight, self._bias)

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        return residual + F.linear(x, self._weight, self._bias)


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
        self._linear_add = torch.ops.mkldnn._linear_pointwise.binary

    def __call__(self, x: Tensor) -> Tensor:
        return self._linear(x, self._weight, self._bias, "none", [], "")

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        return self._linear_add(x, residual, self._weight, self._bias, "add")


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


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root mean square norm over the last dimension (Zhang and Sennrich 2019, arXiv 1910.07467)."""
    return F.rms_norm(x, weight.shape, weight, eps)
