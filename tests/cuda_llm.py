"""An `LLM` on a GPU, for tests: small enough to start in seconds, and every run begins with an empty cache."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from common.sampling_params import SamplingParams
from outrider.llm import LLM
from outrider.outputs import Logprob, RequestOutput
from tests.identity_workload import MAX_MODEL_LEN, MIXED, PROMPTS, visible
from tests.soak import with_few_blocks

# Weights narrow enough that outputs repeat themselves: half of the drafts are accepted.
MODEL_OPTIONS: dict[str, Any] = {"head_dim": 32, "initializer_range": 0.08}
# Two sizes of mixed steps to capture, and prompts that do not fit one step.
OPTIONS: dict[str, Any] = {
    "device": "cuda",
    "dtype": "float32",
    "gpu_memory_utilization": 0.1,
    "max_model_len": MAX_MODEL_LEN,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 128,
}
FEW_BLOCKS = MAX_MODEL_LEN // 16 + 2
"""One request of the longest kind, the dummy block, and one more."""

PLAIN = [SamplingParams(temperature=0.8 * (i % 2), seed=i, max_tokens=44, ignore_eos=True) for i in range(len(PROMPTS))]
WORKLOADS = {"plain": PLAIN, "mixed": MIXED}


def cuda_llm(model: Path, **options: Any) -> LLM:
    return LLM(str(model), **(OPTIONS | options))


class CudaRuns:
    """Several runs on one engine, none of which finds anything that another one has left in the KV cache.

    Args:
        llm: idle; closed by whoever made it.
    """

    def __init__(self, llm: LLM) -> None:
        self.llm = llm
        self._engine = llm._engine  # the one that knows of all blocks

    def generate(
        self, params: Sequence[SamplingParams], prompts: Sequence[list[int]] = PROMPTS, num_blocks: int | None = None
    ) -> list[RequestOutput]:
        """Generate, and check that everything comes back.

        Args:
            params: one for each prompt.
            prompts: token ids.
            num_blocks: of the KV cache, the dummy included; None: all.
        """
        self.empty_cache(num_blocks)
        outputs = self.llm.generate(list(prompts), list(params), use_tqdm=False)
        check_returned(self.llm)
        return outputs

    def empty_cache(self, num_blocks: int | None = None) -> None:
        num_blocks = num_blocks or self._engine.orchestrator.pool.num_blocks
        self.llm._engine = with_few_blocks(self._engine, self.llm.config, num_blocks)

    @property
    def num_preemptions(self) -> int:
        """Of the last run."""
        return self.llm._engine.orchestrator.stats.num_preemptions


def check_returned(llm: LLM) -> None:
    """No request, row or block is left behind."""
    orchestrator = llm._engine.orchestrator
    assert orchestrator.num_running == orchestrator.num_waiting == orchestrator.num_in_flight == 0
    assert orchestrator.pool.num_free == orchestrator.pool.num_blocks - 1, "blocks were lost"


def step_counts(llm: LLM) -> tuple[dict[tuple[int, ...], int], int]:
    """Replays of each graph, by (requests, draft tokens, tokens), and steps without one; since the start."""
    stats = llm._engine.executor.stats  # type: ignore[attr-defined]
    num_replays: Counter[tuple[int, ...]] = Counter()
    for shape, count in stats.num_replays.items():
        num_replays[shape.num_reqs, shape.num_draft, shape.num_input_tokens] += count
    return dict(num_replays), stats.num_eager_steps


def num_accepted(outputs: Sequence[RequestOutput]) -> int:
    return sum(output.num_accepted_tokens for output in outputs)


def check_same(outputs: Sequence[RequestOutput], expected: Sequence[RequestOutput]) -> None:
    """Tokens, text and listed tokens are equal, log probabilities within 1e-4.

    The rank of a token may move by one where two logits are equal but for rounding: at one position in a hundred.
    """
    assert visible(outputs) == visible(expected)
    found, wanted = list(_logprobs(outputs)), list(_logprobs(expected))
    assert [list(entry) for entry in found] == [list(entry) for entry in wanted]
    num_moved = 0
    for entry, other in zip(found, wanted, strict=True):
        for token, value in entry.items():
            assert abs(value.logprob - other[token].logprob) < 1e-4
            rank, other_rank = value.rank, other[token].rank
            assert rank is not None
            assert other_rank is not None
            distance = abs(rank - other_rank)
            assert distance <= 1
            num_moved += distance
    assert num_moved <= len(found) // 100


def _logprobs(outputs: Sequence[RequestOutput]) -> Iterator[dict[int, Logprob]]:
    """Of prompts and outputs, at every position that has some."""
    for output in outputs:
        yield from (entry for entry in output.prompt_logprobs or [] if entry is not None)
        for completion in output.outputs:
            yield from completion.logprobs or []


def stream_with_aborts(llm: LLM, kept: Sequence[SamplingParams], aborted: Sequence[SamplingParams]) -> list[list[int]]:
    """Tokens of requests that run to their end while others come and are aborted, some in the middle.

    Args:
        llm: idle.
        kept: of prompts 0, 1, ...; n = 1.
        aborted: of the prompts after these; n = 1. Each is aborted when it has made 0, 5, 10, ... tokens or more.
    """
    prompts = iter(PROMPTS * 2)
    streams = [llm.stream(next(prompts), params) for params in kept]
    doomed = {5 * index: llm.stream(next(prompts), params) for index, params in enumerate(aborted)}
    received: list[list[int]] = [[] for _ in kept]
    num_received = dict.fromkeys(doomed, 0)
    is_open = [True] * len(kept)
    while any(is_open) or doomed:
        for index, stream in enumerate(streams):
            delta = next(stream, None)
            if delta is None:
                is_open[index] = False
            else:
                received[index] += delta.token_ids
        for limit, stream in list(doomed.items()):
            delta = next(stream, None)
            num_received[limit] += 0 if delta is None else len(delta.token_ids)
            if delta is None or num_received[limit] >= limit:
                stream.close()  # type: ignore[attr-defined]
                del doomed[limit]
    check_returned(llm)
    return received
