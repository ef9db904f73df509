"""Draws tokens: argmax of logits / temperature + noise, in slots of the vocabulary.

Grid: places x slots (`sampling_scores` says what a place is). Each program goes through the blocks of its slot and
leaves the best value and token; whoever commits the tokens takes the best slot. Bytes: the logits, once.

Arithmetic is what takes the time: ten rounds of integers for four tokens, and two logarithms and a division for each.
A program that has a best value knows most of the noise that follows to be too small from the uniform alone.

The plain variant knows temperature and nothing else. The processed one also takes processed logits and cuts; a row
without either gets the same bits from both, since the temperature divides at the same point.
"""

# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false, reportOptionalMemberAccess=false
# Triton's launch syntax and its constexpr values have no types that pyright follows.
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from model_executor.kernels.gumbel_noise import gumbel_of, noise_words, uniform_of
from model_executor.kernels.sampling_scores import CUT, ProcessedScores, at_temperature, load_scores

BLOCK = 1024

_LOWEST = tl.constexpr(-3.4028234663852886e38)  # what a slot without anything to draw has as its best


@triton.jit
def _gumbel_argmax_kernel(
    logits_ptr,  # [num_reqs * WIDTH, vocab_size]
    temperature_ptr,  # [R] float32; 0 is greedy
    seed_ptr,  # [R] int64
    committed_len_ptr,  # [R] int64
    row_ptr,  # [num_reqs] int64
    num_samples_ptr,  # [num_reqs] int64
    flags_ptr,  # [R] int32
    processed_ptr,  # [num_reqs * WIDTH, vocab_size] float32
    cut_value_ptr,  # [num_reqs * WIDTH] float32
    cut_token_ptr,  # [num_reqs * WIDTH] int32
    value_ptr,  # [num_reqs * WIDTH, num_slots] float32
    token_ptr,  # [num_reqs * WIDTH, num_slots] int32
    vocab_size,
    num_blocks,
    num_slots,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    EACH: tl.constexpr,  # blocks of a program
    IS_PLAIN: tl.constexpr,
):
    place = tl.program_id(0).to(tl.int64)
    slot = tl.program_id(1)
    entry = place // WIDTH
    offset = place % WIDTH
    if offset >= tl.load(num_samples_ptr + entry):
        return
    row = tl.load(row_ptr + entry)
    temperature = tl.load(temperature_ptr + row)
    position = tl.load(committed_len_ptr + row) + offset
    seed = tl.load(seed_ptr + row)
    cut_value = tl.full((), float("-inf"), tl.float32)
    cut_token = tl.full((), 0, tl.int32) + vocab_size
    row_flags = tl.full((), 0, tl.int32)
    if not IS_PLAIN:
        row_flags = tl.load(flags_ptr + row)
        if (row_flags & CUT) != 0:
            cut_value = tl.load(cut_value_ptr + place)
            cut_token = tl.load(cut_token_ptr + place)
    best = tl.full((), _LOWEST, tl.float32)
    best_token = slot * EACH * BLOCK
    for block in range(slot * EACH, tl.minimum(slot * EACH + EACH, num_blocks)):
        groups = block * (BLOCK // 4) + tl.arange(0, BLOCK // 4)
        tokens = groups[:, None] * 4 + tl.arange(0, 4)[None, :]  # [BLOCK / 4, 4]
        inside = tokens < vocab_size
        if IS_PLAIN:
            values = tl.load(logits_ptr + place * vocab_size + tokens, mask=inside, other=float("-inf")).to(tl.float32)
            values = at_temperature(values, temperature)
        else:
            values = load_scores(logits_ptr, processed_ptr, place, vocab_size, tokens, inside, row_flags, temperature)
            is_kept = (values > cut_value) | ((values == cut_value) & (tokens <= cut_token))
            values = tl.where(is_kept, values, float("-inf"))
        if temperature > 0:
            if tl.max(values) > float("-inf"):  # most blocks of a nucleus have nothing to draw from
                uniform = uniform_of(noise_words(seed, position, groups))
                # Noise is at most -log(uniform), so most blocks are seen to hold no new best without a logarithm.
                may_win = uniform <= 1.01 * tl.exp(tl.minimum(values - best, 1.0))
                if tl.max(may_win.to(tl.int32)) > 0:
                    values += gumbel_of(uniform)
                    largest = tl.max(values)
                    if largest > best:
                        best = largest
                        best_token = tl.min(tl.where(values == largest, tokens, vocab_size))
        else:
            largest = tl.max(values)
            if largest > best:
                best = largest
                best_token = tl.min(tl.where(values == largest, tokens, vocab_size))
    tl.store(value_ptr + place * num_slots + slot, best)
    tl.store(token_ptr + place * num_slots + slot, tl.minimum(best_token, vocab_size - 1))


def num_slots_for(num_places: int, vocab_size: int) -> int:
    """Slots of a place: a vocabulary block each for few places, and up to 16 blocks each for many.

    Measured on an H200 with 128256 tokens, us a draw with temperature and 1, 2, 4, 8 or 16 blocks a slot: 4 places 4.9,
    5.4, 7.8, 12.1, 18.7; 16 places 13.1, 12.6, 12.7, 15.8, 23.9; 64 places 43.9, 37.5, 33.7, 32.1, 32.7; 256 places
    167, 137, 114, 100, 93.
    """
    num_blocks = -(-vocab_size // BLOCK)
    return -(-num_blocks // max(1, min(16, num_places // 8)))


def gumbel_argmax(
    logits: Tensor,
    temperature: Tensor,
    seed: Tensor,
    committed_len: Tensor,
    idx_mapping: Tensor,
    num_samples: Tensor,
    values: Tensor,
    tokens: Tensor,
    processed: ProcessedScores | None = None,
) -> None:
    """Best value and token of every slot of the vocabulary at every place that is in use.

    Args:
        logits: [num_reqs * width, vocab_size].
        temperature: [R] float32, 0 is greedy.
        seed: [R] int64.
        committed_len: [R] int64; place j of an entry draws the token at committed_len + j.
        idx_mapping: [num_reqs] int64.
        num_samples: [num_reqs] int64, places of each entry in use.
        values: [num_reqs * width, num_slots] float32, written; `num_slots_for` says how many.
        tokens: [num_reqs * width, num_slots] int32, written; the lowest token of equal values.
        processed: processed logits and cuts of the rows whose flags ask for them; None is the plain variant.
    """
    num_places, vocab_size = logits.shape
    num_blocks, num_slots = triton.cdiv(vocab_size, BLOCK), values.shape[1]
    is_plain = processed is None
    _gumbel_argmax_kernel[(num_places, num_slots)](
        logits,
        temperature,
        seed,
        committed_len,
        idx_mapping,
        num_samples,
        logits if is_plain else processed.flags,
        logits if is_plain else processed.processed,
        logits if is_plain else processed.cut_value,
        logits if is_plain else processed.cut_token,
        values,
        tokens,
        vocab_size,
        num_blocks,
        num_slots,
        WIDTH=num_places // idx_mapping.shape[0],
        BLOCK=BLOCK,
        EACH=triton.cdiv(num_blocks, num_slots),
        IS_PLAIN=is_plain,
    )
