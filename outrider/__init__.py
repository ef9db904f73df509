"""Outrider: speculative decoding with the drafter and the verifier as separate services.

Names are loaded when they are first used, so that host-only modules of this package never import torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from common.errors import (
        EngineClosedError,
        InvalidArgumentError,
        ModelLoadError,
        OutriderError,
        ResourceExhaustedError,
        UnknownOptionError,
    )
    from common.sampling_params import SamplingParams
    from outrider.client.async_client import AsyncClient
    from outrider.client.sync_client import Client
    from outrider.llm import LLM
    from outrider.outputs import CompletionOutput, Logprob, RequestOutput

__all__ = [
    "LLM",
    "AsyncClient",
    "Client",
    "CompletionOutput",
    "EngineClosedError",
    "InvalidArgumentError",
    "Logprob",
    "ModelLoadError",
    "OutriderError",
    "RequestOutput",
    "ResourceExhaustedError",
    "SamplingParams",
    "UnknownOptionError",
]

_MODULES = {
    "LLM": "outrider.llm",
    "AsyncClient": "outrider.client.async_client",
    "Client": "outrider.client.sync_client",
    "SamplingParams": "common.sampling_params",
    "CompletionOutput": "outrider.outputs",
    "Logprob": "outrider.outputs",
    "RequestOutput": "outrider.outputs",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'outrider' has no attribute {name!r}")
    return getattr(import_module(_MODULES.get(name, "common.errors")), name)
