"""Parameters of a decoder: merged matrices, allocated once, and where each checkpoint tensor goes in them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from model_executor.models.config import ModelConfig


@dataclass(frozen=True, slots=True)
class LayerParameters:
    """One decoder layer. q, k and v stand in one matrix, gate and up in another: one GEMM each."""

    input_norm: Tensor  # [hidden_size]
    qkv: Tensor  # [(num_heads + 2 * num_kv_heads) * head_dim, hidden_size]
    qkv_bias: Tensor | None  # [(num_heads + 2 * num_kv_heads) * head_dim]
    qk_norm: Tensor | None  # [num_heads + num_kv_heads, head_dim], the query's weight for each head, then the key's
    o: Tensor  # [hidden_size, num_heads * head_dim]
    o_bias: Tensor | None  # [hidden_size]
    post_attention_norm: Tensor  # [hidden_size]
    gate_up: Tensor  # [2 * intermediate_size, hidden_size]
    gate_up_bias: Tensor | None  # [2 * intermediate_size]
    down: Tensor  # [hidden_size, intermediate_size]
    down_bias: Tensor | None  # [hidden_size]


@dataclass(frozen=True, slots=True)
class DecoderParameters:
    """All parameters. `lm_head` is `embed_tokens` itself where the model ties them."""

    embed_tokens: Tensor  # [vocab_size, hidden_size]
    layers: list[LayerParameters]
    final_norm: Tensor  # [hidden_size]
    lm_head: Tensor  # [vocab_size, hidden_size]


def allocate_parameters(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> DecoderParameters:
    """Uninitialised parameters of the shapes that `config` asks for."""

    def empty(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    hidden, inner, head_dim = config.hidden_size, config.intermediate_size, config.head_dim
    num_qk_heads = config.num_heads + config.num_kv_heads
    qkv_size = (num_qk_heads + config.num_kv_heads) * head_dim
    layers = [
        LayerParameters(
            input_norm=empty(hidden),
            qkv=empty(qkv_size, hidden),
            qkv_bias=empty(qkv_size) if config.attention_bias else None,
            qk_norm=empty(num_qk_heads, head_dim) if config.qk_norm else None,
            o=empty(hidden, config.num_heads * head_dim),
            o_bias=empty(hidden) if config.o_bias else None,
            post_attention_norm=empty(hidden),
            gate_up=empty(2 * inner, hidden),
            gate_up_bias=empty(2 * inner) if config.mlp_bias else None,
            down=empty(hidden, inner),
            down_bias=empty(hidden) if config.mlp_bias else None,
        )
        for _ in range(config.num_layers)
    ]
    embed_tokens = empty(config.vocab_size, hidden)
    lm_head = embed_tokens if config.tie_word_embeddings else empty(config.vocab_size, hidden)
    return DecoderParameters(embed_tokens=embed_tokens, layers=layers, final_norm=empty(hidden), lm_head=lm_head)


def checkpoint_targets(parameters: DecoderParameters, config: ModelConfig) -> dict[str, Tensor]:
    """Checkpoint tensor name -> the part of a parameter that receives it; copying into it loads the tensor."""
    targets = {"model.embed_tokens.weight": parameters.embed_tokens, "model.norm.weight": parameters.final_norm}
    if not config.tie_word_embeddings:
        targets["lm_head.weight"] = parameters.lm_head
    for index, layer in enumerate(parameters.layers):
        for name, target in _layer_targets(layer, config).items():
            targets[f"model.layers.{index}.{name}"] = target
    return targets


def _layer_targets(layer: LayerParameters, config: ModelConfig) -> dict[str, Tensor]:
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    qkv_sizes, gate_up_sizes = (q_size, kv_size, kv_size), (config.intermediate_size, config.intermediate_size)
    targets = {
        "input_layernorm.weight": layer.input_norm,
        "post_attention_layernorm.weight": layer.post_attention_norm,
        "self_attn.o_proj.weight": layer.o,
        "mlp.down_proj.weight": layer.down,
    }
    merged: list[tuple[str, Tensor | None, Tensor | None, tuple[int, ...], tuple[str, ...]]] = [
        ("self_attn", layer.qkv, layer.qkv_bias, qkv_sizes, ("q_proj", "k_proj", "v_proj")),
        ("mlp", layer.gate_up, layer.gate_up_bias, gate_up_sizes, ("gate_proj", "up_proj")),
    ]
    for module, weight, bias, sizes, names in merged:
        for kind, tensor in (("weight", weight), ("bias", bias)):
            if tensor is not None:
                parts = tensor.split(sizes)
                targets |= {f"{module}.{name}.{kind}": part for name, part in zip(names, parts, strict=True)}
    if layer.o_bias is not None:
        targets["self_attn.o_proj.bias"] = layer.o_bias
    if layer.down_bias is not None:
        targets["mlp.down_proj.bias"] = layer.down_bias
    if layer.qk_norm is not None:
        # The checkpoint has one vector [head_dim] for all heads; only the first row of each is filled here, and
        # `spread_qk_norm` copies it to the others.
        targets["self_attn.q_norm.weight"] = layer.qk_norm[0]
        targets["self_attn.k_norm.weight"] = layer.qk_norm[config.num_heads]
    return targets


def spread_qk_norm(parameters: DecoderParameters, config: ModelConfig) -> None:
    """After loading: give every head its row of the q/k norm weight, so that queries and keys share one multiply."""
    for layer in parameters.layers:
        if layer.qk_norm is not None:
            layer.qk_norm[1 : config.num_heads] = layer.qk_norm[0]
            layer.qk_norm[config.num_heads + 1 :] = layer.qk_norm[config.num_heads]
