"""Token embedding, with what the first norm needs left behind as a fused product would leave it.

Grid: one program a token. Bytes: one row of the embedding a token.
"""

# pyright: reportCallIssue=false, reportArgumentType=false
# Triton's launch syntax and its constexpr values have no types that pyright follows.
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from model_executor.kernels.fused_gemm import NormInput


@triton.jit
def _embed_tokens_kernel(
    input_ids_ptr,  # [num_tokens] int64
    embedding_ptr,  # [vocab_size, hidden]
    weight_ptr,  # [hidden]
    out_ptr,  # [num_tokens, hidden]
    scaled_ptr,  # [num_tokens, hidden]
    sums_ptr,  # [num_parts, STRIDE]
    hidden,
    num_parts,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
    STRIDE: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < hidden
    row = tl.load(input_ids_ptr + token)
    value = tl.load(embedding_ptr + row * hidden + columns, mask=inside, other=0.0)
    tl.store(out_ptr + token * hidden + columns, value, mask=inside)
    value = value.to(tl.float32)
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(scaled_ptr + token * hidden + columns, (value * weight).to(scaled_ptr.dtype.element_ty), mask=inside)
    parts = tl.arange(0, PARTS)
    sums = tl.where(parts == 0, tl.sum(value * value, axis=0), 0.0)  # the other parts are of an earlier step
    tl.store(sums_ptr + parts * STRIDE + token, sums, mask=parts < num_parts)


def embed_tokens(input_ids: Tensor, embedding: Tensor, norm_weight: Tensor, out: Tensor, norm_input: NormInput) -> None:
    """out = embedding[input_ids], and `norm_input` for the norm with `norm_weight`.

    Args:
        input_ids: [num_tokens] int64, at most as many as `norm_input` has rows.
        embedding: [vocab_size, hidden].
        norm_weight: [hidden].
        out: [num_tokens, hidden], written.
        norm_input: written, all of its parts.
    """
    num_tokens, hidden = out.shape
    num_parts = norm_input.square_sums.shape[0]
    _embed_tokens_kernel[(num_tokens,)](
        input_ids,
        embedding,
        norm_weight,
        out,
        norm_input.scaled,
        norm_input.square_sums,
        hidden,
        num_parts,
        BLOCK=triton.next_power_of_2(hidden),
        PARTS=triton.next_power_of_2(num_parts),
        STRIDE=norm_input.square_sums.shape[1],
    )
