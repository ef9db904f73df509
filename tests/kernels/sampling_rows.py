"""Random rows in the middle of a step, for tests of the sampling kernels: texts, drafts, requests of all features."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from common.types import Request
from model_executor.row_state import RowState
from tests.sampling_reference import make_request
from verifier_svc.sampling.state import SamplingState

VOCAB_SIZE, MAX_LEN, WIDTH = 1500, 160, 3
ALL_FEATURES = ("temperature", "min_p", "top_k", "top_p", "penalties", "logit_bias", "bad_words", "min_tokens")


@dataclass(frozen=True, slots=True)
class StepPlaces:
    """The inputs of a step as far as sampling reads them."""

    width: int
    idx_mapping: Tensor  # [num_reqs] int64
    num_samples: Tensor  # [num_reqs] int64


def random_request(rng: random.Random, prompt: list[int], features: tuple[str, ...] = ALL_FEATURES) -> Request:
    """A request with some of the features; its words and biases are about tokens that the texts use."""

    def has(feature: str) -> bool:
        return feature in features and rng.random() < 0.6

    params: dict[str, Any] = {"temperature": rng.choice([0.5, 0.7, 1.0, 2.0]) if has("temperature") else 0.0}
    if has("min_p"):
        params["min_p"] = rng.choice([0.01, 0.2, 1.0])
    if has("top_k"):
        params["top_k"] = rng.choice([1, 2, 5, 40, 400, VOCAB_SIZE - 1])
    if has("top_p"):
        params["top_p"] = rng.choice([0.05, 0.31, 0.53, 0.9, 0.99])
    if has("penalties"):
        params["repetition_penalty"] = rng.choice([1.0, 0.7, 1.3])
        params["presence_penalty"] = rng.choice([0.0, -0.5, 0.8])
        params["frequency_penalty"] = rng.choice([0.0, -0.3, 0.25])
    if has("logit_bias"):
        tokens = rng.sample(range(30), rng.randint(1, 20)) + rng.sample(range(30, VOCAB_SIZE), rng.choice([1, 300]))
        params["logit_bias"] = {token: rng.choice([-100.0, -2.0, 1.5, 4.0]) for token in tokens}
    words: list[list[int]] = []
    if has("bad_words"):
        words = [[rng.randrange(4) for _ in range(rng.randint(1, 5))] for _ in range(rng.choice([1, 30, 300]))]
    stop: list[int] = []
    if has("min_tokens"):
        stop = rng.sample(range(VOCAB_SIZE), rng.randint(1, 20))
        params |= {"min_tokens": rng.randint(1, 60), "max_tokens": 60}
    return make_request(prompt, seed=rng.randrange(2**64), stop=stop, bad_words=words, **params)


def drawn_tokens(values: Tensor, tokens: Tensor) -> Tensor:
    """What `commit_tokens` picks of [P, num_slots] draws, [P] int64: the best slot, of equal ones the lowest token."""
    best = values.amax(dim=-1, keepdim=True)
    return torch.where(values == best, tokens, 1 << 30).amin(dim=-1).long()


def random_logits(num_places: int, generator: torch.Generator) -> Tensor:
    """Peaked, flat and rounded ones, some with masked tokens, [num_places, VOCAB_SIZE] float32."""
    scale = torch.tensor([0.3, 1.0, 3.0, 8.0])[torch.randint(0, 4, (num_places, 1), generator=generator)]
    logits = torch.randn(num_places, VOCAB_SIZE, generator=generator) * scale
    is_rounded = torch.rand(num_places, 1, generator=generator) < 0.5
    logits = torch.where(is_rounded, (logits * 2).round() / 2, logits)  # many ties
    logits[:, :4] += 3 * scale  # the tokens of the texts
    is_masked = torch.rand(num_places, 1, generator=generator) < 0.3
    return logits.masked_fill(is_masked & (torch.rand(logits.shape, generator=generator) < 0.4), -torch.inf)


class SamplingStep:
    """One step of `num_rows` entries; the last row is finished and has no places."""

    def __init__(
        self,
        seed: int,
        device: torch.device,
        dtype: torch.dtype,
        num_rows: int = 8,
        features: tuple[str, ...] = ALL_FEATURES,
    ) -> None:
        rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
        self.rows = RowState(num_rows, MAX_LEN, 16, device)
        self.reference = SamplingState(num_rows, VOCAB_SIZE, device)  # for the torch sampler
        self.state = SamplingState(num_rows, VOCAB_SIZE, device, has_tables=True)
        for row in range(num_rows):
            text = [rng.randrange(4) for _ in range(rng.choice([1, 2, 3, rng.randint(4, 100)]))]
            prompt_len = rng.randint(1, len(text))
            self.rows.set_row(row, text, prompt_len, len(text) - 1, MAX_LEN)
            drafts = torch.randint(0, 4, (WIDTH,), generator=generator, dtype=torch.int32)
            self.rows.token_ids[row, len(text) : len(text) + WIDTH] = drafts.to(device)
            self.give(row, random_request(rng, text[:prompt_len], features))
        num_samples = torch.randint(0, WIDTH + 1, (num_rows,), generator=generator)
        idx_mapping = torch.randperm(num_rows, generator=generator)
        num_samples[idx_mapping == num_rows - 1] = 0
        self.inputs = StepPlaces(WIDTH, idx_mapping.to(device), num_samples.to(device))
        self.logits = random_logits(num_rows * WIDTH, generator).to(device, dtype)
        places = torch.arange(WIDTH, device=device)
        self.in_use = (places < self.inputs.num_samples[:, None]).flatten()  # [P]
        self.row_of = self.inputs.idx_mapping.repeat_interleave(WIDTH)  # [P]
        self.position = (self.rows.committed_len[self.inputs.idx_mapping][:, None] + places).flatten()  # [P]

    def give(self, row: int, request: Request) -> None:
        """The row samples as the request asks, in both states."""
        self.reference.set_row(row, request)
        self.state.set_row(row, request)
