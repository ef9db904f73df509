"""Engines around models of random weights on a GPU, and prompts for them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from common.config import EngineConfig
from common.sampling_params import SamplingParams
from common.types import Request
from model_executor.models.registry import LoadedModel
from outrider.local import assemble_engine
from verifier_svc.engine.engine import Engine

SEGMENT_LEN = 128


def make_engine(shape: str, loaded: LoadedModel, num_draft: int, rates: Sequence[float] = (), **options: Any) -> Engine:
    """An engine over `loaded`, which other engines may use as well. The caller closes it.

    Args:
        shape: name of the model.
        loaded: weights on the GPU.
        num_draft: K; 0 is an engine without speculation.
        rates: chance that at least 1, 2, ... draft tokens are accepted; none: by what they are.
        options: of `EngineConfig`, beyond or instead of those here.
    """
    config = EngineConfig(
        **{
            "model": shape,
            "drafter": "ngram" if num_draft else "none",
            "num_speculative_tokens": num_draft,
            "device": "cuda",
            "dtype": "bfloat16",
            "max_num_batched_tokens": 8192,
            "enable_prefix_caching": False,
            "skip_tokenizer_init": True,
        }
        | options
    )
    # An engine takes the layers out of the model that it is given.
    parameters = replace(loaded.parameters, layers=list(loaded.parameters.layers))
    return assemble_engine(config, replace(loaded, parameters=parameters), forced_acceptance=rates).engine


def random_request(name: str, prompt_len: int, new_tokens: int, vocab_size: int, seed: int) -> Request:
    """A prompt of random tokens."""
    rng = random.Random(seed)
    return _request(name, [rng.randrange(vocab_size) for _ in range(prompt_len)], new_tokens, 0, seed)


def repetitive_request(
    name: str, prompt_len: int, new_tokens: int, vocab_size: int, num_draft: int, seed: int
) -> Request:
    """A prompt that is one random segment repeated, so that an n-gram always matches."""
    rng = random.Random(seed)
    segment = [rng.randrange(vocab_size) for _ in range(SEGMENT_LEN)]
    prompt = (segment * (prompt_len // SEGMENT_LEN + 1))[:prompt_len]
    return _request(name, prompt, new_tokens, num_draft, seed)


def _request(name: str, prompt: list[int], new_tokens: int, num_draft: int, seed: int) -> Request:
    params = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True)
    limit = len(prompt) + new_tokens
    return Request(name, prompt, params, seed % 2**63, limit, num_speculative_tokens=num_draft)
