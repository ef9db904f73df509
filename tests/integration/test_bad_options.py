"""Options and model directories that cannot be served: an error that names what is wrong, before anything runs."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from common.errors import InvalidArgumentError, ModelLoadError, OutriderError, UnknownOptionError
from outrider import LLM, SamplingParams
from tests.tiny_models import make_model

MAX_MODEL_LEN = 64


def load(directory: Path, **options: Any) -> LLM:
    small: dict[str, Any] = {"max_model_len": MAX_MODEL_LEN, "kv_cache_memory": "1M", "max_num_seqs": 4}
    return LLM(str(directory), **(small | options))


OPTIONS: list[tuple[dict[str, Any], str, str]] = [
    ({"drafter": "eagle"}, "drafter = 'eagle'", "ngram"),
    ({"num_speculative_tokens": 17}, "num_speculative_tokens = 17", "16"),
    ({"prompt_lookup_min": 6}, "prompt_lookup_min = 6", "prompt_lookup_max = 5"),
    ({"dtype": "int8"}, "dtype = 'int8'", "float32"),
    ({"max_model_len": 513}, "max_model_len = 513", "2 to 512"),
    ({"max_model_len": 1}, "max_model_len = 1", "2"),
    ({"max_num_seqs": 0}, "max_num_seqs = 0", "1"),
    ({"max_num_seqs": 32, "max_num_batched_tokens": 31}, "max_num_batched_tokens = 31", "max_num_seqs = 32"),
    ({"max_num_batched_tokens": 8}, "max_num_batched_tokens = 8", "16"),
    ({"kv_cache_memory": "32K"}, "kv_cache_memory = 32768", "40960 bytes"),
    ({"kv_cache_memory": "much"}, "kv_cache_memory = 'much'", "4G"),
    ({"num_threads": 0}, "num_threads = 0", "1"),
]


@pytest.mark.parametrize(("options", "named", "limit"), OPTIONS, ids=[named for _, named, _ in OPTIONS])
def test_options(tiny_llama: Path, options: dict[str, Any], named: str, limit: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        load(tiny_llama, **options)
    assert str(caught.value).startswith(f"{named}: expected ")
    assert limit in caught.value.expected


def test_just_enough_kv_cache(tiny_llama: Path) -> None:
    with load(tiny_llama, kv_cache_memory=40960) as llm:
        assert len(llm.generate([7], SamplingParams(max_tokens=None, ignore_eos=True))[0].outputs[0].token_ids) == 63


def test_an_unknown_option(tiny_llama: Path) -> None:
    with pytest.raises(UnknownOptionError, match="'num_spec_tokens'; did you mean 'num_speculative_tokens'"):
        load(tiny_llama, num_spec_tokens=3)


def break_model(directory: Path, how: str) -> None:
    config = directory / "config.json"
    if how == "no config":
        config.unlink()
    elif how == "broken config":
        config.write_text("{")
    elif how == "config of wrong types":
        config.write_text(json.dumps(json.loads(config.read_text()) | {"vocab_size": "320"}))
    elif how == "architecture":
        config.write_text(json.dumps(json.loads(config.read_text()) | {"architectures": ["GPT2LMHeadModel"]}))
    elif how == "no weights":
        (directory / "model.safetensors").unlink()
    elif how == "broken weights":
        (directory / "model.safetensors").write_bytes(b"\x00" * 100)
    elif how == "no tokenizer":
        (directory / "tokenizer.json").unlink()
        (directory / "tokenizer_config.json").unlink()
    elif how == "broken tokenizer":
        (directory / "tokenizer.json").write_text("{}")


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("no config", "holds no config.json: expected a Hugging Face model directory"),
        ("broken config", "config.json cannot be read as JSON"),
        ("config of wrong types", "config.json: transformers cannot read it: "),
        ("architecture", "'GPT2LMHeadModel' is not supported: expected one of LlamaForCausalLM"),
        ("no weights", "expected model.safetensors"),
        ("broken weights", "model.safetensors is not a readable safetensors file"),
        ("no tokenizer", "no tokenizer that can be read"),
        ("broken tokenizer", "no tokenizer that can be read"),
    ],
)
def test_a_broken_model_directory(tiny_llama: Path, tmp_path: Path, how: str, message: str) -> None:
    directory = tmp_path / "model"
    shutil.copytree(tiny_llama, directory)
    break_model(directory, how)
    with pytest.raises(ModelLoadError) as caught:
        load(directory)
    assert message in str(caught.value)
    assert str(directory) in str(caught.value)


def test_limits_are_checked_before_anything_is_loaded(tiny_llama: Path, tmp_path: Path) -> None:
    """A context of which not one row of positions would fit in memory, too."""
    values = json.loads((tiny_llama / "config.json").read_text()) | {"max_position_embeddings": 10**9}
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(InvalidArgumentError, match=r"kv_cache_memory = .*max_model_len = 1000000000"):
        load(tmp_path, max_model_len=None)
    with pytest.raises(InvalidArgumentError, match=r"max_model_len = 2000000000: expected 2 to 1000000000"):
        load(tmp_path, max_model_len=2 * 10**9)


def test_a_missing_shard(tmp_path: Path) -> None:
    make_model(tmp_path, max_shard_size="100KB")
    shards = sorted(tmp_path.glob("*.safetensors"))
    assert len(shards) > 2
    shards[1].unlink()
    with pytest.raises(ModelLoadError, match=shards[1].name):
        load(tmp_path, skip_tokenizer_init=True)


@pytest.mark.parametrize("skip_tokenizer_init", [True, False])
def test_no_such_directory(tmp_path: Path, skip_tokenizer_init: bool) -> None:
    with pytest.raises(ModelLoadError, match="nowhere does not exist"):
        load(tmp_path / "nowhere", skip_tokenizer_init=skip_tokenizer_init)


def test_one_base_class_catches_all(tiny_llama: Path) -> None:
    for directory, options in ((tiny_llama, {"drafter": "x"}), (tiny_llama, {"unknown": 1}), (tiny_llama / "no", {})):
        with pytest.raises(OutriderError):
            load(directory, **options)
