"""The decoder as a decode step on a GPU runs it: few kernels, fixed shapes, buffers made once.

Two ways through a layer. Up to `MAX_TOKENS` tokens, five fused kernels (docs/adr/0008-fused-gemm-of-few-rows.md); more
tokens go through the vendor's matrix products with `add_rms_norm` and `silu_mul` between them. Both may be captured in
a CUDA graph: nothing is allocated and no shape depends on the data.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from model_executor.kernels.add_rms_norm import add_rms_norm
from model_executor.kernels.decode_inputs import DecodeInputs
from model_executor.kernels.embed_tokens import embed_tokens
from model_executor.kernels.silu_mul import silu_mul
from model_executor.kernels.small_gemm import MAX_TOKENS, NormInput, fits, make_norm_input, small_gemm
from model_executor.kernels.verify_attention import SplitWorkspace, make_split_workspace, verify_attention
from model_executor.kv_cache import KVCache
from model_executor.models.config import ModelConfig
from model_executor.models.layers import norm_heads_
from model_executor.models.parameters import DecoderParameters, LayerParameters
from model_executor.models.rotary import rope_cos_sin


@dataclass(frozen=True, slots=True)
class DecodeBuffers:
    """Activations of a decode step with a fixed number of tokens."""

    stream: Tensor  # [num_tokens, hidden]
    normed: Tensor  # [num_tokens, hidden]
    qkv: Tensor  # [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim]
    attended: Tensor  # [num_tokens, num_heads * head_dim]
    projected: Tensor  # [num_tokens, hidden]
    gate_up: Tensor  # [num_tokens, 2 * intermediate_size]
    activated: Tensor  # [num_tokens, intermediate_size]
    logits: Tensor  # [num_tokens, vocab_size]
    before_attention: NormInput
    before_mlp: NormInput
    workspace: SplitWorkspace


def supports(config: ModelConfig) -> bool:
    """Whether `FusedDecoder` can run the model: half a head is a tile of the tensor cores."""
    return config.head_dim >= 32 and config.head_dim & (config.head_dim - 1) == 0


class FusedDecoder:
    """Decode and verify rows of a Llama-like model on one GPU.

    Args:
        config: the model.
        parameters: its weights, shared with whoever else holds them.
        layers: `parameters.layers`, in order.
        kv_cache: of this model.
        max_model_len: positions 0..max_model_len - 1 are valid.
    """

    def __init__(
        self,
        config: ModelConfig,
        parameters: DecoderParameters,
        layers: Sequence[LayerParameters],
        kv_cache: KVCache,
        max_model_len: int,
    ) -> None:
        self.config = config
        self._parameters = parameters
        self._layers = layers
        self._kv_cache = kv_cache
        self.device = parameters.embed_tokens.device
        self.dtype = parameters.embed_tokens.dtype
        self._cos_sin = rope_cos_sin(config.rope, config.head_dim, max_model_len).to(self.device)
        hidden, inner = config.hidden_size, config.intermediate_size
        attended = config.num_heads * config.head_dim
        self._qkv_size = attended + 2 * config.num_kv_heads * config.head_dim
        shapes = [(self._qkv_size, hidden), (hidden, attended), (inner, hidden), (hidden, inner)]
        shapes.append((config.vocab_size, hidden))
        self._can_fuse = all(fits(n, k) for n, k in shapes) and not config.mlp_bias and not config.o_bias

    def make_buffers(self, num_reqs: int, width: int) -> DecodeBuffers:
        """Activations for `num_reqs` requests of `width` tokens."""
        config, num_tokens = self.config, num_reqs * width

        def empty(columns: int) -> Tensor:
            return torch.empty(num_tokens, columns, dtype=self.dtype, device=self.device)

        return DecodeBuffers(
            stream=empty(config.hidden_size),
            normed=empty(config.hidden_size),
            qkv=empty(self._qkv_size),
            # Places that no request uses are never written by attention, and must not hold what is not a number.
            attended=empty(config.num_heads * config.head_dim).zero_(),
            projected=empty(config.hidden_size),
            gate_up=empty(2 * config.intermediate_size),
            activated=empty(config.intermediate_size),
            logits=empty(config.vocab_size),
            before_attention=make_norm_input(config.hidden_size, self.dtype, self.device),
            before_mlp=make_norm_input(config.hidden_size, self.dtype, self.device),
            workspace=make_split_workspace(
                num_reqs,
                config.num_kv_heads,
                config.num_heads // config.num_kv_heads,
                config.head_dim,
                width,
                self.device,
            ),
        )

    def forward(self, inputs: DecodeInputs, block_table: Tensor, buffers: DecodeBuffers) -> Tensor:
        """Logits of every place of `inputs`, [num_reqs * width, vocab_size]; places not in use hold anything finite.

        Args:
            inputs: of the step.
            block_table: [R, max_blocks].
            buffers: of `make_buffers` for this number of requests and width.
        """
        if inputs.input_ids.shape[0] <= MAX_TOKENS and self._can_fuse:
            return self._forward_fused(inputs, block_table, buffers)
        return self._forward_wide(inputs, block_table, buffers)

    def _forward_fused(self, inputs: DecodeInputs, block_table: Tensor, b: DecodeBuffers) -> Tensor:
        eps, parameters = self.config.rms_norm_eps, self._parameters
        num_tokens = inputs.input_ids.shape[0]
        norms = [layer.input_norm for layer in self._layers[1:]] + [parameters.final_norm]
        embed_tokens(
            inputs.input_ids, parameters.embed_tokens, self._layers[0].input_norm, b.stream, b.before_attention
        )
        scaled, sums = b.before_attention.scaled[:num_tokens], b.before_attention.square_sums
        scaled_mlp, sums_mlp = b.before_mlp.scaled[:num_tokens], b.before_mlp.square_sums
        for index, (layer, next_norm) in enumerate(zip(self._layers, norms, strict=True)):
            small_gemm(scaled, layer.qkv, b.qkv, bias=layer.qkv_bias, square_sums=sums, eps=eps)
            self._attend(index, layer, inputs, block_table, b)
            small_gemm(
                b.attended,
                layer.o,
                b.projected,
                residual=b.stream,
                next_weight=layer.post_attention_norm,
                next_input=b.before_mlp,
            )
            small_gemm(scaled_mlp, layer.gate_up, b.activated, square_sums=sums_mlp, eps=eps, silu=True)
            small_gemm(
                b.activated,
                layer.down,
                b.stream,
                residual=b.projected,
                next_weight=next_norm,
                next_input=b.before_attention,
            )
        small_gemm(scaled, parameters.lm_head, b.logits, square_sums=sums, eps=eps)
        return b.logits

    def _forward_wide(self, inputs: DecodeInputs, block_table: Tensor, b: DecodeBuffers) -> Tensor:
        eps, parameters = self.config.rms_norm_eps, self._parameters
        torch.index_select(parameters.embed_tokens, 0, inputs.input_ids, out=b.stream)
        addend: Tensor | None = None
        for index, layer in enumerate(self._layers):
            add_rms_norm(addend, b.stream, layer.input_norm, b.normed, eps)
            _matmul(b.normed, layer.qkv, layer.qkv_bias, b.qkv)
            self._attend(index, layer, inputs, block_table, b)
            _matmul(b.attended, layer.o, layer.o_bias, b.projected)
            add_rms_norm(b.projected, b.stream, layer.post_attention_norm, b.normed, eps)
            _matmul(b.normed, layer.gate_up, layer.gate_up_bias, b.gate_up)
            silu_mul(b.gate_up, b.activated)
            _matmul(b.activated, layer.down, layer.down_bias, b.projected)
            addend = b.projected
        add_rms_norm(addend, b.stream, parameters.final_norm, b.normed, eps)
        _matmul(b.normed, parameters.lm_head, None, b.logits)
        return b.logits

    def _attend(
        self, index: int, layer: LayerParameters, inputs: DecodeInputs, block_table: Tensor, b: DecodeBuffers
    ) -> None:
        config = self.config
        if layer.qk_norm is not None:
            norm_heads_(b.qkv, layer.qk_norm, config.rms_norm_eps)
        layer_kv = self._kv_cache.layers[index]
        verify_attention(
            b.qkv,
            self._cos_sin,
            layer_kv.key,
            layer_kv.value,
            block_table,
            inputs.idx_mapping,
            inputs.query_start,
            inputs.query_len,
            inputs.seq_lens,
            b.attended,
            config.num_heads,
            inputs.width,
            b.workspace,
        )


def _matmul(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    if bias is None:
        torch.mm(x, weight.t(), out=out)
    else:
        torch.addmm(bias, x, weight.t(), out=out)
