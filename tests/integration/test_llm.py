"""The offline API on a tiny model: what users of it count on."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from common.sampling_params import MAX_SEED
from outrider import LLM, CompletionOutput, SamplingParams
from tests.tiny_models import EOS_TOKEN_ID

MAX_MODEL_LEN = 128
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
# Few tokens can win, so that n-grams repeat and drafts are accepted.
FEW_TOKENS = dict.fromkeys((40, 41, 42, 43), 60.0)
WARM = SamplingParams(temperature=1.0, max_tokens=24, ignore_eos=True, seed=5, logit_bias=FEW_TOKENS)
PROMPT = [40, 41, 42, 40, 41, 42, 40, 41]


def load(directory: Path, **options: Any) -> LLM:
    return LLM(
        str(directory), **({"max_model_len": MAX_MODEL_LEN, "kv_cache_memory": "2M", "max_num_seqs": 8} | options)
    )


@pytest.fixture(scope="module")
def llm(tiny_llama: Path) -> Iterator[LLM]:
    with load(tiny_llama) as llm:
        yield llm


def one(llm: LLM, prompt: Any, params: SamplingParams) -> CompletionOutput:
    (output,) = llm.generate(prompt, params, use_tqdm=False)
    (completion,) = output.outputs
    return completion


def all_is_free(llm: LLM) -> bool:
    orchestrator = llm._engine.orchestrator
    pool = orchestrator.pool
    idle = orchestrator.num_running == orchestrator.num_waiting == orchestrator.num_in_flight == 0
    return idle and not llm._samples and pool.num_free == pool.num_blocks - 1


# -- prompts and outputs -----------------------------------------------------------------------------------------------


def test_text_and_token_ids_are_the_same_prompt(llm: LLM) -> None:
    text = bytes(PROMPT).decode()
    single, listed = llm.generate(text, GREEDY, use_tqdm=False), llm.generate([text], GREEDY, use_tqdm=False)
    ids, listed_ids = llm.generate(PROMPT, GREEDY, use_tqdm=False), llm.generate([PROMPT], GREEDY, use_tqdm=False)
    outputs = [output for (output,) in (single, listed, ids, listed_ids)]
    assert len({tuple(output.outputs[0].token_ids) for output in outputs}) == 1
    assert [output.prompt for output in outputs] == [text, text, None, None]
    assert all(output.prompt_token_ids == PROMPT for output in outputs)
    assert all(output.finished for output in outputs)
    assert len({output.request_id for output in outputs}) == 4


def test_outputs_come_in_the_order_of_the_prompts(llm: LLM) -> None:
    prompts: list[Any] = [[i + 1] * (i % 5 + 1) for i in range(20)] + ["text", (1, 2)]
    params = [GREEDY.model_copy(update={"max_tokens": 1 + i % 7}) for i in range(len(prompts))]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert [output.prompt_token_ids for output in outputs[:20]] == prompts[:20]
    assert [len(output.outputs[0].token_ids) for output in outputs] == [1 + i % 7 for i in range(len(prompts))]
    for prompt, param, output in zip(prompts, params, outputs, strict=True):
        assert output.outputs[0].token_ids == one(llm, prompt, param).token_ids


def test_nothing_to_generate(llm: LLM) -> None:
    assert llm.generate([]) == []


def test_default_parameters(llm: LLM) -> None:
    (output,) = llm.generate(PROMPT, use_tqdm=False)
    assert 1 <= len(output.outputs[0].token_ids) <= 16


def test_more_prompts_than_may_wait(tiny_llama: Path) -> None:
    prompts = [[i] for i in range(1, 21)]
    with load(tiny_llama, max_num_waiting=1, max_num_seqs=2) as narrow, load(tiny_llama) as wide:
        outputs = narrow.generate(prompts, GREEDY, use_tqdm=False)
        expected = wide.generate(prompts, GREEDY, use_tqdm=False)
    assert [o.outputs[0].token_ids for o in outputs] == [o.outputs[0].token_ids for o in expected]


def test_max_tokens_and_max_model_len_end_an_output(llm: LLM) -> None:
    short = one(llm, PROMPT, GREEDY.model_copy(update={"max_tokens": 1}))
    assert (len(short.token_ids), short.finish_reason, short.stop_reason) == (1, "length", None)
    full = one(llm, PROMPT, GREEDY.model_copy(update={"max_tokens": None}))
    assert (len(full.token_ids), full.finish_reason) == (MAX_MODEL_LEN - len(PROMPT), "length")


# -- n and seeds -------------------------------------------------------------------------------------------------------


def test_outputs_of_one_prompt_are_those_of_consecutive_seeds(llm: LLM) -> None:
    (output,) = llm.generate(PROMPT, WARM.model_copy(update={"n": 4}), use_tqdm=False)
    got = [completion.token_ids for completion in output.outputs]
    assert [completion.index for completion in output.outputs] == [0, 1, 2, 3]
    assert len(set(map(tuple, got))) == 4
    assert got == [one(llm, PROMPT, WARM.model_copy(update={"seed": 5 + i})).token_ids for i in range(4)]


def test_seeds_of_several_outputs_wrap_around(llm: LLM) -> None:
    (output,) = llm.generate(PROMPT, WARM.model_copy(update={"n": 2, "seed": MAX_SEED}), use_tqdm=False)
    expected = [one(llm, PROMPT, WARM.model_copy(update={"seed": seed})).token_ids for seed in (MAX_SEED, 0)]
    assert [completion.token_ids for completion in output.outputs] == expected


def test_greedy_outputs_of_one_prompt_are_equal(llm: LLM) -> None:
    (output,) = llm.generate(PROMPT, GREEDY.model_copy(update={"n": 2}), use_tqdm=False)
    assert output.outputs[0].token_ids == output.outputs[1].token_ids == one(llm, PROMPT, GREEDY).token_ids


def test_a_given_seed_repeats_and_none_does_not(llm: LLM) -> None:
    assert one(llm, PROMPT, WARM).token_ids == one(llm, PROMPT, WARM).token_ids
    without = WARM.model_copy(update={"seed": None})
    assert len({tuple(one(llm, PROMPT, without).token_ids) for _ in range(4)}) == 4


# -- stop --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("drafter", ["none", "ngram"])
@pytest.mark.parametrize("include", [False, True])
def test_stop_string(tiny_llama: Path, drafter: str, include: bool) -> None:
    with load(tiny_llama, drafter=drafter) as llm:
        whole = one(llm, PROMPT, WARM)
        stop = whole.text[9:12]
        end = whole.text.index(stop)
        got = one(llm, PROMPT, WARM.model_copy(update={"stop": (stop,), "include_stop_str_in_output": include}))
        assert got.text == whole.text[: end + len(stop) if include else end]
        assert (got.finish_reason, got.stop_reason) == ("stop", stop)
        assert got.token_ids == whole.token_ids[: end + len(stop)]  # one token is one character here
        assert all_is_free(llm)


def test_stop_token(llm: LLM) -> None:
    whole = one(llm, PROMPT, WARM)
    stop = whole.token_ids[6]
    end = whole.token_ids.index(stop)
    got = one(llm, PROMPT, WARM.model_copy(update={"stop_token_ids": (stop,)}))
    assert got.token_ids == whole.token_ids[: end + 1]
    assert got.text == whole.text[:end]
    assert (got.finish_reason, got.stop_reason) == ("stop", stop)


def test_end_token(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=24, min_tokens=3, logit_bias={EOS_TOKEN_ID: 100.0})
    got = one(llm, PROMPT, params)
    assert got.token_ids[3:] == [EOS_TOKEN_ID]
    assert (got.finish_reason, got.stop_reason) == ("stop", None)
    ignoring = one(llm, PROMPT, params.model_copy(update={"ignore_eos": True}))
    assert ignoring.token_ids == [EOS_TOKEN_ID] * 24
    assert ignoring.text == ""
    kept = one(llm, PROMPT, params.model_copy(update={"ignore_eos": True, "skip_special_tokens": False}))
    assert kept.text == "<|eos|>" * 24


# -- streams -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize("params", [GREEDY, WARM, WARM.model_copy(update={"stop": (")*",), "logprobs": 1})])
def test_joined_deltas_are_the_output(tiny_llama: Path, params: SamplingParams, asynchronous: bool) -> None:
    with load(tiny_llama, async_scheduling=asynchronous) as llm:
        whole = one(llm, PROMPT, params)
        deltas = list(llm.stream(bytes(PROMPT).decode(), params))
        assert len(deltas) > 3
        assert [token for delta in deltas for token in delta.token_ids] == whole.token_ids
        assert "".join(delta.text for delta in deltas) == whole.text
        assert [delta.finish_reason for delta in deltas[:-1]] == [None] * (len(deltas) - 1)
        assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == (whole.finish_reason, whole.stop_reason)
        entries = [entry for delta in deltas for entry in delta.logprobs or []]
        assert len(entries) == len(whole.logprobs or [])
        assert sum(delta.num_accepted_tokens for delta in deltas) == whole.num_accepted_tokens
        assert all_is_free(llm)


@pytest.mark.parametrize("num_deltas", [0, 1, 2, 5])
def test_closing_a_stream_early_gives_everything_back(llm: LLM, num_deltas: int) -> None:
    stream = llm.stream(PROMPT, GREEDY)
    list(itertools.islice(stream, num_deltas))
    stream.close()  # type: ignore[attr-defined]
    assert all_is_free(llm)
    assert len(one(llm, PROMPT, GREEDY).token_ids) == 24


def test_two_streams_in_turns(llm: LLM) -> None:
    prompts, params = [PROMPT, [7, 8, 9]], [WARM, GREEDY]
    expected = [one(llm, prompt, param).token_ids for prompt, param in zip(prompts, params, strict=True)]
    streams = [llm.stream(prompt, param) for prompt, param in zip(prompts, params, strict=True)]
    got: list[list[int]] = [[], []]
    for deltas in itertools.zip_longest(*streams):
        for tokens, delta in zip(got, deltas, strict=True):
            tokens += delta.token_ids if delta else []
    assert got == expected
    assert all_is_free(llm)


def test_a_stream_that_rests_while_others_are_served(llm: LLM) -> None:
    expected = one(llm, PROMPT, WARM).token_ids
    stream = llm.stream(PROMPT, WARM)
    got = list(next(stream).token_ids)
    assert len(one(llm, [9, 9], GREEDY).token_ids) == 24
    abandoned = llm.stream([1, 2], GREEDY)
    next(abandoned)
    abandoned.close()  # type: ignore[attr-defined]
    got += [token for delta in stream for token in delta.token_ids]
    assert got == expected
    assert all_is_free(llm)


# -- prefix cache and drafts -------------------------------------------------------------------------------------------


def test_a_second_identical_prompt_hits_the_prefix_cache(tiny_llama: Path) -> None:
    prompt = [*range(1, 51)]
    with load(tiny_llama) as llm:
        stats = llm._engine.orchestrator.stats
        first = one(llm, prompt, GREEDY)
        assert (stats.num_prefix_queries, stats.num_prefix_hits) == (50, 0)
        second = one(llm, prompt, GREEDY)
        assert (stats.num_prefix_queries, stats.num_prefix_hits) == (100, 48)
        # The first output is in the cache as well: a conversation that goes on pays for its new turn only.
        longer = one(llm, prompt + first.token_ids + [3, 4], GREEDY)
        assert stats.num_prefix_hits == 48 + 64
        with load(tiny_llama, enable_prefix_caching=False) as uncached:
            assert one(uncached, prompt + first.token_ids + [3, 4], GREEDY).token_ids == longer.token_ids
            one(uncached, prompt, GREEDY)
            assert uncached._engine.orchestrator.stats.num_prefix_hits == 0
    assert first.token_ids == second.token_ids


def test_draft_statistics(llm: LLM) -> None:
    (output,) = llm.generate(PROMPT, WARM.model_copy(update={"n": 2, "max_tokens": 60}), use_tqdm=False)
    for completion in output.outputs:
        per_pos = completion.num_accepted_tokens_per_pos
        assert 0 < completion.num_accepted_tokens == sum(per_pos) < completion.num_draft_tokens
        assert per_pos == sorted(per_pos, reverse=True)
        assert len(per_pos) <= 3
        assert completion.num_drafts <= completion.num_draft_tokens <= 3 * completion.num_drafts
    assert output.num_drafts == sum(completion.num_drafts for completion in output.outputs)
    assert output.num_accepted_tokens == sum(completion.num_accepted_tokens for completion in output.outputs)
    assert output.num_draft_tokens == output.draft_stats.num_draft_tokens
    assert sum(output.num_accepted_tokens_per_pos) == output.num_accepted_tokens
    off = one(llm, PROMPT, WARM.model_copy(update={"num_speculative_tokens": 0}))
    assert (off.num_drafts, off.num_draft_tokens, off.num_accepted_tokens_per_pos) == (0, 0, [])
