"""One decoder for Llama, Mistral, Qwen2 and Qwen3: what differs between them stands in ModelConfig."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from model_executor.attention.backend import AttentionBackend
from model_executor.forward_batch import ForwardBatch
from model_executor.kv_cache import KVCache, LayerKV
from model_executor.models.config import ModelConfig
from model_executor.models.layers import RMSNorm, build_linear
from model_executor.models.parameters import DecoderParameters, LayerParameters
from model_executor.models.rotary import RotaryTable, rotate


class DecoderLayer:
    """Attention and SwiGLU, each behind an RMS norm and added to the residual stream."""

    def __init__(self, config: ModelConfig, parameters: LayerParameters, attention: AttentionBackend[Any]) -> None:
        self._attention = attention
        self._num_heads = config.num_heads
        self._num_qk_heads = config.num_heads + config.num_kv_heads
        self._num_kv_heads = config.num_kv_heads
        self._head_dim = config.head_dim
        self._input_norm = RMSNorm(parameters.input_norm, config.rms_norm_eps)
        self._qkv = build_linear(parameters.qkv, parameters.qkv_bias)
        self._qk_norm = None if parameters.qk_norm is None else RMSNorm(parameters.qk_norm, config.rms_norm_eps)
        self._o = build_linear(parameters.o, parameters.o_bias)
        self._post_attention_norm = RMSNorm(parameters.post_attention_norm, config.rms_norm_eps)
        self._gate_up = build_linear(parameters.gate_up, parameters.gate_up_bias)
        self._down = build_linear(parameters.down, parameters.down_bias)

    def forward(self, hidden: Tensor, cos: Tensor, sin: Tensor, layer_kv: LayerKV, metadata: Any) -> Tensor:
        """[num_tokens, hidden_size] -> [num_tokens, hidden_size]; cos and sin are [num_tokens, 1, head_dim]."""
        num_tokens = hidden.shape[0]
        qkv = self._qkv(self._input_norm(hidden))
        heads = qkv.view(num_tokens, -1, self._head_dim)  # [num_tokens, num_heads + 2 * num_kv_heads, head_dim]
        qk = heads[:, : self._num_qk_heads]
        if self._qk_norm is not None:
            qk = self._qk_norm(qk)
        qk = rotate(qk, cos, sin)
        query, key, value = qk[:, : self._num_heads], qk[:, self._num_heads :], heads[:, self._num_qk_heads :]
        attended = self._attention.forward(query, key, value, layer_kv, metadata)
        # A sum in place is 1 us cheaper than the sum that oneDNN can do as a part of the product.
        hidden = self._o(attended.reshape(num_tokens, -1)).add_(hidden)
        gate_up = self._gate_up(self._post_attention_norm(hidden))
        gate, up = gate_up.chunk(2, -1)
        return self._down(F.silu(gate).mul_(up)).add_(hidden)


class Decoder:
    """A decoder-only transformer over paged KV.

    Args:
        config: the model.
        parameters: loaded. `parameters.layers` is emptied: a layer's weights may be packed into another layout, and the
            plain ones are let go of one layer at a time.
        attention: computes attention in every layer; its `prepare` makes the metadata of `forward`.
        max_model_len: positions 0..max_model_len - 1 are valid.
    """

    def __init__(
        self, config: ModelConfig, parameters: DecoderParameters, attention: AttentionBackend[Any], max_model_len: int
    ) -> None:
        self.config = config
        self.attention = attention
        self.max_model_len = max_model_len
        self.dtype = parameters.embed_tokens.dtype
        self.device = parameters.embed_tokens.device
        self._rotary = RotaryTable(config.rope, config.head_dim, max_model_len, self.dtype, self.device)
        self._layers: list[DecoderLayer] = []
        while parameters.layers:
            self._layers.append(DecoderLayer(config, parameters.layers.pop(0), attention))
        self._embed_tokens = parameters.embed_tokens
        self._final_norm = RMSNorm(parameters.final_norm, config.rms_norm_eps)
        self._lm_head = build_linear(parameters.lm_head, None)

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, kv_cache: KVCache, metadata: Any) -> Tensor:
        """Run all query tokens of `batch` and write their KV.

        Args:
            batch: query tokens of all requests; token ids and positions within their ranges.
            kv_cache: of this model's shape.
            metadata: `attention.prepare(batch)`.

        Returns:
            Hidden states after the final norm, [num_tokens, hidden_size], of the model's dtype.
        """
        hidden = F.embedding(batch.input_ids, self._embed_tokens)  # [num_tokens, hidden_size]
        cos, sin = self._rotary.gather(batch.positions)
        for layer, layer_kv in zip(self._layers, kv_cache.layers, strict=True):
            hidden = layer.forward(hidden, cos, sin, layer_kv, metadata)
        return self._final_norm(hidden)

    @torch.inference_mode()
    def compute_logits(self, hidden: Tensor) -> Tensor:
        """[n, hidden_size] after the final norm -> logits [n, vocab_size] float32."""
        return self._lm_head(hidden).float()
