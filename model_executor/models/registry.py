"""From a Hugging Face directory to a decoder that is ready to run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from common.config import BLOCK_SIZE
from common.errors import InvalidArgumentError
from model_executor.attention.torch_backend import TorchAttentionBackend
from model_executor.models.config import ModelConfig, load_model_config
from model_executor.models.decoder import Decoder
from model_executor.models.parameters import (
    DecoderParameters,
    allocate_parameters,
    checkpoint_targets,
    spread_qk_norm,
)
from model_executor.models.weights import load_weights

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model's weights in memory, before anything is built around them."""

    config: ModelConfig
    parameters: DecoderParameters
    max_model_len: int


def load_model(
    directory: str | Path,
    dtype: Literal["auto", "float32", "bfloat16"] = "auto",
    device: torch.device | str = "cpu",
    max_model_len: int | None = None,
    progress: bool = True,
) -> Decoder:
    """`load_parameters` and `build_decoder`."""
    return build_decoder(load_parameters(directory, dtype, device, max_model_len, progress))


def load_parameters(
    directory: str | Path,
    dtype: Literal["auto", "float32", "bfloat16"] = "auto",
    device: torch.device | str = "cpu",
    max_model_len: int | None = None,
    progress: bool = True,
) -> LoadedModel:
    """Load the model in `directory` for serving.

    Args:
        directory: config.json and safetensors, as `save_pretrained` writes them.
        dtype: of weights, KV and computation; auto: float32 on a CPU, so that output does not depend on how tokens are
            batched, and the checkpoint's dtype elsewhere.
        device: where the model runs.
        max_model_len: longest prompt + output; None: what the model allows.
        progress: show a bar, if standard error is a terminal.

    Raises:
        ModelLoadError: the directory cannot be served.
        InvalidArgumentError: max_model_len is more than the model allows, or dtype is unknown.
    """
    config = load_model_config(directory)
    device = torch.device(device)
    length = resolve_max_model_len(max_model_len, config)
    parameters = allocate_parameters(config, resolve_dtype(dtype, config, device), device)
    load_weights(directory, checkpoint_targets(parameters, config), progress)
    spread_qk_norm(parameters, config)
    return LoadedModel(config, parameters, length)


def build_decoder(loaded: LoadedModel) -> Decoder:
    """A decoder for any batch; it may take the layers out of `loaded.parameters`."""
    config, parameters = loaded.config, loaded.parameters
    attention = TorchAttentionBackend(config.num_heads, config.num_kv_heads, BLOCK_SIZE, parameters.embed_tokens.dtype)
    return Decoder(config, parameters, attention, loaded.max_model_len)


def resolve_dtype(dtype: str, config: ModelConfig, device: torch.device) -> torch.dtype:
    """The dtype that `dtype` ('auto', 'float32' or 'bfloat16') means for a model on a device."""
    if dtype == "auto":
        return torch.float32 if device.type == "cpu" else config.dtype
    if dtype not in _DTYPES:
        raise InvalidArgumentError("dtype", dtype, f"one of auto, {', '.join(_DTYPES)}")
    return _DTYPES[dtype]


def resolve_max_model_len(max_model_len: int | None, config: ModelConfig) -> int:
    """`max_model_len`, or what the model allows where it is None."""
    allowed = config.max_position_embeddings
    if max_model_len is None:
        return allowed
    if not 2 <= max_model_len <= allowed:  # a token of prompt and one of output
        limit = f"2 to {allowed}, the max_position_embeddings of the model"
        raise InvalidArgumentError("max_model_len", max_model_len, limit)
    return max_model_len
