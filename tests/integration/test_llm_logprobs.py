"""Log probabilities of the offline API against transformers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider import LLM, SamplingParams
from outrider.outputs import Logprob
from tests.draft_methods import NoisyOracle

VOCAB_SIZE = 320
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
FEW_TOKENS = dict.fromkeys((40, 41, 42, 43), 60.0)
WARM = SamplingParams(temperature=1.0, max_tokens=24, ignore_eos=True, seed=5, logit_bias=FEW_TOKENS)
PROMPT = [40, 41, 42, 40, 41, 42, 40, 41]


@pytest.fixture(scope="module")
def llm(tiny_llama: Path) -> Iterator[LLM]:
    with LLM(str(tiny_llama), max_model_len=128, kv_cache_memory="2M", max_num_seqs=8) as llm:
        yield llm


@pytest.fixture(scope="module")
def oracle_logprobs(tiny_llama: Path) -> Any:
    """log_softmax of transformers for a text: [num_tokens, vocab_size], row i for the token behind token i."""
    import transformers

    model = transformers.LlamaForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32).eval()

    def compute(token_ids: list[int]) -> torch.Tensor:
        with torch.inference_mode():
            return model(torch.tensor([token_ids])).logits[0].float().log_softmax(dim=-1)

    return compute


def check_logprobs(found: dict[int, Logprob], token: int, expected: torch.Tensor, count: int) -> None:
    best = expected.topk(count).indices.tolist()
    assert set(found) == {token, *best}
    assert next(iter(found)) == token
    for entry_token, entry in found.items():
        assert entry.logprob == pytest.approx(float(expected[entry_token]), abs=1e-4)
        assert entry.rank == 1 + int((expected > expected[entry_token]).sum())
        if entry_token < 128:
            assert entry.decoded_token == chr(entry_token)


@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize("batched_tokens", [16, 2048])
def test_logprobs_are_those_of_transformers_at_accepted_positions_too(
    tiny_llama: Path, oracle_logprobs: Any, asynchronous: bool, batched_tokens: int
) -> None:
    params = WARM.model_copy(update={"logprobs": 3, "prompt_logprobs": 2})
    prompt = PROMPT * 3
    options: dict[str, Any] = {"async_scheduling": asynchronous, "max_num_batched_tokens": batched_tokens}
    options |= {"num_speculative_tokens": 4, "max_num_seqs": 8, "max_model_len": 128}
    with LLM(str(tiny_llama), drafter="none", **options) as llm:
        truth = llm.generate(prompt, params, use_tqdm=False)[0].outputs[0].token_ids
    drafter = NoisyOracle([prompt + truth], 0.3, 1, VOCAB_SIZE)
    with LLM.with_draft_method(str(tiny_llama), drafter, **options) as llm:
        (output,) = llm.generate(prompt, params, use_tqdm=False)
    (completion,) = output.outputs
    assert completion.token_ids == truth
    assert completion.num_accepted_tokens > 8
    assert completion.num_drafts < completion.num_draft_tokens
    expected = oracle_logprobs(prompt + truth)
    assert completion.logprobs is not None
    assert len(completion.logprobs) == len(truth)
    for index, (token, found) in enumerate(zip(truth, completion.logprobs, strict=True)):
        check_logprobs(found, token, expected[len(prompt) + index - 1], 3)
    total = sum(found[token].logprob for token, found in zip(truth, completion.logprobs, strict=True))
    assert completion.cumulative_logprob == pytest.approx(total)
    assert output.prompt_logprobs is not None
    assert len(output.prompt_logprobs) == len(prompt)
    assert output.prompt_logprobs[0] is None
    for index in range(1, len(prompt)):
        found = output.prompt_logprobs[index]
        assert found is not None
        check_logprobs(found, prompt[index], expected[index - 1], 2)


def test_no_best_tokens_but_the_chosen_one(llm: LLM) -> None:
    (output,) = llm.generate(PROMPT, GREEDY.model_copy(update={"logprobs": 0, "prompt_logprobs": 0}), use_tqdm=False)
    completion = output.outputs[0]
    assert [list(entry) for entry in completion.logprobs or []] == [[token] for token in completion.token_ids]
    assert [list(entry) for entry in (output.prompt_logprobs or [])[1:] if entry] == [[token] for token in PROMPT[1:]]


def test_without_logprobs_there_are_none(llm: LLM) -> None:
    (output,) = llm.generate([[7]], GREEDY, use_tqdm=False)
    assert output.prompt_logprobs is None
    assert (output.outputs[0].logprobs, output.outputs[0].cumulative_logprob) == (None, None)


def test_prompt_logprobs_of_a_single_token(llm: LLM) -> None:
    (output,) = llm.generate([7], GREEDY.model_copy(update={"prompt_logprobs": 1}), use_tqdm=False)
    assert output.prompt_logprobs == [None]
