"""Tables on the device of what rows ask of the logit processors: fixed capacity, made once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from common.sampling_params import MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS, MAX_LOGIT_BIAS

MAX_ROW_BAD_WORDS: Final = 3 * MAX_BAD_WORDS
"""Those given as tokens, and two spellings of those given as text."""


@dataclass(frozen=True, slots=True)
class ProcessorTables:
    """What rows ask of `kernels.process_logits`, overwritten with each new request; the counts are the kernel's own.

    For R = 256 and V = 128256: counts 131 MB, bad words 51 MB, biases 2 MB.
    """

    token_counts: Tensor  # [R, vocab_size] int32: how often in the output, and bit 30: in the prompt
    counted_len: Tensor  # [R] int64, committed tokens that token_counts knows of; 0 has it cleared first
    num_biases: Tensor  # [R] int64
    bias_tokens: Tensor  # [R, MAX_LOGIT_BIAS] int64, all different
    bias_values: Tensor  # [R, MAX_LOGIT_BIAS] float32
    num_bad_words: Tensor  # [R] int64
    bad_word_ends: Tensor  # [R, MAX_ROW_BAD_WORDS] int64, where each word ends in bad_word_tokens
    bad_word_tokens: Tensor  # [R, MAX_ROW_BAD_WORDS * MAX_BAD_WORD_TOKENS] int32, one word after the other


def make_processor_tables(num_rows: int, vocab_size: int, device: torch.device) -> ProcessorTables:
    """Tables of `num_rows` rows that ask for nothing."""

    def zeros(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(num_rows, *shape, dtype=dtype, device=device)

    return ProcessorTables(
        token_counts=zeros(vocab_size, dtype=torch.int32),
        counted_len=zeros(dtype=torch.int64),
        num_biases=zeros(dtype=torch.int64),
        bias_tokens=zeros(MAX_LOGIT_BIAS, dtype=torch.int64),
        bias_values=zeros(MAX_LOGIT_BIAS, dtype=torch.float32),
        num_bad_words=zeros(dtype=torch.int64),
        bad_word_ends=zeros(MAX_ROW_BAD_WORDS, dtype=torch.int64),
        bad_word_tokens=zeros(MAX_ROW_BAD_WORDS * MAX_BAD_WORD_TOKENS, dtype=torch.int32),
    )
