"""Every architecture on a GPU in float32: the output of transformers, and of the engine on a CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from common.sampling_params import SamplingParams
from outrider.llm import LLM
from tests.cuda_llm import MAX_MODEL_LEN, CudaRuns, check_same, cuda_llm, num_accepted
from tests.identity_workload import MIXED, PROMPTS, greedy_of_transformers
from tests.tiny_models import ARCHITECTURES, LLAMA3_ROPE, make_model, make_tokenizer

pytestmark = pytest.mark.gpu

NUM_TOKENS = 32
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {}) for name in ARCHITECTURES},
    "tied, one KV head": ("LlamaForCausalLM", {"tie_word_embeddings": True, "num_key_value_heads": 1}),
    "llama3 rope": ("LlamaForCausalLM", {"rope_parameters": LLAMA3_ROPE, "head_dim": 64}),
    "biases everywhere": ("LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True}),
}


@pytest.mark.parametrize("name", MODELS)
def test_output_is_that_of_transformers_and_of_a_cpu(tmp_path: Path, name: str) -> None:
    architecture, overrides = MODELS[name]
    sizes: dict[str, Any] = {"head_dim": 32} | overrides
    make_model(tmp_path, architecture, **sizes)
    make_tokenizer(tmp_path)
    greedy = [SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)] * len(PROMPTS)
    oracle = greedy_of_transformers(tmp_path, architecture, PROMPTS, NUM_TOKENS)
    options: dict[str, Any] = {"max_model_len": MAX_MODEL_LEN, "max_num_seqs": 8, "kv_cache_memory": "8M"}
    with LLM(str(tmp_path), drafter="none", async_scheduling=False, **options) as llm:
        expected = llm.generate(PROMPTS, MIXED, use_tqdm=False)
    with cuda_llm(tmp_path, max_num_batched_tokens=64) as llm:
        runs = CudaRuns(llm)
        found = [output.outputs[0].token_ids for output in runs.generate(greedy)]
        outputs = runs.generate(MIXED)
    assert found == oracle
    check_same(outputs, expected)
    assert num_accepted(outputs) > 20
