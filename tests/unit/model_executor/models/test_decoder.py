"""The decoder against transformers, in float32, over paged KV in shuffled blocks."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from common.errors import InvalidArgumentError
from model_executor.models import layers
from model_executor.models.registry import load_model
from tests.paged_requests import PagedHarness, PagedRequest
from tests.tiny_models import LLAMA3_ROPE
from tests.unit.model_executor.conftest import ModelMaker

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", {}),
    "llama-tied": ("LlamaForCausalLM", {"tie_word_embeddings": True}),
    "llama-head-dim": ("LlamaForCausalLM", {"head_dim": 24, "num_key_value_heads": 1}),
    "llama-mha": ("LlamaForCausalLM", {"num_key_value_heads": 4}),
    "llama-llama3-rope": ("LlamaForCausalLM", {"rope_parameters": LLAMA3_ROPE}),
    "llama-biases": ("LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True}),
    "llama-eps": ("LlamaForCausalLM", {"rms_norm_eps": 0.1}),
    "mistral": ("MistralForCausalLM", {}),
    "mistral-head-dim": ("MistralForCausalLM", {"head_dim": 32, "tie_word_embeddings": True}),
    "qwen2": ("Qwen2ForCausalLM", {}),
    "qwen2-tied-llama3-rope": ("Qwen2ForCausalLM", {"tie_word_embeddings": True, "rope_parameters": LLAMA3_ROPE}),
    "qwen3": ("Qwen3ForCausalLM", {}),
    "qwen3-tied-bias": ("Qwen3ForCausalLM", {"tie_word_embeddings": True, "attention_bias": True}),
}


def random_tokens(count: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(320), k=count)


def reference_logits(directory: Path, tokens: list[int]) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    with torch.inference_mode():
        return model(torch.tensor([tokens])).logits[0]


def reference_generate(directory: Path, prompt: list[int], num_tokens: int) -> list[int]:
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    # No end token: the model must go on, as the harness does.
    model.generation_config.eos_token_id = None
    ids = torch.tensor([prompt])
    output = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_tokens, do_sample=False)
    return output[0, len(prompt) :].tolist()


@pytest.mark.parametrize("variant", VARIANTS)
def test_greedy_output_is_that_of_transformers(tiny_model: ModelMaker, variant: str) -> None:
    architecture, overrides = VARIANTS[variant]
    directory = tiny_model(architecture, **overrides)
    decoder = load_model(directory, progress=False)
    prompt = random_tokens(45)

    logits = PagedHarness(decoder).step([(PagedRequest(prompt), len(prompt))])[0]
    torch.testing.assert_close(logits, reference_logits(directory, prompt), atol=1e-4, rtol=0)

    output = PagedHarness(decoder, seed=1).generate(prompt, 40)
    assert output == reference_generate(directory, prompt, 40)
    assert len(set(output)) > 5, "a model that repeats itself proves little"


def test_long_positions_follow_llama3_rope(tiny_model: ModelMaker) -> None:
    """Beyond original_max_position_embeddings (128), where the three bands of frequencies differ."""
    directory = tiny_model("LlamaForCausalLM", rope_parameters=LLAMA3_ROPE)
    tokens = random_tokens(400)
    logits = PagedHarness(load_model(directory, progress=False)).step([(PagedRequest(tokens), 400)])[0]
    torch.testing.assert_close(logits, reference_logits(directory, tokens), atol=2e-4, rtol=0)


@pytest.mark.parametrize("rope_type_key", ["rope_type", "type"])
def test_old_spelling_of_rope_gives_the_same_logits(tiny_model: ModelMaker, tmp_path: Path, rope_type_key: str) -> None:
    directory = tiny_model("LlamaForCausalLM", rope_parameters=LLAMA3_ROPE)
    config = json.loads((directory / "config.json").read_text())
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    config["rope_scaling"] = {rope_type_key: rope.pop("rope_type"), **rope}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").symlink_to(directory / "model.safetensors")
    tokens = random_tokens(200)
    new, old = (
        PagedHarness(load_model(path, progress=False)).step([(PagedRequest(tokens), 200)])[0]
        for path in (directory, tmp_path)
    )
    assert torch.equal(new, old)


@pytest.mark.parametrize("chunks", [[16] * 6 + [4], [1, 2, 33, 40, 17, 7], [64, 36]])
def test_chunked_prefill_equals_whole_prefill(tiny_model: ModelMaker, chunks: list[int]) -> None:
    decoder = load_model(tiny_model("Qwen3ForCausalLM"), progress=False)
    tokens = random_tokens(100)
    whole = PagedHarness(decoder).step([(PagedRequest(tokens), 100)])[0]
    harness, request = PagedHarness(decoder, seed=3), PagedRequest(tokens)
    parts = [harness.step([(request, length)])[0] for length in chunks]
    torch.testing.assert_close(torch.cat(parts), whole, atol=1e-4, rtol=0)


def test_ragged_batches_equal_single_requests(tiny_model: ModelMaker) -> None:
    """Prefill, chunks, decode and verify rows of 1 to 17 tokens in one step, for several steps."""
    decoder = load_model(tiny_model("LlamaForCausalLM"), progress=False)
    rng = random.Random(5)
    prompts = [random_tokens(rng.randint(60, 260), seed) for seed in range(9)]
    alone = [PagedHarness(decoder).step([(PagedRequest(prompt), len(prompt))])[0] for prompt in prompts]
    harness = PagedHarness(decoder, num_blocks=256, seed=4)
    requests = [PagedRequest(prompt) for prompt in prompts]
    together: list[list[torch.Tensor]] = [[] for _ in prompts]
    while any(request.num_computed_tokens < len(request.tokens) for request in requests):
        work: list[tuple[PagedRequest, int]] = []
        for request in requests:
            left = len(request.tokens) - request.num_computed_tokens
            if left > 0:
                work.append((request, min(left, rng.choice([1, 1, 1, 4, 4, 17, 30, 48, 100]))))
        rng.shuffle(work)
        for (request, _), logits in zip(work, harness.step(work), strict=True):
            together[requests.index(request)].append(logits)
    for parts, whole in zip(together, alone, strict=True):
        torch.testing.assert_close(torch.cat(parts), whole, atol=1e-4, rtol=0)


def test_prefix_written_in_the_same_step_is_seen(tiny_model: ModelMaker) -> None:
    """A request may point at blocks of another one that fills them in this very step."""
    decoder = load_model(tiny_model("LlamaForCausalLM"), progress=False)
    tokens = random_tokens(70)
    whole = PagedHarness(decoder).step([(PagedRequest(tokens), 70)])[0]
    harness = PagedHarness(decoder)
    writer = PagedRequest(tokens[:48])
    harness.build_batch([(writer, 48)])  # gives the writer its blocks
    reader = PagedRequest(tokens, num_computed_tokens=48, blocks=list(writer.blocks))
    logits = harness.step([(reader, 22), (writer, 48)])[0]
    torch.testing.assert_close(logits, whole[48:], atol=1e-4, rtol=0)


def test_bfloat16_is_close_to_transformers(tiny_model: ModelMaker) -> None:
    from transformers import AutoModelForCausalLM

    # Weights as real models have them: with wide random ones every rounding grows from layer to layer.
    directory = tiny_model("Qwen3ForCausalLM", initializer_range=0.05, dtype=torch.bfloat16)
    decoder = load_model(directory, dtype="bfloat16", progress=False)
    assert decoder.dtype == torch.bfloat16
    tokens = random_tokens(60)
    logits = PagedHarness(decoder).step([(PagedRequest(tokens), 60)])[0]
    assert logits.dtype == torch.float32
    exact = reference_logits(directory, tokens)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16)
    with torch.inference_mode():
        rounded = model(torch.tensor([tokens])).logits[0].float()
    # Relative to the reference's own error: bfloat16 of transformers against float32 of transformers.
    assert (logits - exact).abs().mean() < 2 * (rounded - exact).abs().mean()


def test_auto_dtype_on_a_cpu_is_float32(tiny_model: ModelMaker) -> None:
    directory = tiny_model("LlamaForCausalLM", dtype=torch.bfloat16)
    assert load_model(directory, progress=False).dtype == torch.float32


def test_plain_and_packed_layers_agree(tiny_model: ModelMaker, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = tiny_model("LlamaForCausalLM", attention_bias=True, mlp_bias=True)
    tokens = random_tokens(50)
    packed = PagedHarness(load_model(directory, progress=False)).step([(PagedRequest(tokens), 50)])[0]
    monkeypatch.setattr(layers, "_can_pack", lambda weight: False)
    plain = PagedHarness(load_model(directory, progress=False)).step([(PagedRequest(tokens), 50)])[0]
    torch.testing.assert_close(packed, plain, atol=1e-4, rtol=0)


def test_no_rows_give_no_logits(tiny_model: ModelMaker) -> None:
    decoder = load_model(tiny_model("LlamaForCausalLM"), progress=False)
    assert decoder.compute_logits(torch.zeros(0, 64)).shape == (0, 320)


def test_max_model_len_defaults_to_what_the_model_allows(tiny_model: ModelMaker) -> None:
    directory = tiny_model("LlamaForCausalLM")
    assert load_model(directory, progress=False).max_model_len == 512
    assert load_model(directory, max_model_len=100, progress=False).max_model_len == 100


@pytest.mark.parametrize("max_model_len", [0, 1, 513])
def test_max_model_len_out_of_range_is_refused(tiny_model: ModelMaker, max_model_len: int) -> None:
    with pytest.raises(InvalidArgumentError, match=rf"max_model_len = {max_model_len}: expected 2 to 512"):
        load_model(tiny_model("LlamaForCausalLM"), max_model_len=max_model_len, progress=False)


def test_unknown_dtype_is_refused(tiny_model: ModelMaker) -> None:
    with pytest.raises(InvalidArgumentError, match="dtype = 'int8'"):
        load_model(tiny_model("LlamaForCausalLM"), dtype="int8", progress=False)  # pyright: ignore[reportArgumentType]
