from __future__ import annotations

import re

import pytest
import torch

from common.errors import InvalidArgumentError
from model_executor.kv_cache import DUMMY_BLOCK, PAD_SLOT_ID, KVCache, bytes_per_block, num_blocks_for
from model_executor.models.config import ModelConfig, load_model_config
from tests.unit.model_executor.conftest import ModelMaker


@pytest.fixture
def config(tiny_model: ModelMaker) -> ModelConfig:
    return load_model_config(tiny_model("LlamaForCausalLM"))  # 2 layers, 2 KV heads of 16


def test_blocks_and_slots_are_the_same_memory(config: ModelConfig) -> None:
    cache = KVCache(config, 5, torch.bfloat16, torch.device("cpu"))
    assert len(cache.layers) == 2
    layer = cache.layers[1]
    assert layer.key.shape == layer.value.shape == (5, 16, 2, 16)
    layer.key_slots[3 * 16 + 7] = 1.0
    assert layer.key[3, 7].eq(1.0).all()
    assert cache.storage.count_nonzero() == 2 * 16, "layers, keys and values must not overlap"


def test_bytes_per_block_is_what_the_cache_takes(config: ModelConfig) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        assert bytes_per_block(config, dtype) * 7 == KVCache(config, 7, dtype, torch.device("cpu")).storage.nbytes


def test_padding_goes_to_the_dummy_block() -> None:
    assert PAD_SLOT_ID // 16 == DUMMY_BLOCK == 0


def test_num_blocks_fill_the_memory(config: ModelConfig) -> None:
    block = bytes_per_block(config, torch.float32)
    assert num_blocks_for(100 * block + block - 1, config, torch.float32, max_model_len=512) == 100


def test_memory_for_one_request_and_the_dummy_block_is_enough(config: ModelConfig) -> None:
    block = bytes_per_block(config, torch.float32)
    assert num_blocks_for(33 * block, config, torch.float32, max_model_len=512) == 33


def test_less_memory_is_refused_with_the_minimum(config: ModelConfig) -> None:
    block = bytes_per_block(config, torch.float32)
    given, minimum = 33 * block - 1, 33 * block
    text = re.escape(f"kv_cache_memory = {given}: expected at least {minimum} bytes")
    with pytest.raises(InvalidArgumentError, match=text) as caught:
        num_blocks_for(given, config, torch.float32, max_model_len=512)
    assert caught.value.field == "kv_cache_memory"
    assert "max_model_len = 512" in str(caught.value)
