"""Bugs that other engines shipped and that take a whole engine to show. Numbers are issues of vllm-project/vllm."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from model_executor.forward_batch import ForwardBatch
from model_executor.kv_cache import DUMMY_BLOCK
from model_executor.models.decoder import Decoder
from model_executor.row_state import RowState
from outrider import LLM, CompletionOutput, SamplingParams
from tests.draft_methods import NoisyOracle, RandomDrafts

VOCAB_SIZE = 320
BLOCK_SIZE = 16
MAX_MODEL_LEN = 96
# Few tokens can win, so that n-grams repeat and drafts are accepted.
WARM = SamplingParams(
    temperature=1.0, max_tokens=None, ignore_eos=True, seed=5, logit_bias=dict.fromkeys((40, 41, 42, 43), 60.0)
)
PROMPTS = [[40 + (i * j) % 4 for j in range(3 + 7 * i)] for i in range(6)]
BOTH_LOOPS = pytest.mark.parametrize("asynchronous", [True, False])


def options(**more: Any) -> dict[str, Any]:
    return {"max_model_len": MAX_MODEL_LEN, "max_num_seqs": 4, "num_speculative_tokens": 4, **more}


def generate(llm: LLM, prompts: list[list[int]], params: SamplingParams = WARM) -> list[CompletionOutput]:
    with llm:
        return [output.outputs[0] for output in llm.generate(prompts, params, use_tqdm=False)]


@pytest.fixture(scope="module")
def truth(tiny_llama: Path) -> list[list[int]]:
    """What each prompt yields alone, one token a step: prompt and output."""
    llm = LLM(str(tiny_llama), drafter="none", async_scheduling=False, **options())
    with llm:
        outputs = [llm.generate(prompt, WARM, use_tqdm=False)[0] for prompt in PROMPTS]
    return [output.prompt_token_ids + output.outputs[0].token_ids for output in outputs]


class Watched(NoisyOracle):
    """Drafts as a noisy oracle, and keeps what it was shown."""

    def __init__(self, texts: list[list[int]]) -> None:
        super().__init__(texts, lie=0.4, seed=1, vocab_size=VOCAB_SIZE)
        self.seen: list[list[int]] = []
        self.max_end = 0

    def propose(self, rows: RowState, idx_mapping: Tensor, max_draft_tokens: Tensor) -> Tensor:
        for row, limit in zip(idx_mapping.tolist(), max_draft_tokens.tolist(), strict=True):
            committed_len = int(rows.committed_len[row])
            self.seen.append(rows.token_ids[row, :committed_len].tolist())
            if limit:
                self.max_end = max(self.max_end, committed_len + limit)
        counts = super().propose(rows, idx_mapping, max_draft_tokens)
        # Whatever stands behind the drafts is no token.
        for row, count in zip(idx_mapping.tolist(), counts.tolist(), strict=True):
            rows.token_ids[row, int(rows.committed_len[row]) + count :] = -1
        return counts


@BOTH_LOOPS
def test_38098_38419_the_drafter_sees_committed_tokens_only(
    tiny_llama: Path, truth: list[list[int]], asynchronous: bool
) -> None:
    """#38098, #38419: with a step in flight the drafter was fed an optimistic length, and the token -1 behind the text;
    an evaluation fell from 0.93 to 0.74."""
    drafter = Watched(truth)
    llm = LLM.with_draft_method(str(tiny_llama), drafter, **options(async_scheduling=asynchronous))
    outputs = generate(llm, PROMPTS)
    assert [p + o.token_ids for p, o in zip(PROMPTS, outputs, strict=True)] == truth
    assert len(drafter.seen) > 50
    for tokens in drafter.seen:
        assert any(text[: len(tokens)] == tokens for text in truth)


@BOTH_LOOPS
def test_13673_no_draft_beyond_max_model_len(tiny_llama: Path, truth: list[list[int]], asynchronous: bool) -> None:
    """#13673: drafts past max_model_len were an illegal memory access."""
    drafter = Watched(truth)
    llm = LLM.with_draft_method(str(tiny_llama), drafter, **options(async_scheduling=asynchronous))
    outputs = generate(llm, PROMPTS)
    assert all(len(p) + len(o.token_ids) == MAX_MODEL_LEN for p, o in zip(PROMPTS, outputs, strict=True))
    assert drafter.max_end == MAX_MODEL_LEN - 1, "the token beside the last draft is the last that fits"


class WatchedForward:
    """Checks the inputs of every forward pass."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_passes = 0
        forward = Decoder.forward

        def checked(decoder: Decoder, batch: ForwardBatch, *args: Any) -> Tensor:
            self.num_passes += 1
            assert bool(((batch.input_ids >= 0) & (batch.input_ids < VOCAB_SIZE)).all()), "no token of the vocabulary"
            assert bool((batch.slot_mapping // BLOCK_SIZE != DUMMY_BLOCK).all()), "a request wrote to the dummy block"
            assert batch.slot_mapping.unique().numel() == batch.slot_mapping.numel(), "two tokens in one slot"
            assert int(batch.positions.max()) < decoder.max_model_len
            return forward(decoder, batch, *args)

        monkeypatch.setattr(Decoder, "forward", checked)


@BOTH_LOOPS
@pytest.mark.parametrize("batched_tokens", [16, 2048])
def test_40768_43434_46899_no_placeholder_reaches_the_embedding(
    tiny_llama: Path,
    truth: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
    asynchronous: bool,
    batched_tokens: int,
) -> None:
    """#40768, #43434, #46899: the placeholder -1 was looked up after a skipped step, a preemption or a reorder.

    Everything behind a row's drafts is -1 here; rows are preempted, finish early, are aborted and change hands.
    """
    watched = WatchedForward(monkeypatch)
    block_bytes = BLOCK_SIZE * 2 * 2 * 2 * 16 * 4  # tokens x k,v x layers x heads x dim
    llm = LLM.with_draft_method(
        str(tiny_llama),
        Watched(truth),
        **options(
            async_scheduling=asynchronous,
            max_num_batched_tokens=batched_tokens,
            kv_cache_memory=(MAX_MODEL_LEN // BLOCK_SIZE + 3) * block_bytes,
        ),
    )
    with llm:
        stream = llm.stream(PROMPTS[2], WARM)
        next(stream)
        # Some end where a block begins: a step behind the end would write to a block that was never reserved.
        params = [WARM.model_copy(update={"max_tokens": limit}) for limit in (14, None, 16, 41, None, 1)]
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
        stream.close()  # type: ignore[attr-defined]
        outputs += llm.generate(PROMPTS, params, use_tqdm=False)
        stats = llm._engine.orchestrator.stats
    assert stats.num_preemptions > 0
    assert watched.num_passes > 50
    for text, prompt, output in zip(truth * 2, PROMPTS * 2, outputs, strict=True):
        got = output.outputs[0].token_ids
        assert prompt + got == text[: len(prompt) + len(got)]


def test_56734_no_request_writes_to_the_dummy_block(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """#56734: warm-up wrote through stale block tables. The block that is for this stays clean of requests, and what is
    in it changes nothing."""
    WatchedForward(monkeypatch)
    llm = LLM(str(tiny_llama), **options())
    with llm:
        before = llm.generate(PROMPTS, WARM, use_tqdm=False)
        kv_cache = llm._engine._executor._runner._kv_cache  # type: ignore[attr-defined]
        assert not kv_cache.storage[:, :, DUMMY_BLOCK].any()
        kv_cache.storage[:, :, DUMMY_BLOCK] = 1e4
        llm._engine.orchestrator.pool.reset_cache()
        after = llm.generate(PROMPTS, WARM, use_tqdm=False)
    assert [o.outputs[0].token_ids for o in before] == [o.outputs[0].token_ids for o in after]


@BOTH_LOOPS
def test_41758_greedy_output_on_a_repetitive_prompt(tiny_llama: Path, asynchronous: bool) -> None:
    """#41758: n-gram drafts changed the greedy output for "serving" x 48."""
    params = SamplingParams(temperature=0, max_tokens=90, ignore_eos=True)
    longer = options(max_model_len=512, async_scheduling=asynchronous)
    prompts = [list(b"serving " * count) for count in (48, 11, 47, 1)]
    expected = generate(LLM(str(tiny_llama), **longer, drafter="none"), prompts, params)
    got = generate(LLM(str(tiny_llama), **longer), prompts, params)
    assert [output.token_ids for output in got] == [output.token_ids for output in expected]
    assert len(got[0].token_ids) == 90
    assert sum(output.num_draft_tokens for output in got) > 0


@BOTH_LOOPS
def test_36138_44993_stop_token_inside_an_accepted_run_cuts_the_rest(
    tiny_llama: Path, truth: list[list[int]], asynchronous: bool
) -> None:
    """#36138, #44993: tokens that were accepted behind a stop token came out."""
    prompt = PROMPTS[3]
    output = truth[3][len(prompt) :]
    stop = next(token for token in output if token != output[0])
    params = WARM.model_copy(update={"stop_token_ids": (stop,), "logprobs": 0})
    drafter = NoisyOracle(truth, 0.0, 1, VOCAB_SIZE)  # never lies, and knows what would have come behind the stop token
    more = options(num_speculative_tokens=16, async_scheduling=asynchronous)
    (got,) = generate(LLM.with_draft_method(str(tiny_llama), drafter, **more), [prompt], params)
    end = output.index(stop)
    assert 1 <= end < 16, "within the first step that has drafts"
    assert got.token_ids == output[: end + 1]
    assert (got.num_draft_tokens, got.num_accepted_tokens) == (16, end)
    assert len(got.logprobs or []) == end + 1
    assert (got.finish_reason, got.stop_reason) == ("stop", stop)


@pytest.mark.parametrize("seed", range(3))
@BOTH_LOOPS
def test_52071_both_loops_give_the_same_output(
    tiny_llama: Path, truth: list[list[int]], asynchronous: bool, seed: int
) -> None:
    """#52071: with speculation one of the two loops gave wrong output. Here under a drafter that claims anything."""
    drafter = RandomDrafts(seed, VOCAB_SIZE)
    llm = LLM.with_draft_method(str(tiny_llama), drafter, **options(async_scheduling=asynchronous))
    outputs = generate(llm, PROMPTS)
    assert [p + o.token_ids for p, o in zip(PROMPTS, outputs, strict=True)] == truth


def test_an_error_of_one_request_does_not_discard_the_batch(tiny_llama: Path, truth: list[list[int]]) -> None:
    """text-generation-inference: an error in one request discarded the whole batch."""
    with LLM(str(tiny_llama), **options()) as llm:
        stream = llm.stream(PROMPTS[1], WARM)
        got = list(next(stream).token_ids)
        with pytest.raises(ValueError, match=r"prompt\[0\] = 5000"):
            llm.generate([PROMPTS[0], [5000]], WARM, use_tqdm=False)
        got += [token for delta in stream for token in delta.token_ids]
    assert PROMPTS[1] + got == truth[1]


def test_what_a_row_held_before_is_never_read(tiny_llama: Path) -> None:
    """Rows are used again and not cleared: whatever an earlier request left behind a row's tokens changes nothing."""
    with LLM(str(tiny_llama), **options(max_num_seqs=1)) as llm:
        first = llm.generate(PROMPTS, WARM, use_tqdm=False)
        rows: RowState = llm._engine._executor._runner._rows  # type: ignore[attr-defined]
        rows.token_ids[:] = torch.full_like(rows.token_ids, -1)
        again = llm.generate(PROMPTS, WARM, use_tqdm=False)
    assert [o.outputs[0].token_ids for o in first] == [o.outputs[0].token_ids for o in again]
