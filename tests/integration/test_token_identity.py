"""FP32 token identity: the output is a function of prompt, parameters and seed, whatever drafts and however it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from common.sampling_params import SamplingParams
from outrider.llm import LLM
from outrider.outputs import RequestOutput
from tests.draft_methods import NoisyOracle, RandomDrafts
from tests.identity_workload import (
    MAX_MODEL_LEN,
    MIXED,
    PARAMS,
    PROMPTS,
    VOCAB_SIZE,
    greedy_of_transformers,
    resume,
    visible,
)
from tests.tiny_models import ARCHITECTURES, LLAMA3_ROPE, make_model


def generate(directory: Path, params: list[SamplingParams], **options: Any) -> tuple[list[RequestOutput], LLM]:
    options = {"max_model_len": MAX_MODEL_LEN, "max_num_seqs": 8, "kv_cache_memory": "4M"} | options
    draft_method = options.pop("draft_method", None)
    if draft_method is None:
        llm = LLM(str(directory), **options)
    else:
        llm = LLM.with_draft_method(str(directory), draft_method, **options)
    with llm:
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
        pool = llm._engine.orchestrator.pool
        assert pool.num_free == pool.num_blocks - 1, "blocks were lost"
    return outputs, llm


@pytest.fixture(scope="module")
def reference(tiny_llama: Path) -> list[RequestOutput]:
    """One request at a time, one token a step."""
    outputs: list[RequestOutput] = []
    with LLM(str(tiny_llama), drafter="none", async_scheduling=False, max_model_len=MAX_MODEL_LEN) as llm:
        for prompt, params in zip(PROMPTS, MIXED, strict=True):
            outputs += llm.generate(prompt, params, use_tqdm=False)
    return outputs


RUNS: dict[str, dict[str, Any]] = {
    "off sync": {"drafter": "none", "async_scheduling": False},
    "off async": {"drafter": "none"},
    **{f"K={k}": {"num_speculative_tokens": k} for k in range(1, 6)},
    **{f"K={k} sync": {"num_speculative_tokens": k, "async_scheduling": False} for k in (2, 5)},
    "chunks of 16": {"max_num_batched_tokens": 16, "num_speculative_tokens": 2},
    "chunks of 16 sync": {"max_num_batched_tokens": 16, "num_speculative_tokens": 5, "async_scheduling": False},
    "no prefix cache": {"enable_prefix_caching": False},
    "16 tokens of prompts beside decode": {"max_prefill_beside_decode": 16},
    "short n-grams": {"prompt_lookup_min": 1, "prompt_lookup_max": 3, "num_speculative_tokens": 5},
}


@pytest.mark.parametrize("name", RUNS)
def test_every_way_to_run_gives_the_same_output(tiny_llama: Path, reference: list[RequestOutput], name: str) -> None:
    outputs, _ = generate(tiny_llama, MIXED, **RUNS[name])
    assert visible(outputs) == visible(reference)
    drafting = RUNS[name].get("drafter") != "none"
    accepted = sum(output.num_accepted_tokens for output in outputs)
    assert (accepted > 20) == drafting, "drafts must have been accepted for this test to mean anything"


@pytest.mark.parametrize("batched_tokens", [16, 2048])
@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize("drafter", ["none", "ngram"])
def test_under_forced_preemption(
    tiny_llama: Path, reference: list[RequestOutput], drafter: str, asynchronous: bool, batched_tokens: int
) -> None:
    one_request = (MAX_MODEL_LEN // 16 + 2) * 16 * 2 * 2 * 2 * 16 * 4  # bytes: tokens x k,v x layers x heads x dim
    outputs, llm = generate(
        tiny_llama,
        MIXED,
        drafter=drafter,
        async_scheduling=asynchronous,
        max_num_batched_tokens=batched_tokens,
        kv_cache_memory=one_request,
    )
    assert llm._engine.orchestrator.stats.num_preemptions > 0
    assert visible(outputs) == visible(reference)


@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize("lie", [0.0, 0.3, 0.7])
def test_with_every_pattern_of_acceptance(
    tiny_llama: Path, reference: list[RequestOutput], lie: float, asynchronous: bool
) -> None:
    texts = [o.prompt_token_ids + output.token_ids for o in reference for output in o.outputs]
    outputs, _ = generate(
        tiny_llama,
        MIXED,
        draft_method=NoisyOracle(texts, lie, 1, VOCAB_SIZE),
        num_speculative_tokens=5,
        async_scheduling=asynchronous,
    )
    assert visible(outputs) == visible(reference)
    drafted = sum(output.num_draft_tokens for output in outputs)
    accepted = sum(output.num_accepted_tokens for output in outputs)
    assert drafted > 200
    assert accepted > 0.25 * (1 - lie) * drafted


@pytest.mark.parametrize("seed", range(3))
def test_an_adversarial_drafter_changes_nothing(tiny_llama: Path, reference: list[RequestOutput], seed: int) -> None:
    drafts = RandomDrafts(seed, VOCAB_SIZE)
    outputs, _ = generate(tiny_llama, MIXED, draft_method=drafts, num_speculative_tokens=5)
    assert visible(outputs) == visible(reference)


def test_speculation_turned_off_for_one_request(tiny_llama: Path, reference: list[RequestOutput]) -> None:
    params = [p.model_copy(update={"num_speculative_tokens": i % 3}) for i, p in enumerate(MIXED)]
    outputs, _ = generate(tiny_llama, params, num_speculative_tokens=4)
    assert visible(outputs) == visible(reference)
    for index, output in enumerate(outputs):
        per_pos = output.num_accepted_tokens_per_pos
        assert len(per_pos) <= index % 3


MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {}) for name in ARCHITECTURES},
    "tied": ("LlamaForCausalLM", {"tie_word_embeddings": True, "num_key_value_heads": 1}),
    "llama3 rope, head_dim": ("LlamaForCausalLM", {"rope_parameters": LLAMA3_ROPE, "head_dim": 32}),
}


@pytest.mark.parametrize("name", MODELS)
def test_greedy_output_is_that_of_transformers(tmp_path: Path, name: str) -> None:
    architecture, overrides = MODELS[name]
    make_model(tmp_path, architecture, **overrides)
    params = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
    prompts = PROMPTS[2:7]
    expected = greedy_of_transformers(tmp_path, architecture, prompts, 32)
    for drafter in ("none", "ngram"):
        options: dict[str, Any] = {"skip_tokenizer_init": True, "max_num_seqs": 4, "drafter": drafter}
        with LLM(str(tmp_path), max_model_len=MAX_MODEL_LEN, **options) as llm:
            outputs = llm.generate(prompts, params, use_tqdm=False)
        assert [output.outputs[0].token_ids for output in outputs] == expected


@pytest.mark.parametrize("name", PARAMS)
def test_an_output_resumed_at_any_token_goes_on_the_same(tiny_llama: Path, name: str) -> None:
    params = PARAMS[name].model_copy(update={"n": 1, "prompt_logprobs": None})
    with LLM(str(tiny_llama), max_model_len=MAX_MODEL_LEN) as llm:
        whole = llm.generate(PROMPTS[3], params, use_tqdm=False)[0].outputs[0]
        for cut in range(1, len(whole.token_ids), 5):
            received = whole.token_ids[:cut]
            stream = resume(llm, PROMPTS[3], received, params)
            assert received + stream.token_ids == whole.token_ids
            assert (stream.text, str(stream.finish_reason)) == (whole.text, whole.finish_reason)
