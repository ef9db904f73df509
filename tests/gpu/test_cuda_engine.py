"""The engine on a GPU: the same output however it is run, in float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from common.sampling_params import SamplingParams
from outrider.llm import LLM
from outrider.outputs import RequestOutput
from tests.integration.test_token_identity import MAX_MODEL_LEN, MIXED, PROMPTS, visible
from tests.tiny_models import make_model, make_tokenizer

pytestmark = pytest.mark.gpu

PLAIN = [SamplingParams(temperature=0.8 * (i % 2), seed=i, max_tokens=44, ignore_eos=True) for i in range(len(PROMPTS))]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tiny-llama")
    make_model(directory, "LlamaForCausalLM", head_dim=32)
    return make_tokenizer(directory)


def generate(model: Path, params: list[SamplingParams], **options: Any) -> tuple[list[RequestOutput], LLM]:
    options = {"device": "cuda", "dtype": "float32", "gpu_memory_utilization": 0.1, "max_num_seqs": 8} | options
    with LLM(str(model), max_model_len=MAX_MODEL_LEN, **options) as llm:
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
        pool = llm._engine.orchestrator.pool
        assert pool.num_free == pool.num_blocks - 1, "blocks were lost"
    return outputs, llm


@pytest.fixture(scope="module")
def references(model: Path) -> dict[str, list[RequestOutput]]:
    """One request at a time, one token a step, no graph."""
    found: dict[str, list[RequestOutput]] = {}
    options: dict[str, Any] = {"drafter": "none", "async_scheduling": False, "cuda_graphs": "none", "max_num_seqs": 1}
    for name, params in (("plain", PLAIN), ("mixed", MIXED)):
        found[name], _ = generate(model, params, **options)
    return found


RUNS: dict[str, dict[str, Any]] = {
    "off": {"drafter": "none"},
    "off sync": {"drafter": "none", "async_scheduling": False},
    "off no graphs": {"drafter": "none", "cuda_graphs": "none"},
    **{f"K={k}": {"num_speculative_tokens": k} for k in range(1, 6)},
    "K=3 sync": {"async_scheduling": False},
    "K=3 no graphs": {"cuda_graphs": "none"},
    "chunks of 16": {"max_num_batched_tokens": 16},
    "five rows": {"max_num_seqs": 5},
}


@pytest.mark.parametrize("workload", ["plain", "mixed"])
@pytest.mark.parametrize("name", RUNS)
def test_every_way_to_run_gives_the_same_output(
    model: Path, references: dict[str, list[RequestOutput]], name: str, workload: str
) -> None:
    params = PLAIN if workload == "plain" else MIXED
    outputs, llm = generate(model, params, **RUNS[name])
    assert visible(outputs) == visible(references[workload])
    if workload == "plain":
        stats = llm._engine._executor.stats  # type: ignore[attr-defined]
        assert sum(stats.num_replays.values()) > 20, "graphs were captured and not used"
