"""A tiny model and what it says when a GPU has nothing else to do, made once."""

from __future__ import annotations

from pathlib import Path

import pytest

from outrider.outputs import RequestOutput
from tests.cuda_llm import MODEL_OPTIONS, WORKLOADS, CudaRuns, cuda_llm
from tests.identity_workload import PROMPTS
from tests.tiny_models import make_model, make_tokenizer


@pytest.fixture(scope="session")
def tiny_cuda_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tiny-cuda-llama")
    make_model(directory, "LlamaForCausalLM", **MODEL_OPTIONS)
    return make_tokenizer(directory)


@pytest.fixture(scope="session")
def references(tiny_cuda_llama: Path) -> dict[str, list[RequestOutput]]:
    """One request at a time, one token a step, no graph."""
    found: dict[str, list[RequestOutput]] = {}
    with cuda_llm(tiny_cuda_llama, drafter="none", async_scheduling=False, cuda_graphs="none", max_num_seqs=1) as llm:
        runs = CudaRuns(llm)
        for name, params in WORKLOADS.items():
            found[name] = [runs.generate([param], [prompt])[0] for prompt, param in zip(PROMPTS, params, strict=True)]
    return found
