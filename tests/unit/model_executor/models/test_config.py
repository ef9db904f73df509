"""Reading config.json: what is understood, and a clear error for everything else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from common.errors import ModelLoadError
from model_executor.models.config import RopeConfig, load_model_config
from model_executor.models.rotary import inverse_frequencies
from tests.tiny_models import LLAMA3_ROPE, make_config


def write_config(directory: Path, architecture: str = "LlamaForCausalLM", **changes: Any) -> Path:
    """A config.json as transformers writes it, then changed by hand; a value of `...` takes the key out."""
    make_config(architecture).save_pretrained(directory)
    path = directory / "config.json"
    values = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in values.items() if value is not ...}))
    return directory


def test_values_of_a_llama(tmp_path: Path) -> None:
    config = load_model_config(write_config(tmp_path, dtype="bfloat16"))
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (2, 4, 2, 16)
    assert (config.vocab_size, config.hidden_size, config.intermediate_size) == (320, 64, 160)
    assert config.rope == RopeConfig(theta=10000.0)
    assert config.max_position_embeddings == 512
    assert (config.eos_token_ids, config.bos_token_id) == ((256,), 257)
    assert config.dtype == torch.bfloat16
    assert (config.attention_bias, config.o_bias, config.mlp_bias, config.qk_norm) == (False, False, False, False)


def test_what_differs_by_architecture(tmp_path: Path) -> None:
    qwen2 = load_model_config(write_config(tmp_path, "Qwen2ForCausalLM"))
    assert (qwen2.attention_bias, qwen2.o_bias, qwen2.qk_norm) == (True, False, False)
    qwen3 = load_model_config(write_config(tmp_path, "Qwen3ForCausalLM"))
    assert (qwen3.attention_bias, qwen3.o_bias, qwen3.qk_norm, qwen3.head_dim) == (False, False, True, 32)
    mistral = load_model_config(write_config(tmp_path, "MistralForCausalLM"))
    assert (mistral.attention_bias, mistral.qk_norm) == (False, False)


def test_end_tokens_of_both_files_are_joined(tmp_path: Path) -> None:
    write_config(tmp_path, eos_token_id=[7, 8])
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [9, 7]}')
    assert load_model_config(tmp_path).eos_token_ids == (9, 7, 8)


def test_no_end_token_is_fine(tmp_path: Path) -> None:
    assert load_model_config(write_config(tmp_path, eos_token_id=None)).eos_token_ids == ()


def test_old_and_new_spelling_of_rope(tmp_path: Path) -> None:
    new = load_model_config(write_config(tmp_path, rope_parameters=LLAMA3_ROPE))
    scaling = {key: value for key, value in LLAMA3_ROPE.items() if key != "rope_theta"}
    old = load_model_config(write_config(tmp_path, rope_parameters=..., rope_theta=10000.0, rope_scaling=scaling))
    assert new.rope == old.rope
    assert (new.rope.type, new.rope.factor, new.rope.original_max_position_embeddings) == ("llama3", 4.0, 128)
    plain = load_model_config(write_config(tmp_path, rope_parameters=..., rope_theta=5e5, rope_scaling=None))
    assert plain.rope == RopeConfig(theta=5e5)


def test_llama3_frequencies_are_those_of_transformers() -> None:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    expected, _ = ROPE_INIT_FUNCTIONS["llama3"](make_config(rope_parameters=LLAMA3_ROPE, head_dim=64), "cpu")
    values = {key: value for key, value in LLAMA3_ROPE.items() if key not in ("rope_type", "rope_theta")}
    rope = RopeConfig(theta=LLAMA3_ROPE["rope_theta"], type="llama3", **values)
    torch.testing.assert_close(inverse_frequencies(rope, 64), expected, rtol=1e-6, atol=0)


def test_missing_head_dim_and_kv_heads_follow_from_the_others(tmp_path: Path) -> None:
    config = load_model_config(write_config(tmp_path, head_dim=..., num_key_value_heads=...))
    assert (config.head_dim, config.num_kv_heads) == (16, 4)


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "architecture": ("LlamaForCausalLM", {"architectures": ["GPT2LMHeadModel"]}, "'GPT2LMHeadModel' is not supported"),
    "no architectures": ("LlamaForCausalLM", {"architectures": ...}, "architectures = None"),
    "two architectures": ("LlamaForCausalLM", {"architectures": ["A", "B"]}, r"architectures = \['A', 'B'\]"),
    "model type": ("LlamaForCausalLM", {"model_type": "gpt2"}, "model_type = 'gpt2': expected 'llama'"),
    "activation": ("LlamaForCausalLM", {"hidden_act": "gelu"}, "hidden_act = 'gelu' is not supported: expected 'silu'"),
    "quantised": (
        "LlamaForCausalLM",
        {"quantization_config": {"quant_method": "awq"}},
        "quant_method = 'awq': quantised checkpoints are not supported",
    ),
    "mistral window": ("MistralForCausalLM", {"sliding_window": 4096}, "sliding_window = 4096.*expected null"),
    "qwen2 window": (
        "Qwen2ForCausalLM",
        {"use_sliding_window": True, "sliding_window": 128},
        "use_sliding_window = true.*expected false",
    ),
    "layer types": (
        "Qwen3ForCausalLM",
        {"layer_types": ["full_attention", "sliding_attention"]},
        r"layer_types\[1\] = 'sliding_attention'",
    ),
    "partial rotary": (
        "LlamaForCausalLM",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
        "partial_rotary_factor = 0.5",
    ),
    "heads": ("LlamaForCausalLM", {"num_key_value_heads": 3}, "num_key_value_heads = 3"),
    "odd head_dim": ("LlamaForCausalLM", {"head_dim": 15}, "head_dim.*15"),
    "zero layers": ("LlamaForCausalLM", {"num_hidden_layers": 0}, "num_hidden_layers = 0: expected a whole number"),
    "text for a number": ("LlamaForCausalLM", {"vocab_size": "many"}, "vocab_size"),
    "negative eps": ("LlamaForCausalLM", {"rms_norm_eps": -1e-6}, "rms_norm_eps = -1e-06: expected a positive number"),
    "end token": ("LlamaForCausalLM", {"eos_token_id": [-5]}, r"eos_token_id = \[-5\]"),
} | {
    f"rope {rope_type}": (
        "LlamaForCausalLM",
        {"rope_parameters": {"rope_type": rope_type, "rope_theta": 1e4, "factor": 2.0}},
        f"rope_type = '{rope_type}' is not supported: expected 'default' or 'llama3'",
    )
    for rope_type in ("linear", "dynamic", "yarn", "longrope", "unheard-of")
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_supported_is_refused_by_name(tmp_path: Path, case: str) -> None:
    architecture, changes, message = REFUSED[case]
    write_config(tmp_path, architecture, **changes)
    with pytest.raises(ModelLoadError, match=message) as caught:
        load_model_config(tmp_path)
    assert str(tmp_path) in str(caught.value)


def test_another_architecture_lists_the_supported_ones(tmp_path: Path) -> None:
    write_config(tmp_path, architectures=["MixtralForCausalLM"], model_type="mixtral")
    with pytest.raises(ModelLoadError) as caught:
        load_model_config(tmp_path)
    for name in (
        "MixtralForCausalLM",
        "LlamaForCausalLM",
        "MistralForCausalLM",
        "Qwen2ForCausalLM",
        "Qwen3ForCausalLM",
    ):
        assert name in str(caught.value)


def test_unused_window_of_qwen_is_fine(tmp_path: Path) -> None:
    write_config(tmp_path, "Qwen2ForCausalLM", use_sliding_window=False, sliding_window=4096)
    assert load_model_config(tmp_path).num_layers == 2


def test_directory_that_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="nowhere does not exist: expected a Hugging Face model directory"):
        load_model_config(tmp_path / "nowhere")


def test_file_instead_of_a_directory(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ModelLoadError, match="file is not a directory"):
        load_model_config(tmp_path / "file")


def test_empty_directory(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"holds no config\.json.*found nothing"):
        load_model_config(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [(b'{"a": ', "cannot be read as JSON"), (b"[1]", "JSON list: expected an object"), (b"\xff\xfe", "cannot be read")],
)
def test_broken_config(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ModelLoadError, match=message):
        load_model_config(tmp_path)


def test_broken_generation_config(tmp_path: Path) -> None:
    write_config(tmp_path)
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(ModelLoadError, match=r"generation_config\.json cannot be read as JSON"):
        load_model_config(tmp_path)
