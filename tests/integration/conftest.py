"""A tiny model directory with a tokenizer, made once."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tiny_models import make_model, make_tokenizer


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tiny-llama")
    make_model(directory, "LlamaForCausalLM")
    make_tokenizer(directory)
    return directory
