"""Models of known shapes with random weights, made on the device: speed does not depend on what they say."""

from __future__ import annotations

import torch

from model_executor.models.config import ModelConfig, RopeConfig
from model_executor.models.parameters import allocate_parameters, checkpoint_targets
from model_executor.models.registry import LoadedModel

_COMMON = {
    "architecture": "LlamaForCausalLM",
    "vocab_size": 128256,
    "num_heads": 32,
    "num_kv_heads": 8,
    "rms_norm_eps": 1e-5,
    "rope": RopeConfig(theta=500000.0),
    "max_position_embeddings": 131072,
    "attention_bias": False,
    "o_bias": False,
    "mlp_bias": False,
    "qk_norm": False,
    "eos_token_ids": (),
    "bos_token_id": None,
    "dtype": torch.bfloat16,
}

SHAPES: dict[str, ModelConfig] = {
    "8b": ModelConfig(
        **_COMMON, hidden_size=4096, intermediate_size=14336, num_layers=32, head_dim=128, tie_word_embeddings=False
    ),
    "1b": ModelConfig(
        **_COMMON, hidden_size=2048, intermediate_size=8192, num_layers=16, head_dim=64, tie_word_embeddings=True
    ),
}


def make_random_model(config: ModelConfig, max_model_len: int, device: torch.device, seed: int = 0) -> LoadedModel:
    """Weights of normal noise, norms of ones."""
    parameters = allocate_parameters(config, config.dtype, device)
    generator = torch.Generator(device=device).manual_seed(seed)
    for name, target in checkpoint_targets(parameters, config).items():
        if "norm" in name:
            target.fill_(1.0)
        else:
            target.normal_(std=0.02, generator=generator)
    return LoadedModel(config, parameters, max_model_len)
