"""`python -m bench divergence`: what counts as a difference, and that rounding explains no other one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from bench.divergence import first_difference, gap_between, measure_divergence, serve
from bench.random_engine import make_engine, repetitive_request
from common.types import Request, TokenLogprobs
from model_executor.models.registry import load_parameters
from tests.tiny_models import make_model
from verifier_svc.engine.engine import Engine

NUM_DRAFT = 3


def make_requests(count: int, new_tokens: int) -> list[Request]:
    return [repetitive_request(f"d{i}", 140, new_tokens, 256, NUM_DRAFT, seed=i) for i in range(count)]


@pytest.fixture(scope="module")
def narrow_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Small weights: near ties, and outputs that repeat themselves, are frequent."""
    return make_model(tmp_path_factory.mktemp("narrow-llama"), initializer_range=0.08)


@pytest.fixture
def engines(narrow_model: Path) -> Iterator[Callable[..., list[Engine]]]:
    """Without and with drafts, in a dtype."""
    built: list[Engine] = []

    def build(dtype: Literal["float32", "bfloat16"]) -> list[Engine]:
        options: dict[str, Any] = {"device": "cpu", "dtype": dtype, "kv_cache_memory": "16M", "max_num_seqs": 4}
        options["max_num_batched_tokens"] = 64
        for num_draft in (0, NUM_DRAFT):
            loaded = load_parameters(narrow_model, dtype, torch.device("cpu"), progress=False)
            built.append(make_engine(str(narrow_model), loaded, num_draft, **options))
        return built

    yield build
    for engine in built:
        engine.close()


def test_float32_outputs_are_the_same_and_epsilon_is_its_rounding(engines: Callable[..., list[Engine]]) -> None:
    off, speculative = engines("float32")
    report = measure_divergence(off, speculative, make_requests(6, 32))
    assert report.divergences == []
    assert report.num_tokens == 6 * 32
    assert report.num_positions == 3 * 6 * 32  # two runs against the prefill, and against each other
    assert 0 < report.epsilon < 1e-4
    assert report.num_draft_tokens > 0
    assert report.holds
    assert report.per_1000_tokens == report.largest_gap == 0.0


def test_bfloat16_outputs_differ_at_near_ties_alone(engines: Callable[..., list[Engine]]) -> None:
    off, speculative = engines("bfloat16")
    report = measure_divergence(off, speculative, make_requests(48, 48))
    assert report.divergences
    assert report.holds
    assert report.epsilon > 1e-3
    assert report.num_tokens == 48 * 48 - sum(47 - divergence.index for divergence in report.divergences)


def test_a_difference_that_is_no_rounding_is_seen(
    engines: Callable[..., list[Engine]], monkeypatch: pytest.MonkeyPatch
) -> None:
    off, speculative = engines("float32")
    requests = make_requests(3, 16)
    right = serve(off, requests)["d1"].tokens

    def serve_wrong(engine: Engine, requests: list[Request]) -> Any:
        outputs = serve(engine, requests)
        if engine is speculative and requests[0].params.logprobs is None:
            outputs["d1"].tokens[5] = (right[5] + 1) % 256
        return outputs

    monkeypatch.setattr("bench.divergence.serve", serve_wrong)
    report = measure_divergence(off, speculative, requests)
    assert [(divergence.prompt, divergence.index) for divergence in report.divergences] == [(1, 5)]
    assert report.num_tokens == 16 + 6 + 16
    assert report.per_1000_tokens == pytest.approx(1000 / 38)
    assert not report.holds


def test_the_gap_is_between_the_two_tokens() -> None:
    entry = TokenLogprobs([7, 3, 9], [-2.0, -1.0, -4.0], 2)
    assert gap_between(entry, 7, 3) == 1.0
    assert gap_between(entry, 3, 1) == 3.0  # at least: 1 is not among them
    assert first_difference([1, 2, 3], [1, 5, 3]) == 1
    assert first_difference([1, 2], [1, 2]) == 2
    with pytest.raises(ValueError, match="same length"):
        first_difference([1], [1, 2])
