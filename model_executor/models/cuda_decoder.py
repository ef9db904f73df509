"""A decoder for any batch on a GPU: prefill, and whatever a captured decode step does not do.

The same interface as `Decoder`, with the kernels of the decode step between the vendor's matrix products: one kernel
for residual and norm, one for the rotation, one for silu-mul.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from model_executor.attention.backend import AttentionBackend
from model_executor.forward_batch import ForwardBatch
from model_executor.kernels.add_rms_norm import add_rms_norm
from model_executor.kernels.rotate_heads import rotate_heads
from model_executor.kernels.silu_mul import silu_mul
from model_executor.kv_cache import KVCache, LayerKV
from model_executor.models.config import ModelConfig
from model_executor.models.layers import norm_heads_
from model_executor.models.parameters import DecoderParameters, LayerParameters
from model_executor.models.rotary import rope_cos_sin


class CudaDecoder:
    """Decoder-only transformer on one GPU.

    Args:
        config: the model.
        parameters: its weights.
        layers: `parameters.layers`, in order.
        attention: computes attention in every layer.
        max_model_len: positions 0..max_model_len - 1 are valid.
    """

    def __init__(
        self,
        config: ModelConfig,
        parameters: DecoderParameters,
        layers: Sequence[LayerParameters],
        attention: AttentionBackend[Any],
        max_model_len: int,
    ) -> None:
        self.config = config
        self.attention = attention
        self.max_model_len = max_model_len
        self.dtype = parameters.embed_tokens.dtype
        self.device = parameters.embed_tokens.device
        self._parameters = parameters
        self._layers = layers
        self._cos_sin = rope_cos_sin(config.rope, config.head_dim, max_model_len).to(self.device)

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, kv_cache: KVCache, metadata: Any) -> Tensor:
        """See `Decoder.forward`."""
        eps, parameters = self.config.rms_norm_eps, self._parameters
        stream = F.embedding(batch.input_ids, parameters.embed_tokens)  # [num_tokens, hidden]
        normed = torch.empty_like(stream)
        addend: Tensor | None = None
        for layer, layer_kv in zip(self._layers, kv_cache.layers, strict=True):
            add_rms_norm(addend, stream, layer.input_norm, normed, eps)
            attended = self._attend(normed, layer, layer_kv, batch.positions, metadata)
            add_rms_norm(F.linear(attended, layer.o, layer.o_bias), stream, layer.post_attention_norm, normed, eps)
            gate_up = F.linear(normed, layer.gate_up, layer.gate_up_bias)
            activated = gate_up.new_empty(gate_up.shape[0], self.config.intermediate_size)
            silu_mul(gate_up, activated)
            addend = F.linear(activated, layer.down, layer.down_bias)
        add_rms_norm(addend, stream, parameters.final_norm, normed, eps)
        return normed

    def _attend(
        self, normed: Tensor, layer: LayerParameters, layer_kv: LayerKV, positions: Tensor, metadata: Any
    ) -> Tensor:
        config = self.config
        num_qk = config.num_heads + config.num_kv_heads
        qkv = F.linear(normed, layer.qkv, layer.qkv_bias)
        heads = qkv.view(qkv.shape[0], -1, config.head_dim)  # [num_tokens, num_heads + 2 * num_kv_heads, head_dim]
        if layer.qk_norm is not None:
            norm_heads_(qkv, layer.qk_norm, config.rms_norm_eps)
        rotate_heads(qkv, positions, self._cos_sin, num_qk)
        query, key, value = heads[:, : config.num_heads], heads[:, config.num_heads : num_qk], heads[:, num_qk:]
        return self.attention.forward(query, key, value, layer_kv, metadata).reshape(qkv.shape[0], -1)

    @torch.inference_mode()
    def compute_logits(self, hidden: Tensor) -> Tensor:
        """See `Decoder.compute_logits`."""
        return F.linear(hidden, self._parameters.lm_head).float()
