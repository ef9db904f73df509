"""The Llama decoder that the demo models are trained with, and its directory in the Hugging Face layout.

Module names equal those of transformers' LlamaForCausalLM, so a state dict is a checkpoint as it stands.
Training and evaluation share this file; the engine has a decoder of its own and reads only the directories.
"""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

# A shard must stay under 15 MB with its header.
MAX_SHARD_BYTES = 14_500_000
END_OF_TEXT_ID = 0


@dataclass(frozen=True, slots=True)
class LlamaShape:
    """Sizes of one model, under the names of config.json."""

    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    intermediate_size: int
    vocab_size: int = 6144
    max_position_embeddings: int = 2048
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-5

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads


class KvCache:
    """Keys and values of all layers for rows of equal length; the longest row is fixed at the start."""

    def __init__(self, shape: LlamaShape, num_rows: int, max_len: int, device: torch.device, dtype: torch.dtype):
        size = (shape.num_hidden_layers, num_rows, shape.num_key_value_heads, max_len, shape.head_dim)
        self.keys = torch.empty(size, device=device, dtype=dtype)  # [layers, rows, kv_heads, max_len, head_dim]
        self.values = torch.empty(size, device=device, dtype=dtype)
        self.length = 0


class RmsNorm(nn.Module):
    def __init__(self, hidden_size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * (wide * scale).to(x.dtype)


class Attention(nn.Module):
    def __init__(self, shape: LlamaShape):
        super().__init__()
        self.shape = shape
        kv_size = shape.num_key_value_heads * shape.head_dim
        self.q_proj = nn.Linear(shape.hidden_size, shape.hidden_size, bias=False)
        self.k_proj = nn.Linear(shape.hidden_size, kv_size, bias=False)
        self.v_proj = nn.Linear(shape.hidden_size, kv_size, bias=False)
        self.o_proj = nn.Linear(shape.hidden_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, cache: KvCache | None, layer: int) -> Tensor:
        rows, length, _ = x.shape
        heads, kv_heads, head_dim = (
            self.shape.num_attention_heads,
            self.shape.num_key_value_heads,
            self.shape.head_dim,
        )
        q = self.q_proj(x).view(rows, length, heads, head_dim).transpose(1, 2)  # [rows, heads, length, head_dim]
        k = self.k_proj(x).view(rows, length, kv_heads, head_dim).transpose(1, 2)
        v = self.v_proj(x).view(rows, length, kv_heads, head_dim).transpose(1, 2)
        q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
        if cache is not None:
            end = cache.length + length
            cache.keys[layer, :, :, cache.length : end] = k
            cache.values[layer, :, :, cache.length : end] = v
        group = heads // kv_heads
        if cache is not None and cache.length > 0:
            # One query token sees every key, so the heads that share keys can stand in the query dimension:
            # no mask and no copy of the cache per head.
            k, v = cache.keys[layer, :, :, : cache.length + 1], cache.values[layer, :, :, : cache.length + 1]
            out = F.scaled_dot_product_attention(q.reshape(rows, kv_heads, group, head_dim), k, v)
            out = out.reshape(rows, heads, 1, head_dim)
        else:
            k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(out.transpose(1, 2).reshape(rows, length, heads * head_dim))


class Mlp(nn.Module):
    def __init__(self, shape: LlamaShape):
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, shape: LlamaShape):
        super().__init__()
        self.self_attn = Attention(shape)
        self.mlp = Mlp(shape)
        self.input_layernorm = RmsNorm(shape.hidden_size, shape.rms_norm_eps)
        self.post_attention_layernorm = RmsNorm(shape.hidden_size, shape.rms_norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, cache: KvCache | None, layer: int) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, cache, layer)
        return x + self.mlp(self.post_attention_layernorm(x))


class Backbone(nn.Module):
    def __init__(self, shape: LlamaShape):
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.num_hidden_layers))
        self.norm = RmsNorm(shape.hidden_size, shape.rms_norm_eps)


class DemoModel(nn.Module):
    """Llama with tied embeddings and rotate-half rotary positions."""

    def __init__(self, shape: LlamaShape):
        super().__init__()
        self.shape = shape
        self.model = Backbone(shape)
        exponent = torch.arange(0, shape.head_dim, 2).float() / shape.head_dim
        angles = torch.outer(torch.arange(shape.max_position_embeddings).float(), shape.rope_theta**-exponent)
        angles = torch.cat((angles, angles), dim=-1)  # [max_position_embeddings, head_dim]
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                # The two projections that write to the residual stream start smaller, so that its variance
                # does not grow with depth (GPT-2's rule).
                writes_residual = name.endswith(("o_proj.weight", "down_proj.weight"))
                depth = 2 * shape.num_hidden_layers if writes_residual else 1
                nn.init.normal_(parameter, std=0.02 * depth**-0.5)

    @property
    def num_parameters(self) -> int:
        return sum(p.numel() for p in self.parameters())

    def forward(self, input_ids: Tensor, cache: KvCache | None = None) -> Tensor:
        """Logits [rows, length, vocab] of token ids [rows, length].

        With a cache, the tokens follow those already in it; after the first call only one token a row may follow.
        """
        start = 0 if cache is None else cache.length
        length = input_ids.shape[1]
        if start > 0 and length != 1:
            raise ValueError(f"length: {length} tokens after a cache of {start}; expected 1")
        x = self.model.embed_tokens(input_ids)  # [rows, length, hidden]
        cos = self.get_buffer("cos")[start : start + length]
        sin = self.get_buffer("sin")[start : start + length]
        for index, layer in enumerate(self.model.layers):
            x = layer(x, cos, sin, cache, index)
        if cache is not None:
            cache.length += length
        return F.linear(self.model.norm(x), self.model.embed_tokens.weight)


@torch.no_grad()
def continue_rows(
    model: DemoModel, prompts: Tensor, num_new_tokens: int, choose: Callable[[Tensor, int], Tensor], dtype: torch.dtype
) -> Tensor:
    """Continue prompts [rows, prompt_len] int64 by num_new_tokens each, and return both together.

    `choose(logits [rows, vocab] float32, position)` returns the token ids [rows] at that position.
    """
    rows, prompt_len = prompts.shape
    cache = KvCache(model.shape, rows, prompt_len + num_new_tokens, prompts.device, dtype)
    tokens = torch.empty(rows, prompt_len + num_new_tokens, dtype=torch.int64, device=prompts.device)
    tokens[:, :prompt_len] = prompts
    fresh = prompts
    # Not cuDNN: it would plan anew for every length of the cache.
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
        for position in range(prompt_len, prompt_len + num_new_tokens):
            tokens[:, position] = choose(model(fresh, cache)[:, -1].float(), position)
            fresh = tokens[:, position : position + 1]
    return tokens


def save_model(model: DemoModel, directory: Path) -> None:
    """Write config.json, generation_config.json and bf16 safetensors, sharded when they exceed MAX_SHARD_BYTES."""
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {k: v.detach().to("cpu", torch.bfloat16).contiguous() for k, v in model.state_dict().items()}
    shards: list[dict[str, Tensor]] = [{}]
    for name, tensor in tensors.items():
        if shards[-1] and sum(t.nbytes for t in shards[-1].values()) + tensor.nbytes > MAX_SHARD_BYTES:
            shards.append({})
        shards[-1][name] = tensor
    for old in directory.glob("model*.safetensors*"):
        old.unlink()
    if len(shards) == 1:
        save_file(shards[0], directory / "model.safetensors", metadata={"format": "pt"})
    else:
        names = [f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)]
        for name, shard in zip(names, shards, strict=True):
            save_file(shard, directory / name, metadata={"format": "pt"})
        weight_map = {key: name for name, shard in zip(names, shards, strict=True) for key in shard}
        total = sum(t.nbytes for t in tensors.values())
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        _write_json(directory / "model.safetensors.index.json", index)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **asdict(model.shape),
        "head_dim": model.shape.head_dim,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
        "initializer_range": 0.02,
        "rope_scaling": None,
        "tie_word_embeddings": True,
        "bos_token_id": END_OF_TEXT_ID,
        "eos_token_id": END_OF_TEXT_ID,
        "torch_dtype": "bfloat16",
        "use_cache": True,
    }
    _write_json(directory / "config.json", config)
    generation = {"bos_token_id": END_OF_TEXT_ID, "eos_token_id": END_OF_TEXT_ID, "pad_token_id": END_OF_TEXT_ID}
    _write_json(directory / "generation_config.json", generation)


def load_model(directory: Path, device: torch.device, dtype: torch.dtype) -> DemoModel:
    """Read a directory that save_model wrote; raises if a tensor is missing or of another shape."""
    config = json.loads((directory / "config.json").read_text())
    shape = LlamaShape(**{name: config[name] for name in LlamaShape.__dataclass_fields__})
    model = DemoModel(shape)
    tensors: dict[str, Tensor] = {}
    for path in sorted(directory.glob("model*.safetensors")):
        tensors.update(load_file(path))
    model.load_state_dict(tensors)
    # The rotary tables stay float32 whatever the weights are.
    model.to(device).eval()
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos.to(x.dtype) + torch.cat((-second, first), dim=-1) * sin.to(x.dtype)


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")
