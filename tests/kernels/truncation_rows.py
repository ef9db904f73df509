"""Rows that truncate, and what the ranking of `verifier_svc.sampling.truncation` keeps of them."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from model_executor.kernels.sampling_scores import ProcessedScores
from model_executor.kernels.truncation import TruncationParams
from model_executor.sampling_flags import MIN_P, PENALTIES, RANDOM, TOP_K, TOP_P
from tests.kernels.sampling_rows import VOCAB_SIZE, StepPlaces
from verifier_svc.sampling.truncation import apply_min_p, rank, truncate

# Off often enough that each rule also stands alone.
MIN_PS = (0.0, 0.0, 0.0, 0.02, 0.5, 1.0)
TOP_KS = (VOCAB_SIZE, VOCAB_SIZE, VOCAB_SIZE, 1, 3, 50, 300, 700, VOCAB_SIZE - 1)
TOP_PS = (1.0, 1.0, 0.05, 0.31, 0.53, 0.9, 0.999)

LARGE_VOCAB_SIZE = 39_998
"""Programs of `top_k_cut` and `top_p_draw` take several turns for their shares; the last group of four is half full."""


def make_params(
    num_rows: int,
    device: torch.device,
    temperature: Tensor | float = 1.0,
    top_k: Tensor | int | None = None,
    top_p: Tensor | float = 1.0,
    min_p: Tensor | float = 0.0,
    vocab_size: int = VOCAB_SIZE,
) -> TruncationParams:
    """What is given once is for all rows; a top_k from the vocabulary size on is none."""

    def each(value: Tensor | float, dtype: torch.dtype) -> Tensor:
        return torch.as_tensor(value, dtype=dtype).expand(num_rows).contiguous().to(device)

    params = TruncationParams(
        flags=each(0, torch.int32),
        temperature=each(temperature, torch.float32),
        top_k=each(vocab_size if top_k is None else top_k, torch.int64),
        top_p=each(top_p, torch.float32),
        log_min_p=each(min_p, torch.float32).log(),
    )
    flags = MIN_P * (params.log_min_p > -math.inf) + TOP_K * (params.top_k < vocab_size) + TOP_P * (params.top_p < 1)
    return replace(params, flags=(RANDOM + flags).int())


def random_params(
    num_rows: int, generator: torch.Generator, device: torch.device, top_ps: tuple[float, ...] = TOP_PS
) -> TruncationParams:
    def choose(values: tuple[float, ...]) -> Tensor:
        return torch.tensor(values)[torch.randint(0, len(values), (num_rows,), generator=generator)]

    # Temperatures are powers of two: a GPU's quick division is exact.
    params = make_params(num_rows, device, choose((0.25, 1.0, 2.0)), choose(TOP_KS), choose(top_ps), choose(MIN_PS))
    # Some rows read processed scores; those of the tests are the logits themselves.
    is_processed = torch.rand(num_rows, generator=generator) < 0.5
    return replace(params, flags=params.flags + (PENALTIES * is_processed).int().to(device))


def flat_logits(num_rows: int, generator: torch.Generator) -> Tensor:
    """[num_rows, LARGE_VOCAB_SIZE] float32, all about as likely."""
    return 0.05 * torch.randn(num_rows, LARGE_VOCAB_SIZE, generator=generator)


def peaked_logits(num_rows: int, generator: torch.Generator) -> Tensor:
    """[num_rows, LARGE_VOCAB_SIZE] float32: most of the mass is of 64 tokens, which lie anywhere."""
    logits = torch.randn(num_rows, LARGE_VOCAB_SIZE, generator=generator)
    head = torch.randint(0, LARGE_VOCAB_SIZE, (num_rows, 64), generator=generator)
    return logits.scatter_(1, head, 7.0 + torch.rand(head.shape, generator=generator))


def rows_of(params: TruncationParams, rows: slice) -> TruncationParams:
    return TruncationParams(
        params.flags[rows], params.temperature[rows], params.top_k[rows], params.top_p[rows], params.log_min_p[rows]
    )


def places_of(logits: Tensor, params: TruncationParams) -> tuple[StepPlaces, ProcessedScores]:
    """A place for each row, in use, and what its scores are."""
    num_places, device = logits.shape[0], logits.device
    inputs = StepPlaces(1, torch.arange(num_places, device=device), torch.ones_like(params.top_k))
    cut_value = torch.full((num_places,), -math.inf, device=device)
    cut_token = torch.full((num_places,), logits.shape[1], dtype=torch.int32, device=device)
    return inputs, ProcessedScores(params.flags, logits.float(), cut_value, cut_token)


def scaled_by(logits: Tensor, params: TruncationParams) -> Tensor:
    return logits.float() / params.temperature[:, None]


def kept_by_reference(scaled: Tensor, params: TruncationParams, has_top_p: bool = True) -> Tensor:
    """[P, vocab_size] bool."""
    top_p = params.top_p if has_top_p else None
    values, token_ids, _ = truncate(apply_min_p(scaled, params.log_min_p), params.top_k, top_p, scaled.shape[1])
    return torch.zeros_like(scaled, dtype=torch.bool).scatter_(1, token_ids, values > -math.inf)


def near_limit(scaled: Tensor, params: TruncationParams) -> Tensor:
    """Rows where some run of the ranking weighs top_p to within 1e-5: there rounding may decide."""
    values, _ = rank(apply_min_p(scaled, params.log_min_p), scaled.shape[1])
    in_top_k = torch.arange(scaled.shape[1], device=scaled.device) < params.top_k[:, None]
    probs = torch.softmax(values.double().masked_fill(~in_top_k, -math.inf), dim=-1)
    mass = probs.cumsum(-1)
    return (((mass - params.top_p[:, None].double()).abs() < 1e-5) & (probs > 0)).any(-1)
