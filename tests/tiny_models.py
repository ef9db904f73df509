"""Tiny random models in Hugging Face directories, for tests: made by transformers, which is also the oracle."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

EOS_TOKEN_ID = 256
BOS_TOKEN_ID = 257
PAD_TOKEN_ID = 258
NUM_SPECIAL_TOKENS = 3

_BASE: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "eos_token_id": EOS_TOKEN_ID,
    "bos_token_id": BOS_TOKEN_ID,
    "pad_token_id": PAD_TOKEN_ID,
    "tie_word_embeddings": False,
    # Wide weights: greedy outputs vary, and the gap between the two best logits is seldom tiny.
    "initializer_range": 0.3,
}

_BY_ARCHITECTURE: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {},
    "MistralForCausalLM": {"sliding_window": None},
    "Qwen2ForCausalLM": {},
    "Qwen3ForCausalLM": {"head_dim": 32},
}

ARCHITECTURES = tuple(_BY_ARCHITECTURE)

LLAMA3_ROPE: dict[str, Any] = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}


def make_config(architecture: str = "LlamaForCausalLM", **overrides: Any) -> Any:
    """transformers' config of a tiny model: 2 layers, hidden size 64, 4 heads, 2 KV heads, 320 tokens."""
    import transformers

    values = _BASE | _BY_ARCHITECTURE[architecture] | overrides
    config_class = getattr(transformers, architecture.removesuffix("ForCausalLM") + "Config")
    return config_class(architectures=[architecture], **values)


def make_model(
    directory: str | Path,
    architecture: str = "LlamaForCausalLM",
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    max_shard_size: str = "1GB",
    **overrides: Any,
) -> Path:
    """Write a random model to `directory` and return it.

    Args:
        directory: made if it does not exist.
        architecture: one of `ARCHITECTURES`.
        seed: of the weights; the same seed gives the same model.
        dtype: of the weights on disk.
        max_shard_size: such as '100KB', for several safetensors shards and an index.
        overrides: values of config.json, such as num_key_value_heads=1 or rope_parameters=LLAMA3_ROPE.
    """
    import transformers

    directory = Path(directory)
    config = make_config(architecture, **overrides)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = getattr(transformers, architecture)(config)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                # Fresh norm weights are all 1 and biases all 0: a decoder that forgot them would pass.
                if "norm" in name:
                    parameter.uniform_(0.5, 1.5)
                elif name.endswith("bias"):
                    parameter.normal_(std=0.5)
        model = model.to(dtype)
        model.save_pretrained(directory, max_shard_size=max_shard_size)
    return directory


def make_tokenizer(directory: str | Path, vocab_size: int = 320) -> Path:
    """Write a byte-level tokenizer to `directory`: token id = byte value; 256 eos, 257 bos, 258 pad, the rest spare."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocab = {character: byte for byte, character in enumerate(_byte_characters())}
    vocab |= {"<|eos|>": EOS_TOKEN_ID, "<|bos|>": BOS_TOKEN_ID, "<|pad|>": PAD_TOKEN_ID}
    spare = range(256 + NUM_SPECIAL_TOKENS, vocab_size)
    vocab |= {f"<|{token_id}|>": token_id for token_id in spare}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|eos|>", bos_token="<|bos|>", pad_token="<|pad|>"
    )
    wrapped.save_pretrained(directory)
    return Path(directory)


def _byte_characters() -> list[str]:
    """The printable character that byte-level BPE writes for each byte (Radford et al. 2019, GPT-2)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    characters = [""] * 256
    for byte in printable:
        characters[byte] = chr(byte)
    others = [byte for byte in range(256) if not characters[byte]]
    for index, byte in enumerate(others):
        characters[byte] = chr(256 + index)
    return characters
