"""Draws tokens: argmax of logits / temperature + noise, in blocks of the vocabulary.

Grid: places x vocabulary blocks (`sampling_scores` says what a place is). Each program leaves the best value and token
of its block; whoever commits the tokens takes the best block. Bytes: the logits, once.

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
    value_ptr,  # [num_reqs * WIDTH, num_blocks] float32
    token_ptr,  # [num_reqs * WIDTH, num_blocks] int32
    vocab_size,
    num_blocks,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    IS_PLAIN: tl.constexpr,
):
    place = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    entry = place // WIDTH
    offset = place % WIDTH
    if offset >= tl.load(num_samples_ptr + entry):
        return
    row = tl.load(row_ptr + entry)
    temperature = tl.load(temperature_ptr + row)
    groups = block * (BLOCK // 4) + tl.arange(0, BLOCK // 4)
    lanes = tl.arange(0, 4)
    tokens = groups[:, None] * 4 + lanes[None, :]  # [BLOCK / 4, 4]
    inside = tokens < vocab_size
    if IS_PLAIN:
        values = tl.load(logits_ptr + place * vocab_size + tokens, mask=inside, other=float("-inf")).to(tl.float32)
        values = at_temperature(values, temperature)
    else:
        row_flags = tl.load(flags_ptr + row)
        values = load_scores(logits_ptr, processed_ptr, place, vocab_size, tokens, inside, row_flags, temperature)
        if (row_flags & CUT) != 0:
            cut_value = tl.load(cut_value_ptr + place)
            is_kept = (values == cut_value) & (tokens <= tl.load(cut_token_ptr + place))
            values = tl.where((values > cut_value) | is_kept, values, float("-inf"))
    has_noise = temperature > 0
    if not IS_PLAIN:  # most blocks of a nucleus have nothing to draw from
        has_noise = has_noise & (tl.max(values) != float("-inf"))
    if has_noise:
        position = tl.load(committed_len_ptr + row) + offset
        values += gumbel_of(uniform_of(noise_words(tl.load(seed_ptr + row), position, groups)))
        values = tl.where(inside, values, float("-inf"))
    best = tl.max(values)
    token = tl.min(tl.where(values == best, tokens, vocab_size))
    tl.store(value_ptr + place * num_blocks + block, best)
    tl.store(token_ptr + place * num_blocks + block, tl.minimum(token, vocab_size - 1))


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
    """Best value and token of every vocabulary block at every place that is in use.

    Args:
        logits: [num_reqs * width, vocab_size].
        temperature: [R] float32, 0 is greedy.
        seed: [R] int64.
        committed_len: [R] int64; place j of an entry draws the token at committed_len + j.
        idx_mapping: [num_reqs] int64.
        num_samples: [num_reqs] int64, places of each entry in use.
        values: [num_reqs * width, num_blocks] float32, written.
        tokens: [num_reqs * width, num_blocks] int32, written; the lowest token of equal values.
        processed: processed logits and cuts of the rows whose flags ask for them; None is the plain variant.
    """
    num_places, vocab_size = logits.shape
    num_blocks = triton.cdiv(vocab_size, BLOCK)
    is_plain = processed is None
    _gumbel_argmax_kernel[(num_places, num_blocks)](
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
        WIDTH=num_places // idx_mapping.shape[0],
        BLOCK=BLOCK,
        IS_PLAIN=is_plain,
    )
