"""What `python -m bench kernels` times of sampling: all kernels between the logits and the commit together."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from bench.kernel_case import Case, Shape, Sizes, Work
from common.config import BLOCK_SIZE
from common.sampling_params import SamplingParams
from common.types import Request
from model_executor.kernels.step_inputs import make_step_inputs
from model_executor.row_state import RowState
from verifier_svc.sampling.device_sampler import DeviceSampler
from verifier_svc.sampling.state import SamplingState

PROMPT_LEN = 64


def peaked_logits(num_places: int, vocab_size: int, device: torch.device) -> torch.Tensor:
    """[P, V] with a head, as those of a trained model have: of 128256 tokens at temperature 0.8, a nucleus of 0.9 holds
    1 to 15, at the median 6 (of 64 places)."""
    head = torch.randint(0, vocab_size, (num_places, 64), device=device)
    bonus = torch.linspace(14.0, 6.0, 64, device=device).expand(num_places, -1)
    return (torch.randn(num_places, vocab_size, device=device) * 2.0).scatter_add_(1, head, bonus)


def flat_logits(num_places: int, vocab_size: int, device: torch.device) -> torch.Tensor:
    """[P, V] without a head: the same nucleus holds 1000 to 6000 tokens, at the median 4500 (of 256 places)."""
    return torch.randn(num_places, vocab_size, device=device) * 2.5


MakeLogits = Callable[[int, int, torch.device], torch.Tensor]

WAYS: dict[str, tuple[SamplingParams, MakeLogits]] = {
    "temperature": (SamplingParams(temperature=0.8), peaked_logits),
    "top-p": (SamplingParams(temperature=0.8, top_p=0.9), peaked_logits),
    "top-p of flat logits": (SamplingParams(temperature=0.8, top_p=0.9), flat_logits),
    "top-k, top-p, min-p": (SamplingParams(temperature=0.8, top_k=40, top_p=0.9, min_p=0.02), peaked_logits),
    "penalties": (SamplingParams(temperature=0.8, repetition_penalty=1.1, presence_penalty=0.2), peaked_logits),
    "log probabilities": (SamplingParams(temperature=0.8, logprobs=20), peaked_logits),
}


def sampling_cases(shape: Shape, sizes: Sizes) -> Iterator[Case]:
    for batch in sizes.batches:
        for way, (params, make_logits) in WAYS.items():
            size = f"{shape.name} {batch} rows x {sizes.num_draft + 1} places, {way}"
            yield Case("sampling", size, partial(_sampling, shape, sizes, batch, params, make_logits))


def _sampling(
    shape: Shape, sizes: Sizes, batch: int, params: SamplingParams, make_logits: MakeLogits, device: torch.device
) -> Work:
    vocab_size = shape.config.vocab_size
    rows = RowState(batch, PROMPT_LEN + 64, BLOCK_SIZE, device)
    state = SamplingState(batch, vocab_size, device, has_tables=True)
    inputs = make_step_inputs(batch, sizes.num_draft, device)
    inputs.idx_mapping.copy_(torch.arange(batch))
    inputs.num_samples.fill_(inputs.width)
    for row in range(batch):
        tokens = torch.randint(0, vocab_size, (PROMPT_LEN,)).tolist()
        rows.set_row(row, tokens, PROMPT_LEN, PROMPT_LEN - 1, PROMPT_LEN + 64)
        state.set_row(row, Request(f"r{row}", tokens, params, row, PROMPT_LEN + 64))
    sampler = DeviceSampler(state, rows, batch * inputs.width)
    logits = make_logits(batch * inputs.width, vocab_size, device).to(shape.dtype)
    drawn = torch.randint(0, vocab_size, (batch, inputs.width), dtype=torch.int32, device=device)
    num_bytes = logits.numel() * logits.element_size()
    if params.logprobs is not None:
        return Work([partial(sampler.logprobs, logits, inputs, drawn)], num_bytes)
    draw = sampler.plain if state.is_plain(range(batch)) else sampler.processed
    return Work([partial(draw, logits, inputs)], num_bytes)
