"""The engine on a GPU in float32: the same output however it is run, and from graphs where there are graphs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from common.sampling_params import SamplingParams
from outrider.outputs import RequestOutput
from tests.cuda_llm import FEW_BLOCKS, WORKLOADS, CudaRuns, check_same, cuda_llm, num_accepted, step_counts

pytestmark = pytest.mark.gpu

RUNS: dict[str, dict[str, Any]] = {
    "off": {"drafter": "none"},
    "off sync": {"drafter": "none", "async_scheduling": False},
    "off no graphs": {"drafter": "none", "cuda_graphs": "none"},
    **{f"K={k}": {"num_speculative_tokens": k} for k in range(1, 6)},
    "K=2 sync": {"num_speculative_tokens": 2, "async_scheduling": False},
    "K=3 no graphs": {"cuda_graphs": "none"},
    "K=3 piecewise": {"cuda_graphs": "piecewise"},
    "K=3 piecewise sync": {"cuda_graphs": "piecewise", "async_scheduling": False},
    "chunks of 16": {"max_num_batched_tokens": 16, "num_speculative_tokens": 2},
    "chunks of 16 sync": {"max_num_batched_tokens": 16, "num_speculative_tokens": 5, "async_scheduling": False},
    "16 tokens of prompts beside decode": {"max_prefill_beside_decode": 16},
    "five rows": {"max_num_seqs": 5},
    "no prefix cache": {"enable_prefix_caching": False},
}


@dataclass(frozen=True, slots=True)
class Way:
    """One way to run, and its engine."""

    options: dict[str, Any]
    runs: CudaRuns

    @property
    def num_draft(self) -> int:
        return 0 if self.options.get("drafter") == "none" else self.runs.llm.config.num_speculative_tokens


@pytest.fixture(scope="module", params=RUNS)
def way(request: pytest.FixtureRequest, tiny_cuda_llama: Path) -> Iterator[Way]:
    """One engine at a time: the tests of each come one after the other."""
    options = RUNS[request.param]
    with cuda_llm(tiny_cuda_llama, **options) as llm:
        yield Way(options, CudaRuns(llm))


@pytest.mark.parametrize("num_blocks", [None, FEW_BLOCKS], ids=["", "preempted"])
@pytest.mark.parametrize("workload", WORKLOADS)
def test_every_way_to_run_gives_the_same_output(
    way: Way, references: dict[str, list[RequestOutput]], workload: str, num_blocks: int | None
) -> None:
    outputs = way.runs.generate(WORKLOADS[workload], num_blocks=num_blocks)
    check_same(outputs, references[workload])
    assert (way.runs.num_preemptions > 0) == (num_blocks is not None)
    assert (num_accepted(outputs) > 20) == (way.num_draft > 0), "without accepted drafts this test means nothing"


def test_steps_are_replays_of_the_graph_of_their_size(way: Way) -> None:
    """Graphs that are captured and never used would show in the counters alone."""
    llm, num_draft = way.runs.llm, way.num_draft
    max_num_seqs = llm.config.max_num_seqs
    for num_reqs in (1, 2, 3, max_num_seqs):
        params = [SamplingParams(temperature=0.8, seed=i, max_tokens=24, ignore_eos=True) for i in range(num_reqs)]
        replays_before, eager_before = step_counts(llm)
        way.runs.generate(params, [[5 + i] * 2 for i in range(num_reqs)])
        replays_after, eager_after = step_counts(llm)
        num_replays = {key: count - replays_before[key] for key, count in replays_after.items()}
        num_eager = eager_after - eager_before
        if llm.config.cuda_graphs == "none":
            assert num_replays == {}
            assert num_eager >= 24 // (num_draft + 1)
            continue
        size = min(size for size, _, _ in num_replays if size >= num_reqs)
        decode = size, num_draft, size * (num_draft + 1)
        assert num_replays[decode] >= 24 // (num_draft + 1) - 2
        assert any(count > 0 for (_, _, num_tokens), count in num_replays.items() if num_tokens % 64 == 0), (
            "the prompts"
        )
        other_sizes = {key for key in num_replays if key[0] not in (size, max_num_seqs)}
        smaller = {key for key in other_sizes if key[0] < size}  # requests end one after the other
        assert all(num_replays[key] == 0 for key in other_sizes - smaller)
        assert num_eager == 0
