"""What a GPU needs at least: copy bandwidth, and the matrix products of a step with nothing between them."""

from __future__ import annotations

import torch

from bench.timing import graph_ms
from model_executor.models.registry import LoadedModel


def measure_copy_bandwidth(device: torch.device, num_bytes: int = 4 << 30) -> float:
    """Bytes read plus bytes written a second by a copy on the device."""
    source = torch.empty(num_bytes // 8, dtype=torch.int64, device=device).random_()
    target = torch.empty_like(source)
    # An operation rather than a copy: in a graph a copy goes to the copy engines, at two thirds of the bandwidth.
    return 2 * num_bytes / (graph_ms(lambda: torch.bitwise_not(source, out=target)) / 1e3)


def measure_gemm_floor(loaded: LoadedModel, num_tokens: int, num_logits: int | None = None) -> float:
    """Milliseconds of nothing but a step's matrix products, one after the other in a graph.

    Args:
        loaded: the model, on its GPU.
        num_tokens: of the step.
        num_logits: tokens of the step that the output projection is computed for; None: all.
    """
    parameters, config = loaded.parameters, loaded.config
    device, dtype = parameters.embed_tokens.device, parameters.embed_tokens.dtype
    num_logits = num_tokens if num_logits is None else num_logits

    def empty(columns: int) -> torch.Tensor:
        return torch.randn(num_tokens, columns, device=device).to(dtype)

    hidden, inner = empty(config.hidden_size), empty(config.intermediate_size)
    attended, out = empty(config.num_heads * config.head_dim), empty(config.hidden_size)
    qkv, gate_up = empty(parameters.layers[0].qkv.shape[0]), empty(2 * config.intermediate_size)
    logits = torch.empty(num_logits, config.vocab_size, device=device, dtype=dtype)

    def products() -> None:
        for layer in parameters.layers:
            torch.mm(hidden, layer.qkv.t(), out=qkv)
            torch.mm(attended, layer.o.t(), out=out)
            torch.mm(hidden, layer.gate_up.t(), out=gate_up)
            torch.mm(inner, layer.down.t(), out=out)
        torch.mm(hidden[:num_logits], parameters.lm_head.t(), out=logits)

    return graph_ms(products)


def kv_bytes_per_token(loaded: LoadedModel) -> int:
    """Bytes of KV that a token of context takes, in bfloat16."""
    config = loaded.config
    return 2 * config.num_layers * config.num_kv_heads * config.head_dim * 2
