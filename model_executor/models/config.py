"""What a decoder needs to know about a Hugging Face model directory, read once and checked."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from common.errors import ModelLoadError

SUPPORTED_ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding (Su et al. 2021, arXiv 2104.09864); `llama3` rescales low frequencies (Llama 3.1)."""

    theta: float
    type: Literal["default", "llama3"] = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 0


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Shape of a decoder-only transformer: RMS norm, rotary positions, grouped-query attention, SwiGLU."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    max_position_embeddings: int
    tie_word_embeddings: bool
    attention_bias: bool
    """Bias of the q, k and v projections."""
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    """RMS norm of every query and key head before the rotation."""
    eos_token_ids: tuple[int, ...]
    """End tokens: those of generation_config.json, then those that only config.json names."""
    bos_token_id: int | None
    dtype: torch.dtype
    """Of the checkpoint, as config.json says; float32 where it does not say."""


def load_model_config(directory: str | Path) -> ModelConfig:
    """Read config.json and generation_config.json of a Hugging Face model directory. Local files only.

    Raises:
        ModelLoadError: no directory, no config.json, a file that is broken, or a model that is not supported; names the
            path, what was expected and what was found.
    """
    directory = Path(directory)
    raw = _read_config_json(directory)
    architecture = _check_supported(raw, directory)
    config = _read_through_transformers(directory)
    _check_features(config, raw, architecture, directory)
    num_heads = _positive(config, "num_attention_heads", directory)
    num_kv_heads = _positive(config, "num_key_value_heads", directory, default=num_heads)
    hidden_size = _positive(config, "hidden_size", directory)
    head_dim = _positive(config, "head_dim", directory, default=hidden_size // num_heads)
    if num_heads % num_kv_heads:
        found = f"num_attention_heads = {num_heads}, num_key_value_heads = {num_kv_heads}"
        raise _broken(directory, f"{found}: expected a number of heads that the number of KV heads divides")
    if head_dim % 2:
        raise _broken(directory, f"head_dim = {head_dim}: expected an even number, for rotary positions")
    bias = bool(getattr(config, "attention_bias", False))
    max_position_embeddings = _positive(config, "max_position_embeddings", directory)
    return ModelConfig(
        architecture=architecture,
        vocab_size=_positive(config, "vocab_size", directory),
        hidden_size=hidden_size,
        intermediate_size=_positive(config, "intermediate_size", directory),
        num_layers=_positive(config, "num_hidden_layers", directory),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=_positive_float(config.rms_norm_eps, "rms_norm_eps", directory),
        rope=_read_rope(config, directory),
        max_position_embeddings=max_position_embeddings,
        tie_word_embeddings=bool(config.tie_word_embeddings),
        # Qwen2 has biases on q, k and v by architecture, and no setting for them.
        attention_bias=True if architecture == "Qwen2ForCausalLM" else bias,
        o_bias=False if architecture == "Qwen2ForCausalLM" else bias,
        mlp_bias=bool(getattr(config, "mlp_bias", False)),
        qk_norm=architecture == "Qwen3ForCausalLM",
        eos_token_ids=_read_eos_token_ids(config, directory),
        bos_token_id=_token_id(config.bos_token_id, "bos_token_id", directory / "config.json"),
        dtype=_read_dtype(config),
    )


def _read_config_json(directory: Path) -> dict[str, Any]:
    if not directory.exists():
        raise ModelLoadError(f"model directory {directory} does not exist: expected a Hugging Face model directory")
    if not directory.is_dir():
        raise ModelLoadError(f"{directory} is not a directory: expected a Hugging Face model directory")
    if not (directory / "config.json").is_file():
        found = ", ".join(sorted(entry.name for entry in directory.iterdir())[:10]) or "nothing"
        raise ModelLoadError(
            f"{directory} holds no config.json: expected a Hugging Face model directory, found {found}"
        )
    return read_json_object(directory / "config.json")


def read_json_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file of a model directory; ModelLoadError where it is something else."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelLoadError(f"{path} holds a JSON {type(value).__name__}: expected an object")
    return value


def _check_supported(raw: dict[str, Any], directory: Path) -> str:
    """Name of the architecture; checked before transformers sees the file, which knows many more."""
    supported = ", ".join(SUPPORTED_ARCHITECTURES)
    architectures = raw.get("architectures")
    if not isinstance(architectures, list) or len(architectures) != 1:
        raise _broken(directory, f"architectures = {architectures!r}: expected a list with one of {supported}")
    architecture = architectures[0]
    if architecture not in SUPPORTED_ARCHITECTURES:
        raise _broken(directory, f"architecture {architecture!r} is not supported: expected one of {supported}")
    model_type = architecture.removesuffix("ForCausalLM").lower()
    if raw.get("model_type") != model_type:
        raise _broken(directory, f"model_type = {raw.get('model_type')!r}: expected {model_type!r} for {architecture}")
    for key in ("rope_parameters", "rope_scaling"):
        if isinstance(raw.get(key), dict):
            _check_rope_type(raw[key], directory)
    if raw.get("quantization_config") is not None:
        quantization = raw["quantization_config"]
        method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
        text = f"quantization_config with quant_method = {method!r}: quantised checkpoints are not supported"
        raise _broken(directory, f"{text}, expected float32, float16 or bfloat16 weights")
    return architecture


def _check_rope_type(rope: dict[str, Any], directory: Path) -> Literal["default", "llama3"]:
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    if rope_type not in ("default", "llama3"):
        raise _broken(directory, f"rope_type = {rope_type!r} is not supported: expected 'default' or 'llama3'")
    return rope_type


def _read_through_transformers(directory: Path) -> Any:
    # Imported late: it takes a second or more, and a directory with the wrong architecture needs none of it.
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers raises many kinds, and all of them mean a broken file here
        raise _broken(directory, f"transformers cannot read it: {error}") from error


def _check_features(config: Any, raw: dict[str, Any], architecture: str, directory: Path) -> None:
    if config.hidden_act != "silu":
        raise _broken(directory, f"hidden_act = {config.hidden_act!r} is not supported: expected 'silu'")
    if architecture == "MistralForCausalLM" and config.sliding_window is not None:
        text = f"sliding_window = {config.sliding_window!r}: sliding-window attention is not supported, expected null"
        raise _broken(directory, text)
    if raw.get("use_sliding_window"):
        text = "use_sliding_window = true: sliding-window attention is not supported, expected false"
        raise _broken(directory, text)
    for index, layer_type in enumerate(getattr(config, "layer_types", None) or ()):
        if layer_type != "full_attention":
            text = f"layer_types[{index}] = {layer_type!r} is not supported: expected 'full_attention'"
            raise _broken(directory, text)
    partial = getattr(config, "partial_rotary_factor", None) or 1.0
    if partial != 1.0:
        text = f"partial_rotary_factor = {partial}: partial rotary embedding is not supported, expected 1.0"
        raise _broken(directory, text)


def _read_rope(config: Any, directory: Path) -> RopeConfig:
    """transformers 5 brings rope_theta and rope_scaling of older files into rope_parameters."""
    rope = config.rope_parameters
    if not isinstance(rope, dict):
        raise _broken(directory, f"rope_parameters = {rope!r}: expected an object")
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        text = f"partial_rotary_factor = {rope['partial_rotary_factor']}: partial rotary embedding is not supported"
        raise _broken(directory, f"{text}, expected 1.0")
    theta = _positive_float(rope.get("rope_theta"), "rope_theta", directory)
    if _check_rope_type(rope, directory) == "default":
        return RopeConfig(theta=theta)
    values = {
        name: _positive_float(rope.get(name), f"rope_parameters.{name}", directory)
        for name in ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    }
    if values["high_freq_factor"] <= values["low_freq_factor"]:
        text = f"high_freq_factor = {values['high_freq_factor']}: expected more than low_freq_factor"
        raise _broken(directory, f"{text} = {values['low_freq_factor']}")
    original = int(values.pop("original_max_position_embeddings"))
    return RopeConfig(theta=theta, type="llama3", original_max_position_embeddings=original, **values)


def _read_eos_token_ids(config: Any, directory: Path) -> tuple[int, ...]:
    path = directory / "generation_config.json"
    found: list[int] = []
    if path.is_file():
        found += _token_ids(read_json_object(path).get("eos_token_id"), "eos_token_id", path)
    found += _token_ids(config.eos_token_id, "eos_token_id", directory / "config.json")
    return tuple(dict.fromkeys(found))


def _token_ids(value: Any, name: str, path: Path) -> list[int]:
    if value is None:
        return []
    values = value if isinstance(value, list) else [value]
    if not all(type(entry) is int and entry >= 0 for entry in values):
        raise ModelLoadError(f"{path}: {name} = {value!r}: expected a token id, a list of token ids or null")
    return values


def _token_id(value: object, name: str, path: Path) -> int | None:
    ids = _token_ids(value, name, path)
    return ids[0] if ids else None


def _read_dtype(config: Any) -> torch.dtype:
    dtype = getattr(config, "dtype", None)
    if isinstance(dtype, str):
        dtype = getattr(torch, dtype, None)
    return dtype if isinstance(dtype, torch.dtype) else torch.float32


def _positive(config: Any, name: str, directory: Path, default: int | None = None) -> int:
    value = getattr(config, name, None)
    value = default if value is None else value
    if type(value) is not int or value < 1:
        raise _broken(directory, f"{name} = {value!r}: expected a whole number of at least 1")
    return value


def _positive_float(value: object, name: str, directory: Path) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
        raise _broken(directory, f"{name} = {value!r}: expected a positive number")
    return float(value)


def _broken(directory: Path, text: str) -> ModelLoadError:
    return ModelLoadError(f"{directory / 'config.json'}: {text}")
