"""What `small_gemm` and `wide_gemm` do besides the product: the norm before it, and what follows it.

y = epilogue(rstd * (x @ w.T)). The RMS norm costs nothing: the kernel that made x has already multiplied it by the
norm's weight and left the sum of squares of each of its column blocks, so that only a scale per row is left for the
end. Likewise a product can leave the next norm's input and sums behind.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
import triton
from torch import Tensor


@dataclass(frozen=True, slots=True)
class NormInput:
    """An activation on its way through an RMS norm: what `rms_norm` would need one more pass for."""

    scaled: Tensor  # [max_tokens, hidden] x * norm weight
    square_sums: Tensor  # [num_parts, max_tokens] float32, sums of x**2 over column blocks
    """A block that no kernel writes stays 0."""


@dataclass(frozen=True, slots=True)
class Epilogue:
    """What happens to a product, in this order; all of it may be left out."""

    square_sums: Tensor | None = None  # `NormInput.square_sums` of the norm before; x is its `scaled`
    eps: float = 0.0  # of that norm
    bias: Tensor | None = None  # [N]
    silu: bool = False  # silu(gate) * up: the weight is [2 * N, K], gate above up
    residual: Tensor | None = None  # [num_tokens, N], added; may be the output
    next_weight: Tensor | None = None  # [N], of the norm that follows
    next_input: NormInput | None = None  # filled for that norm

    @property
    def num_parts(self) -> int:
        return 0 if self.square_sums is None else self.square_sums.shape[0]

    def tensors(self, unused: Tensor) -> tuple[Tensor, ...]:
        """Arguments of a kernel: bias, square_sums, residual, next_weight, scaled, sums_out.

        Args:
            unused: stands for what is left out.
        """
        scaled, sums_out = (
            (None, None) if self.next_input is None else (self.next_input.scaled, self.next_input.square_sums)
        )
        given = (self.bias, self.square_sums, self.residual, self.next_weight, scaled, sums_out)
        return tuple(unused if tensor is None else tensor for tensor in given)

    def constants(self) -> dict[str, Any]:
        """Compile-time arguments of a kernel."""
        return {
            "BLOCK_PARTS": triton.next_power_of_2(max(self.num_parts, 1)),
            "HAS_BIAS": self.bias is not None,
            "HAS_NORM": self.square_sums is not None,
            "HAS_RESIDUAL": self.residual is not None,
            "HAS_NEXT": self.next_input is not None,
            "SILU": self.silu,
        }


def fused_gemm_ref(
    x: Tensor,
    weight: Tensor,
    *,
    norm_weight: Tensor | None = None,
    eps: float = 0.0,
    bias: Tensor | None = None,
    silu: bool = False,
    residual: Tensor | None = None,
) -> Tensor:
    """The same in float64, with the norm spelt out. x is the norm's input here. [num_tokens, N] float64."""
    x = x.double()
    if norm_weight is not None:
        x = F.rms_norm(x, (x.shape[-1],), norm_weight.double(), eps)
    y = F.linear(x, weight.double(), None if bias is None else bias.double())
    if silu:
        gate, up = y.chunk(2, dim=-1)
        y = F.silu(gate) * up
    return y if residual is None else y + residual.double()
