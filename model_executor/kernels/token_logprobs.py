"""Log probabilities of drawn tokens and of the best ones, from the logits as the model gave them.

Two kernels, after the commit of the step. Only rows that ask pay.

1. `_block_kernel`, places x vocabulary blocks: largest logit and sum of exponentials of the block, how many logits beat
   the drawn token's, and the best few as one integer each (logit, then the lowest id), found one after the other.
   Bytes: the logits, once.
2. `_place_kernel`, places: puts the blocks together. Sums run in a fixed order: a place depends on its logits alone.

`verifier_svc.sampling.logprobs` is the reference. It ranks log probabilities, and this ranks the logits themselves, of
which two may round to one log probability.
"""

# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
# Triton's launch syntax and its constexpr values have no types that pyright follows.
from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from common.sampling_params import MAX_LOGPROBS
from model_executor.kernels.sampling_scores import Places, key_value, order_key

BLOCK: Final = 1024
NUM_LISTED: Final = 1 + MAX_LOGPROBS
PACKED_WIDTH: Final = 1 + 2 * NUM_LISTED
"""Rank of the drawn token; ids of it and of the best ones; the bits of their log probabilities. All as int32."""

_NO_TOKEN: Final = tl.constexpr(-(2**63))
_ID_MASK: Final = tl.constexpr(0xFFFFFFFF)


@dataclass(frozen=True, slots=True)
class LogprobScratch:
    """Room for `max_places` places, P, with N = vocabulary blocks: 25 KB each for a vocabulary of 128256."""

    block_max: Tensor  # [P, N] float32
    block_sum: Tensor  # [P, N] float32, of exp(logit - block_max)
    num_better: Tensor  # [P, N] int32, logits above the drawn token's
    best: Tensor  # [P, N, MAX_LOGPROBS] int64, descending


def make_logprob_scratch(max_places: int, vocab_size: int, device: torch.device) -> LogprobScratch:
    """Scratch of up to `max_places` places."""
    shape = (max_places, triton.cdiv(vocab_size, BLOCK))
    return LogprobScratch(
        block_max=torch.empty(shape, dtype=torch.float32, device=device),
        block_sum=torch.empty(shape, dtype=torch.float32, device=device),
        num_better=torch.empty(shape, dtype=torch.int32, device=device),
        best=torch.empty(*shape, MAX_LOGPROBS, dtype=torch.int64, device=device),
    )


@triton.jit
def _block_kernel(
    logits_ptr,  # [P, vocab_size]
    num_logprobs_ptr,  # [R] int32, below 0: none
    row_ptr,  # [num_reqs] int64
    num_samples_ptr,  # [num_reqs] int64
    drawn_ptr,  # [num_reqs, WIDTH] int32
    block_max_ptr,  # [P, num_blocks] float32
    block_sum_ptr,  # [P, num_blocks] float32
    num_better_ptr,  # [P, num_blocks] int32
    best_ptr,  # [P, num_blocks, MOST] int64
    drawn_stride,
    vocab_size,
    num_blocks,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    MOST: tl.constexpr,
):
    place = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    entry = place // WIDTH
    offset = place % WIDTH
    count = tl.load(num_logprobs_ptr + tl.load(row_ptr + entry))
    if count < 0:
        return
    if offset >= tl.load(num_samples_ptr + entry):
        return
    tokens = block * BLOCK + tl.arange(0, BLOCK)
    inside = tokens < vocab_size
    logits = tl.load(logits_ptr + place * vocab_size + tokens, mask=inside, other=float("-inf")).to(tl.float32)
    drawn = tl.load(drawn_ptr + entry * drawn_stride + offset)
    drawn_logit = tl.load(logits_ptr + place * vocab_size + drawn).to(tl.float32)
    largest = tl.maximum(tl.max(logits), -3.4028234663852886e38)
    part = place * num_blocks + block
    tl.store(block_max_ptr + part, largest)
    tl.store(block_sum_ptr + part, tl.sum(tl.exp(logits - largest)))
    tl.store(num_better_ptr + part, tl.sum((logits > drawn_logit).to(tl.int32)))
    keys = (order_key(logits).to(tl.int64) << 32) | (-tokens.to(tl.int64) + _ID_MASK)
    keys = tl.where(inside, keys, _NO_TOKEN)
    for i in range(count):
        best = tl.max(keys)
        tl.store(best_ptr + part * MOST + i, best)
        keys = tl.where(keys == best, _NO_TOKEN, keys)


@triton.jit
def _place_kernel(
    logits_ptr,  # [P, vocab_size]
    num_logprobs_ptr,  # [R] int32, below 0: none
    row_ptr,  # [num_reqs] int64
    num_samples_ptr,  # [num_reqs] int64
    drawn_ptr,  # [num_reqs, WIDTH] int32
    block_max_ptr,  # [P, num_blocks] float32
    block_sum_ptr,  # [P, num_blocks] float32
    num_better_ptr,  # [P, num_blocks] int32
    best_ptr,  # [P, num_blocks, MOST] int64
    packed_ptr,  # [P, 1 + 2 * (1 + MOST)] int32
    drawn_stride,
    vocab_size,
    num_blocks,
    WIDTH: tl.constexpr,
    BLOCKS: tl.constexpr,
    MOST: tl.constexpr,
    PADDED_MOST: tl.constexpr,
):
    place = tl.program_id(0).to(tl.int64)
    entry = place // WIDTH
    offset = place % WIDTH
    count = tl.load(num_logprobs_ptr + tl.load(row_ptr + entry))
    if count < 0:
        return
    if offset >= tl.load(num_samples_ptr + entry):
        return
    blocks = tl.arange(0, BLOCKS)
    is_block = blocks < num_blocks
    part = place * num_blocks + blocks
    block_max = tl.load(block_max_ptr + part, mask=is_block, other=-3.4028234663852886e38)
    largest = tl.max(block_max)
    block_sum = tl.load(block_sum_ptr + part, mask=is_block, other=0.0)
    log_total = tl.log(tl.sum(block_sum * tl.exp(block_max - largest)))
    rank = 1 + tl.sum(tl.load(num_better_ptr + part, mask=is_block, other=0))
    drawn = tl.load(drawn_ptr + entry * drawn_stride + offset)
    drawn_logit = tl.load(logits_ptr + place * vocab_size + drawn).to(tl.float32)
    packed = packed_ptr + place * (3 + 2 * MOST)
    values = packed + 2 + MOST
    tl.store(packed, rank)
    tl.store(packed + 1, drawn)
    tl.store(values, (drawn_logit - largest - log_total).to(tl.int32, bitcast=True))
    listed = tl.arange(0, PADDED_MOST)
    keys = tl.load(
        best_ptr + part[:, None] * MOST + listed[None, :],
        mask=is_block[:, None] & (listed[None, :] < count),
        other=_NO_TOKEN,
    )
    for i in range(count):
        best = tl.max(keys)
        keys = tl.where(keys == best, _NO_TOKEN, keys)
        value = key_value((best >> 32).to(tl.int32)) - largest - log_total
        tl.store(packed + 2 + i, (-(best & _ID_MASK) + _ID_MASK).to(tl.int32))
        tl.store(values + 1 + i, value.to(tl.int32, bitcast=True))


def token_logprobs(
    logits: Tensor,
    inputs: Places,
    num_logprobs: Tensor,
    drawn: Tensor,
    scratch: LogprobScratch,
    packed: Tensor,
) -> None:
    """Log probabilities at every place in use whose row asks for some; other places are left as they are.

    Args:
        logits: [num_reqs * width, vocab_size], of the target model.
        inputs: of this step.
        num_logprobs: [R] int32, best tokens to list, at most MAX_LOGPROBS; below 0 for none at all.
        drawn: [num_reqs, width] int32, with any stride of rows; the token at each place.
        scratch: for at least as many places.
        packed: [num_reqs * width, PACKED_WIDTH] int32, written; lists longer than the vocabulary end in no tokens.
    """
    num_places, vocab_size = logits.shape
    num_blocks = triton.cdiv(vocab_size, BLOCK)
    _block_kernel[(num_places, num_blocks)](
        logits,
        num_logprobs,
        inputs.idx_mapping,
        inputs.num_samples,
        drawn,
        scratch.block_max,
        scratch.block_sum,
        scratch.num_better,
        scratch.best,
        drawn.stride(0),
        vocab_size,
        num_blocks,
        WIDTH=inputs.width,
        BLOCK=BLOCK,
        MOST=MAX_LOGPROBS,
    )
    _place_kernel[(num_places,)](
        logits,
        num_logprobs,
        inputs.idx_mapping,
        inputs.num_samples,
        drawn,
        scratch.block_max,
        scratch.block_sum,
        scratch.num_better,
        scratch.best,
        packed,
        drawn.stride(0),
        vocab_size,
        num_blocks,
        WIDTH=inputs.width,
        BLOCKS=triton.next_power_of_2(num_blocks),
        MOST=MAX_LOGPROBS,
        PADDED_MOST=triton.next_power_of_2(MAX_LOGPROBS),
        num_warps=8,
    )
