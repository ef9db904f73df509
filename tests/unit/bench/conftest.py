"""A small engine on the CPU, for what benches count; times mean nothing here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.random_engine import make_engine
from tests.tiny_models import make_model
from verifier_svc.engine.engine import Engine


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("tiny-llama"))


@pytest.fixture
def build_engine(tiny_model: Path) -> Iterator[Callable[..., Engine]]:
    """`make_engine` on the CPU, of (num_draft, options); closed at the end."""
    import torch

    from model_executor.models.registry import load_parameters

    engines: list[Engine] = []

    def build(num_draft: int, **options: Any) -> Engine:
        loaded = load_parameters(tiny_model, "float32", torch.device("cpu"), progress=False)
        options = {"device": "cpu", "dtype": "float32", "kv_cache_memory": "16M"} | options
        engines.append(make_engine(str(tiny_model), loaded, num_draft, **options))
        return engines[-1]

    yield build
    for engine in engines:
        engine.close()
