"""Penalties, logit_bias, bad_words and min_tokens on the device, in this order, before the temperature.

Three kernels. Only rows that ask for something pay.

1. `_count_tokens_kernel`, one program an entry: brings `token_counts` of a row with penalties up to its committed
   tokens. It counts from `counted_len` on, so nobody has to tell it what was committed; 0 has it start over.
2. `_penalties_kernel`, places x vocabulary blocks: logits to float32, with the penalties of rows that have some. Draft
   tokens before a place count too: at most K of them, compared one by one and never written to the table.
   Bytes: the logits once, and 8 bytes a token of the vocabulary for rows with penalties, 4 for others.
3. `_sparse_kernel`, one program a place: adds the bias and masks single tokens.

`verifier_svc.sampling.processors` has the definitions and is the reference.
"""

# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
# Triton's launch syntax and its constexpr values have no types that pyright follows.
from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import triton
import triton.language as tl
from torch import Tensor

from model_executor import sampling_flags as flags
from model_executor.kernels.sampling_scores import PROCESSED, Places
from model_executor.row_state import RowState
from model_executor.sampling_tables import ProcessorTables

_PENALTIES: Final = tl.constexpr(flags.PENALTIES)
_LOGIT_BIAS: Final = tl.constexpr(flags.LOGIT_BIAS)
_BAD_WORDS: Final = tl.constexpr(flags.BAD_WORDS)
_MIN_TOKENS: Final = tl.constexpr(flags.MIN_TOKENS)
_SPARSE: Final = tl.constexpr(flags.LOGIT_BIAS | flags.BAD_WORDS | flags.MIN_TOKENS)
_IN_PROMPT: Final = tl.constexpr(1 << 30)
_BLOCK: Final = 2048


@dataclass(frozen=True, slots=True)
class ProcessorParams:
    """What rows ask for beside the tables; off is never read, the flags say."""

    flags: Tensor  # [R] int32, of model_executor.sampling_flags
    repetition_penalty: Tensor  # [R] float32
    presence_penalty: Tensor  # [R] float32
    frequency_penalty: Tensor  # [R] float32
    min_len: Tensor  # [R] int64, prompt_len + min_tokens
    stop_token_ids: Tensor  # [R, S] int64, padded with -1


@triton.jit
def _count_tokens_kernel(
    flags_ptr,  # [R] int32
    token_ids_ptr,  # [R, max_model_len] int32
    committed_len_ptr,  # [R] int64
    prompt_len_ptr,  # [R] int64
    row_ptr,  # [num_reqs] int64
    num_samples_ptr,  # [num_reqs] int64
    counted_len_ptr,  # [R] int64
    counts_ptr,  # [R, vocab_size] int32
    row_stride,
    vocab_size,
    BLOCK: tl.constexpr,
):
    entry = tl.program_id(0).to(tl.int64)
    row = tl.load(row_ptr + entry)
    if (tl.load(flags_ptr + row) & _PENALTIES) == 0:
        return
    if tl.load(num_samples_ptr + entry) == 0:
        return
    start = tl.load(counted_len_ptr + row)
    end = tl.load(committed_len_ptr + row)
    prompt_len = tl.load(prompt_len_ptr + row)
    counts = counts_ptr + row * vocab_size
    lanes = tl.arange(0, BLOCK)
    if start == 0:
        for first in range(0, vocab_size, BLOCK):
            tl.store(counts + first + lanes, 0, mask=first + lanes < vocab_size)
        tl.debug_barrier()  # all is cleared before any is counted
    for first in range(start, end, BLOCK):
        place = first + lanes
        token = tl.load(token_ids_ptr + row * row_stride + place, mask=place < end, other=0)
        tl.atomic_or(counts + token, _IN_PROMPT, mask=place < tl.minimum(prompt_len, end))
        tl.atomic_add(counts + token, 1, mask=(place >= prompt_len) & (place < end))
    tl.store(counted_len_ptr + row, end)


@triton.jit
def _penalties_kernel(
    logits_ptr,  # [num_reqs * WIDTH, vocab_size]
    flags_ptr,  # [R] int32
    token_ids_ptr,  # [R, max_model_len] int32
    committed_len_ptr,  # [R] int64
    row_ptr,  # [num_reqs] int64
    num_samples_ptr,  # [num_reqs] int64
    counts_ptr,  # [R, vocab_size] int32
    repetition_ptr,  # [R] float32
    presence_ptr,  # [R] float32
    frequency_ptr,  # [R] float32
    processed_ptr,  # [num_reqs * WIDTH, vocab_size] float32
    row_stride,
    vocab_size,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    place = tl.program_id(0).to(tl.int64)
    entry = place // WIDTH
    offset = place % WIDTH
    row = tl.load(row_ptr + entry)
    row_flags = tl.load(flags_ptr + row)
    if (row_flags & PROCESSED) == 0:
        return
    if offset >= tl.load(num_samples_ptr + entry):
        return
    tokens = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = tokens < vocab_size
    logits = tl.load(logits_ptr + place * vocab_size + tokens, mask=inside, other=0.0).to(tl.float32)
    if (row_flags & _PENALTIES) != 0:
        counts = tl.load(counts_ptr + row * vocab_size + tokens, mask=inside, other=0)
        drafts = token_ids_ptr + row * row_stride + tl.load(committed_len_ptr + row)
        for j in range(offset):
            counts += (tokens == tl.load(drafts + j)).to(tl.int32)
        repetition = tl.load(repetition_ptr + row)
        penalised = tl.where(logits > 0, tl.div_rn(logits, tl.zeros_like(logits) + repetition), logits * repetition)
        logits = tl.where(counts != 0, penalised, logits)
        num_output = counts & (_IN_PROMPT - 1)
        logits -= tl.load(frequency_ptr + row) * num_output.to(tl.float32)
        logits -= tl.where(num_output > 0, tl.load(presence_ptr + row), 0.0)
    tl.store(processed_ptr + place * vocab_size + tokens, logits, mask=inside)


@triton.jit
def _sparse_kernel(
    flags_ptr,  # [R] int32
    token_ids_ptr,  # [R, max_model_len] int32
    committed_len_ptr,  # [R] int64
    row_ptr,  # [num_reqs] int64
    num_samples_ptr,  # [num_reqs] int64
    num_biases_ptr,  # [R] int64
    bias_token_ptr,  # [R, max_biases] int64
    bias_value_ptr,  # [R, max_biases] float32
    num_words_ptr,  # [R] int64
    word_end_ptr,  # [R, max_words] int64
    word_token_ptr,  # [R, max_word_tokens] int32
    min_len_ptr,  # [R] int64
    stop_ptr,  # [R, num_stops] int64
    processed_ptr,  # [num_reqs * WIDTH, vocab_size] float32
    row_stride,
    max_biases,
    max_words,
    max_word_tokens,
    num_stops,
    vocab_size,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    place = tl.program_id(0).to(tl.int64)
    entry = place // WIDTH
    offset = place % WIDTH
    row = tl.load(row_ptr + entry)
    row_flags = tl.load(flags_ptr + row)
    if (row_flags & _SPARSE) == 0:
        return
    if offset >= tl.load(num_samples_ptr + entry):
        return
    position = tl.load(committed_len_ptr + row) + offset
    text = token_ids_ptr + row * row_stride
    scores = processed_ptr + place * vocab_size
    lanes = tl.arange(0, BLOCK)
    if (row_flags & _LOGIT_BIAS) != 0:
        count = tl.load(num_biases_ptr + row)
        for first in range(0, count, BLOCK):
            index = row * max_biases + first + lanes
            is_bias = first + lanes < count
            token = tl.load(bias_token_ptr + index, mask=is_bias, other=0)
            bias = tl.load(bias_value_ptr + index, mask=is_bias, other=0.0)
            score = tl.load(scores + token, mask=is_bias, other=0.0)
            tl.store(scores + token, score + bias, mask=is_bias)
        tl.debug_barrier()  # what is masked below stays masked
    if (row_flags & _BAD_WORDS) != 0:
        count = tl.load(num_words_ptr + row)
        words = word_token_ptr + row * max_word_tokens
        for first in range(0, count, BLOCK):
            word = first + lanes
            ends = word_end_ptr + row * max_words + word
            end = tl.load(ends, mask=word < count, other=0)
            start = tl.load(ends - 1, mask=(word < count) & (word > 0), other=0)
            num_before = end - start - 1  # tokens that must stand just before the position
            completes = (word < count) & (num_before <= position)
            for j in range(tl.max(num_before)):
                is_open = completes & (j < num_before)
                expected = tl.load(words + start + j, mask=is_open, other=0)
                actual = tl.load(text + position - num_before + j, mask=is_open, other=0)
                completes = completes & (expected == actual)
            last = tl.load(words + end - 1, mask=completes, other=0)
            tl.store(scores + last, float("-inf"), mask=completes)
    if ((row_flags & _MIN_TOKENS) != 0) & (position < tl.load(min_len_ptr + row)):
        for first in range(0, num_stops, BLOCK):
            is_stop = first + lanes < num_stops
            stop = tl.load(stop_ptr + row * num_stops + first + lanes, mask=is_stop, other=-1)
            tl.store(scores + stop, float("-inf"), mask=(stop >= 0) & (stop < vocab_size))


def process_logits(
    logits: Tensor,
    inputs: Places,
    rows: RowState,
    params: ProcessorParams,
    tables: ProcessorTables,
    processed: Tensor,
) -> None:
    """Processed logits of every place in use whose row has PROCESSED flags; other places are left as they are.

    Args:
        logits: [num_reqs * width, vocab_size], of the target model.
        inputs: of this step.
        rows: row state before the commit; draft tokens stand behind the committed ones.
        params: of the rows.
        tables: of the rows; counts are brought up to date.
        processed: [num_reqs * width, vocab_size] float32, written.
    """
    num_places, vocab_size = logits.shape
    row_stride = rows.token_ids.stride(0)
    _count_tokens_kernel[(inputs.idx_mapping.shape[0],)](
        params.flags,
        rows.token_ids,
        rows.committed_len,
        rows.prompt_len,
        inputs.idx_mapping,
        inputs.num_samples,
        tables.counted_len,
        tables.token_counts,
        row_stride,
        vocab_size,
        BLOCK=_BLOCK,
        num_warps=8,
    )
    _penalties_kernel[(num_places, triton.cdiv(vocab_size, _BLOCK))](
        logits,
        params.flags,
        rows.token_ids,
        rows.committed_len,
        inputs.idx_mapping,
        inputs.num_samples,
        tables.token_counts,
        params.repetition_penalty,
        params.presence_penalty,
        params.frequency_penalty,
        processed,
        row_stride,
        vocab_size,
        WIDTH=inputs.width,
        BLOCK=_BLOCK,
    )
    _sparse_kernel[(num_places,)](
        params.flags,
        rows.token_ids,
        rows.committed_len,
        inputs.idx_mapping,
        inputs.num_samples,
        tables.num_biases,
        tables.bias_tokens,
        tables.bias_values,
        tables.num_bad_words,
        tables.bad_word_ends,
        tables.bad_word_tokens,
        params.min_len,
        params.stop_token_ids,
        processed,
        row_stride,
        tables.bias_tokens.shape[1],
        tables.bad_word_ends.shape[1],
        tables.bad_word_tokens.shape[1],
        params.stop_token_ids.shape[1],
        vocab_size,
        WIDTH=inputs.width,
        BLOCK=256,
    )
