"""The decoder of steps on a GPU: few kernels, fixed shapes, buffers made once.

A step of decode rows with up to 64 tokens goes through five fused kernels a layer: those of `small_gemm` up to 16 and
those of `wide_gemm` above (docs/adr/0008-fused-gemm-of-few-rows.md). With up to 16 tokens it is two kernels a layer on
a GPU that can do `product_chain` (docs/adr/0013-product-chain.md). All others go through the vendor's matrix products
with `rms_norm` and `silu_mul` between them, and a mixed step has the kernels of prefill beside those of decode. All may
be captured in CUDA graphs: nothing is allocated and no shape depends on the data.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from model_executor.kernels.embed_tokens import embed_tokens
from model_executor.kernels.fused_gemm import Epilogue, NormInput
from model_executor.kernels.norm_heads import norm_heads
from model_executor.kernels.prefill_attention import prefill_attention
from model_executor.kernels.product_chain import MAX_TOKENS as MAX_CHAIN_TOKENS
from model_executor.kernels.product_chain import (
    ChainBuffers,
    ChainWeights,
    make_chain_buffers,
    num_programs,
    prepare_product_chain,
    runs_on,
)
from model_executor.kernels.product_chain import fits as chain_fits
from model_executor.kernels.rms_norm import rms_norm
from model_executor.kernels.silu_mul import silu_mul
from model_executor.kernels.small_gemm import MAX_TOKENS, fits, make_norm_input, small_gemm
from model_executor.kernels.step_inputs import StepInputs
from model_executor.kernels.verify_attention import SplitWorkspace, make_split_workspace, verify_attention
from model_executor.kernels.wide_gemm import MAX_TOKENS as MAX_WIDE_TOKENS
from model_executor.kernels.wide_gemm import make_split_parts, make_wide_norm_input, wide_gemm
from model_executor.kernels.write_kv import write_kv
from model_executor.kv_cache import KVCache, LayerKV
from model_executor.models.config import ModelConfig
from model_executor.models.parameters import DecoderParameters, LayerParameters
from model_executor.models.rotary import rope_cos_sin


@dataclass(frozen=True, slots=True)
class FusedProducts:
    """The products of a fused step, and what they leave for each other."""

    max_tokens: int
    product: Callable[[Tensor, Tensor, Tensor, Epilogue], None]  # x, weight, out, epilogue, as `small_gemm`
    before_attention: NormInput
    before_mlp: NormInput


@dataclass(frozen=True, slots=True)
class StepBuffers:
    """Activations of a step of T tokens and P places to sample. Steps run one after the other and share them."""

    stream: Tensor  # [T, hidden]
    normed: Tensor  # [T, hidden], after the last layer the hidden state of every token, where all are asked for
    qkv: Tensor  # [T, (num_heads + 2 * num_kv_heads) * head_dim]
    attended: Tensor  # [T, num_heads * head_dim]
    projected: Tensor  # [T, hidden], of the fused way
    gate_up: Tensor  # [T, 2 * intermediate_size]
    activated: Tensor  # [T, intermediate_size]
    sampled: Tensor  # [P, hidden], of a mixed step: the stream of the tokens that it samples behind
    sampled_attended: Tensor  # [P, num_heads * head_dim]
    logits: Tensor  # [P, vocab_size]
    fused: tuple[FusedProducts, ...]  # those for fewer tokens first
    chain: ChainBuffers | None  # None: no `product_chain` for this model or device
    workspace: SplitWorkspace

    def first(self, num_tokens: int, num_places: int) -> StepBuffers:
        """The same memory for a smaller step."""
        return StepBuffers(
            self.stream[:num_tokens],
            self.normed[:num_tokens],
            self.qkv[:num_tokens],
            self.attended[:num_tokens],
            self.projected[:num_tokens],
            self.gate_up[:num_tokens],
            self.activated[:num_tokens],
            self.sampled[:num_places],
            self.sampled_attended[:num_places],
            self.logits[:num_places],
            self.fused,
            self.chain,
            self.workspace,
        )


def supports(config: ModelConfig) -> bool:
    """Whether `FusedDecoder` can run the model: half a head is a tile of the tensor cores."""
    return config.head_dim >= 32 and config.head_dim & (config.head_dim - 1) == 0


class FusedDecoder:
    """A Llama-like model on one GPU.

    Args:
        config: the model.
        parameters: its weights, shared with whoever else holds them.
        layers: `parameters.layers`, in order.
        max_model_len: positions 0..max_model_len - 1 are valid.
        uses_chains: run `product_chain` where it can run. It wants the GPU for itself while it runs.
    """

    def __init__(
        self,
        config: ModelConfig,
        parameters: DecoderParameters,
        layers: Sequence[LayerParameters],
        max_model_len: int,
        uses_chains: bool = True,
    ) -> None:
        self.config = config
        self._parameters = parameters
        self._layers = layers
        self.device = parameters.embed_tokens.device
        self.dtype = parameters.embed_tokens.dtype
        self._cos_sin = rope_cos_sin(config.rope, config.head_dim, max_model_len).to(self.device)
        hidden, inner = config.hidden_size, config.intermediate_size
        attended = config.num_heads * config.head_dim
        self._qkv_size = attended + 2 * config.num_kv_heads * config.head_dim
        shapes = [(self._qkv_size, hidden), (hidden, attended), (inner, hidden), (hidden, inner)]
        shapes.append((config.vocab_size, hidden))
        self._can_fuse = all(fits(n, k) for n, k in shapes) and not config.mlp_bias and not config.o_bias
        self._can_chain = False
        if uses_chains and self._can_fuse and runs_on(self.device, self.dtype):
            next_sizes = (self._qkv_size, config.vocab_size)
            self._can_chain = chain_fits(hidden, attended, inner, next_sizes, num_programs(self.device))

    def make_buffers(self, max_tokens: int, max_places: int, max_reqs: int, width: int) -> StepBuffers:
        """Activations for steps of at most `max_tokens` tokens, `max_places` places to sample and `max_reqs` entries.

        Args:
            max_tokens, max_places, max_reqs: of the largest step.
            width: K + 1, most query tokens of an entry that `verify_attention` does.
        """
        config = self.config

        def empty(rows: int, columns: int) -> Tensor:
            return torch.empty(rows, columns, dtype=self.dtype, device=self.device)

        return StepBuffers(
            stream=empty(max_tokens, config.hidden_size),
            normed=empty(max_tokens, config.hidden_size),
            qkv=empty(max_tokens, self._qkv_size),
            # Places that no entry uses are never written by attention, and must not hold what is not a number.
            attended=empty(max_tokens, config.num_heads * config.head_dim).zero_(),
            projected=empty(max_tokens, config.hidden_size),
            gate_up=empty(max_tokens, 2 * config.intermediate_size),
            activated=empty(max_tokens, config.intermediate_size),
            sampled=empty(max_places, config.hidden_size),
            sampled_attended=empty(max_places, config.num_heads * config.head_dim),
            logits=empty(max_places, config.vocab_size),
            fused=self._make_fused_products(),
            chain=make_chain_buffers(config.hidden_size, config.intermediate_size, self.device)
            if self._can_chain
            else None,
            workspace=make_split_workspace(
                max_reqs,
                config.num_kv_heads,
                config.num_heads // config.num_kv_heads,
                config.head_dim,
                width,
                self.device,
            ),
        )

    def pieces(
        self,
        inputs: StepInputs,
        block_table: Tensor,
        kv_cache: KVCache,
        buffers: StepBuffers,
        keeps_hidden: bool = False,
    ) -> list[Callable[[], None]]:
        """A forward pass as calls to be made in order: every second one is attention, and no other reads the KV cache.

        They leave the logits of every place in `buffers.logits`; places not in use hold anything finite.

        Args:
            inputs: of the step.
            block_table: [R, max_blocks].
            kv_cache: of this model.
            buffers: of the largest step.
            keeps_hidden: leave the hidden state of every token in `buffers.normed`. Otherwise a mixed step computes
                what comes after the last attention only for the tokens that it samples behind: a 32nd of 32 layers.
        """
        num_tokens, num_places = inputs.input_ids.shape[0], inputs.sample_index.shape[0]
        b = buffers.first(num_tokens, num_places)
        if buffers.chain is not None and not inputs.is_mixed and num_tokens <= MAX_CHAIN_TOKENS:
            return [self._chained(inputs, block_table, kv_cache, b, buffers.chain)]
        for fused in buffers.fused:
            if not inputs.is_mixed and num_tokens <= fused.max_tokens:
                return [partial(self._forward_fused, inputs, block_table, kv_cache, b, fused)]
        pieces: list[Callable[[], None]] = [partial(self._enter, inputs, b)]
        for index, (layer, layer_kv) in enumerate(zip(self._layers, kv_cache.layers, strict=True)):
            pieces.append(partial(self._attend, layer, layer_kv, inputs, block_table, b))
            if index + 1 < len(self._layers):
                pieces.append(partial(self._between_attentions, layer, self._layers[index + 1], b))
            elif inputs.is_mixed and not keeps_hidden:
                pieces.append(partial(self._leave_sampled, layer, inputs, b, buffers.first(num_places, num_places)))
            else:
                pieces.append(partial(self._leave, layer, inputs, b))
        return pieces

    def forward(self, inputs: StepInputs, block_table: Tensor, kv_cache: KVCache, buffers: StepBuffers) -> Tensor:
        """All pieces at once: logits of every place, [num_reqs * width, vocab_size]."""
        for piece in self.pieces(inputs, block_table, kv_cache, buffers):
            piece()
        return buffers.logits[: inputs.sample_index.shape[0]]

    def _make_fused_products(self) -> tuple[FusedProducts, ...]:
        """None for a model that the fused products cannot do."""
        if not self._can_fuse:
            return ()
        sizes = self.config.hidden_size, self.dtype, self.device
        wide = partial(wide_gemm, parts=make_split_parts(self.device))
        return (
            FusedProducts(MAX_TOKENS, small_gemm, make_norm_input(*sizes), make_norm_input(*sizes)),
            FusedProducts(MAX_WIDE_TOKENS, wide, make_wide_norm_input(*sizes), make_wide_norm_input(*sizes)),
        )

    def _forward_fused(
        self, inputs: StepInputs, block_table: Tensor, kv_cache: KVCache, b: StepBuffers, fused: FusedProducts
    ) -> None:
        eps, parameters = self.config.rms_norm_eps, self._parameters
        num_tokens, product = inputs.input_ids.shape[0], fused.product
        scaled = fused.before_attention.scaled[:num_tokens]
        scaled_mlp = fused.before_mlp.scaled[:num_tokens]
        after_norm = Epilogue(square_sums=fused.before_attention.square_sums, eps=eps)
        gate_up = Epilogue(square_sums=fused.before_mlp.square_sums, eps=eps, silu=True)
        self._embed_fused(inputs, b, fused)
        for layer, layer_kv, next_norm in zip(self._layers, kv_cache.layers, self._next_norms(), strict=True):
            product(scaled, layer.qkv, b.qkv, replace(after_norm, bias=layer.qkv_bias))
            self._attend(layer, layer_kv, inputs, block_table, b)
            to_mlp = Epilogue(residual=b.stream, next_weight=layer.post_attention_norm, next_input=fused.before_mlp)
            product(b.attended, layer.o, b.projected, to_mlp)
            product(scaled_mlp, layer.gate_up, b.activated, gate_up)
            to_attention = Epilogue(residual=b.projected, next_weight=next_norm, next_input=fused.before_attention)
            product(b.activated, layer.down, b.stream, to_attention)
        product(scaled, parameters.lm_head, b.logits, after_norm)

    def _embed_fused(self, inputs: StepInputs, b: StepBuffers, fused: FusedProducts) -> None:
        embedding, norm = self._parameters.embed_tokens, self._layers[0].input_norm
        embed_tokens(inputs.input_ids, embedding, norm, b.stream, fused.before_attention)

    def _next_norms(self) -> list[Tensor]:
        """The norm behind each layer."""
        return [layer.input_norm for layer in self._layers[1:]] + [self._parameters.final_norm]

    def _chained(
        self, inputs: StepInputs, block_table: Tensor, kv_cache: KVCache, b: StepBuffers, chain: ChainBuffers
    ) -> Callable[[], None]:
        """A forward pass of attentions with chains of products between them."""
        after = [(layer.qkv, layer.qkv_bias, b.qkv) for layer in self._layers[1:]]
        after.append((self._parameters.lm_head, None, b.logits))
        launches: list[Callable[[], None]] = []
        for layer, next_norm, (weight, bias, out) in zip(self._layers, self._next_norms(), after, strict=True):
            weights = ChainWeights(
                layer.o, layer.post_attention_norm, layer.gate_up, layer.down, next_norm, weight, bias
            )
            launches.append(prepare_product_chain(b.attended, b.stream, out, weights, chain, self.config.rms_norm_eps))
        return partial(self._forward_chained, inputs, block_table, kv_cache, b, launches)

    def _forward_chained(
        self,
        inputs: StepInputs,
        block_table: Tensor,
        kv_cache: KVCache,
        b: StepBuffers,
        launches: Sequence[Callable[[], None]],
    ) -> None:
        first, fused = self._layers[0], b.fused[0]
        self._embed_fused(inputs, b, fused)
        norm = fused.before_attention
        epilogue = Epilogue(square_sums=norm.square_sums, eps=self.config.rms_norm_eps, bias=first.qkv_bias)
        fused.product(norm.scaled[: inputs.input_ids.shape[0]], first.qkv, b.qkv, epilogue)
        for layer, layer_kv, products in zip(self._layers, kv_cache.layers, launches, strict=True):
            self._attend(layer, layer_kv, inputs, block_table, b, lets_next_begin=True)
            products()

    def _enter(self, inputs: StepInputs, b: StepBuffers) -> None:
        """Up to the first attention."""
        torch.index_select(self._parameters.embed_tokens, 0, inputs.input_ids, out=b.stream)
        self._enter_layer(self._layers[0], b)

    def _enter_layer(self, layer: LayerParameters, b: StepBuffers) -> None:
        rms_norm(b.stream, layer.input_norm, b.normed, self.config.rms_norm_eps)
        _matmul(b.normed, layer.qkv, layer.qkv_bias, b.qkv)

    def _leave_layer(self, layer: LayerParameters, attended: Tensor, stream: Tensor, b: StepBuffers) -> None:
        """What a layer does after its attention: `stream` goes on to the next one."""
        _add_matmul(attended, layer.o, layer.o_bias, stream)
        rms_norm(stream, layer.post_attention_norm, b.normed, self.config.rms_norm_eps)
        _matmul(b.normed, layer.gate_up, layer.gate_up_bias, b.gate_up)
        silu_mul(b.gate_up, b.activated)
        _add_matmul(b.activated, layer.down, layer.down_bias, stream)

    def _between_attentions(self, layer: LayerParameters, next_layer: LayerParameters, b: StepBuffers) -> None:
        self._leave_layer(layer, b.attended, b.stream, b)
        self._enter_layer(next_layer, b)

    def _leave(self, layer: LayerParameters, inputs: StepInputs, b: StepBuffers) -> None:
        """From the last attention to the logits, for all tokens."""
        parameters = self._parameters
        self._leave_layer(layer, b.attended, b.stream, b)
        rms_norm(b.stream, parameters.final_norm, b.normed, self.config.rms_norm_eps)
        hidden = b.normed
        if inputs.is_mixed:
            hidden = torch.index_select(b.normed, 0, inputs.sample_index, out=b.sampled)
        _matmul(hidden, parameters.lm_head, None, b.logits)

    def _leave_sampled(self, layer: LayerParameters, inputs: StepInputs, b: StepBuffers, sampled: StepBuffers) -> None:
        """The same for the tokens that are sampled behind, in buffers of that many tokens."""
        parameters = self._parameters
        attended = torch.index_select(b.attended, 0, inputs.sample_index, out=sampled.sampled_attended)
        stream = torch.index_select(b.stream, 0, inputs.sample_index, out=sampled.sampled)
        self._leave_layer(layer, attended, stream, sampled)
        rms_norm(stream, parameters.final_norm, sampled.normed, self.config.rms_norm_eps)
        _matmul(sampled.normed, parameters.lm_head, None, sampled.logits)

    def _attend(
        self,
        layer: LayerParameters,
        layer_kv: LayerKV,
        inputs: StepInputs,
        block_table: Tensor,
        b: StepBuffers,
        lets_next_begin: bool = False,
    ) -> None:
        config = self.config
        if layer.qk_norm is not None:
            norm_heads(b.qkv, layer.qk_norm, config.rms_norm_eps)
        key, value = layer_kv.key, layer_kv.value
        batch = (block_table, inputs.idx_mapping, inputs.query_start, inputs.query_len, inputs.seq_lens, b.attended)
        if inputs.is_mixed:
            # All KV first: a request may share blocks that another one fills in this very step. Then two kernels, each
            # of which passes over the other's entries.
            write_kv(b.qkv, inputs.positions, inputs.slot_mapping, self._cos_sin, key, value, config.num_heads)
            prefill_attention(b.qkv, self._cos_sin, key, value, *batch, config.num_heads, inputs.width)
        verify_attention(
            b.qkv,
            self._cos_sin,
            key,
            value,
            *batch,
            config.num_heads,
            inputs.width,
            b.workspace,
            writes_kv=not inputs.is_mixed,
            lets_next_begin=lets_next_begin,
        )

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Logits of hidden states, [n, hidden] -> [n, vocab_size] float32: for log probabilities of a prompt."""
        return torch.mm(hidden, self._parameters.lm_head.t()).float()


def _matmul(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    if bias is None:
        torch.mm(x, weight.t(), out=out)
    else:
        torch.addmm(bias, x, weight.t(), out=out)


def _add_matmul(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor) -> None:
    """residual += x @ weight.T + bias. The product's own epilogue adds: the norm after it reads one tensor less."""
    torch.addmm(residual, x, weight.t(), out=residual)
    if bias is not None:
        residual.add_(bias)
