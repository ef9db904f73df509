"""200,000 tokens of random requests on a GPU, in float32: nothing is lost, nothing grows, outputs stay the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from common.config import EngineConfig
from outrider.local import build_local_engine
from tests.soak import MODEL_OPTIONS, check_soaked, run_alone, soak, with_few_blocks
from tests.tiny_models import make_model

pytestmark = pytest.mark.gpu

NUM_OUTPUT_TOKENS = 200_000
NUM_BLOCKS = 120  # for 16 rows, each of which can fill 50


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tiny-llama")
    return make_model(directory, **MODEL_OPTIONS)


def make_config(model: Path, **options: Any) -> EngineConfig:
    common: dict[str, Any] = {"device": "cuda", "dtype": "float32", "skip_tokenizer_init": True}
    return EngineConfig(model=str(model), gpu_memory_utilization=0.1, **common, **options)


def test_random_requests_leave_nothing_behind_and_get_what_they_get_alone(model: Path) -> None:
    # A hidden synchronization or an allocation in the step path raises.
    config = make_config(model, max_num_seqs=16, max_num_batched_tokens=256, debug_step_path=True)
    engine = with_few_blocks(build_local_engine(config, progress=False).engine, config, NUM_BLOCKS)
    try:
        torch.cuda.synchronize()
        allocated_bytes = torch.cuda.memory_allocated()
        done = soak(engine, NUM_OUTPUT_TOKENS, seed=0, num_samples=48)
        torch.cuda.synchronize()
        assert torch.cuda.memory_allocated() == allocated_bytes
        check_soaked(engine, done)
        assert done.num_output_tokens >= NUM_OUTPUT_TOKENS
    finally:
        engine.close()
    alone_config = make_config(model, drafter="none", async_scheduling=False, cuda_graphs="none", max_num_seqs=1)
    alone = build_local_engine(alone_config, progress=False).engine
    try:
        differing = [request for request, tokens in done.sample if tokens != run_alone(alone, request)]
    finally:
        alone.close()
    assert not differing
