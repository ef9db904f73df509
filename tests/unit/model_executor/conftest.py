"""Tiny models, each written once a session."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tiny_models import make_model

ModelMaker = Callable[..., Path]


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> ModelMaker:
    """tiny_model(architecture, **overrides) -> directory; made when first asked for, not to be changed by a test."""
    made: dict[str, Path] = {}

    def make(architecture: str = "LlamaForCausalLM", **overrides: Any) -> Path:
        name = json.dumps([architecture, overrides], sort_keys=True, default=str)
        if name not in made:
            made[name] = make_model(tmp_path_factory.mktemp("model"), architecture, **overrides)
        return made[name]

    return make
