"""Requests on a GPU in float32: alone and in company, resumed, beside aborts, and in steps too large for a graph."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from common.sampling_params import SamplingParams
from outrider.llm import LLM
from outrider.outputs import RequestOutput
from tests.cuda_llm import MAX_MODEL_LEN, WORKLOADS, CudaRuns, check_same, cuda_llm, step_counts, stream_with_aborts
from tests.identity_workload import MIXED, PARAMS, PROMPTS, resume

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def llm(tiny_cuda_llama: Path) -> Iterator[LLM]:
    with cuda_llm(tiny_cuda_llama) as llm:
        yield llm


@pytest.fixture(scope="module")
def runs(llm: LLM) -> CudaRuns:
    return CudaRuns(llm)


@pytest.mark.parametrize("workload", WORKLOADS)
def test_alone_and_in_a_batch_of_eight(
    runs: CudaRuns, references: dict[str, list[RequestOutput]], workload: str
) -> None:
    params = WORKLOADS[workload]
    check_same(runs.generate(params), references[workload])
    alone = [runs.generate([param], [prompt])[0] for prompt, param in zip(PROMPTS, params, strict=True)]
    check_same(alone, references[workload])


def test_prompts_that_are_cached(runs: CudaRuns, references: dict[str, list[RequestOutput]]) -> None:
    runs.empty_cache()
    llm = runs.llm
    for _ in range(2):
        outputs = llm.generate(PROMPTS, WORKLOADS["plain"], use_tqdm=False)
        check_same(outputs, references["plain"])
    assert llm._engine.orchestrator.stats.num_prefix_hits > 0


@pytest.mark.parametrize("name", PARAMS)
def test_an_output_resumed_at_any_token_goes_on_the_same(llm: LLM, runs: CudaRuns, name: str) -> None:
    params = PARAMS[name].model_copy(update={"n": 1, "prompt_logprobs": None})
    whole = runs.generate([params], [PROMPTS[3]])[0].outputs[0]
    for cut in range(1, len(whole.token_ids), 5):
        received = whole.token_ids[:cut]
        runs.empty_cache()
        stream = resume(llm, PROMPTS[3], received, params)
        assert received + stream.token_ids == whole.token_ids
        assert (stream.text, str(stream.finish_reason)) == (whole.text, whole.finish_reason)


def test_aborts_of_others_change_nothing(llm: LLM, runs: CudaRuns) -> None:
    kept = [PARAMS[name] for name in ("greedy", "random", "top-p", "random")]
    expected = [output.outputs[0].token_ids for output in runs.generate(kept, PROMPTS[: len(kept)])]
    aborted = [params.model_copy(update={"n": 1}) for params in MIXED]
    runs.empty_cache()
    assert stream_with_aborts(llm, kept, aborted) == expected


def test_steps_too_large_for_a_graph(tiny_cuda_llama: Path) -> None:
    """Prompts of 150 tokens: as many in one step as there are blocks for, and in steps of 128 tokens."""
    prompts = [[(7 * index + place) % 250 for place in range(MAX_MODEL_LEN - 10)] for index in range(8)]
    params = [SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)] * 8
    outputs: list[list[RequestOutput]] = []
    num_eager: list[int] = []
    for batched_tokens in (128, 1280):
        with cuda_llm(tiny_cuda_llama, max_num_batched_tokens=batched_tokens, drafter="none") as llm:
            outputs.append(CudaRuns(llm).generate(params, prompts))
            replays, eager = step_counts(llm)
            assert sum(replays.values()) > 0
            num_eager.append(eager)
    assert num_eager == [0, 1]
    check_same(outputs[1], outputs[0])
