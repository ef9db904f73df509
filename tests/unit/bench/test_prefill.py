"""`python -m bench prefill`: what it counts."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from bench.beside_prefill import measure_arrivals
from bench.prefill import read_prompts, summarize
from bench.random_engine import random_request, repetitive_request
from verifier_svc.engine.engine import Engine

NUM_RUNNING = 3


class TickingClock:
    """A second later at every look."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


@pytest.mark.parametrize("num_draft", [0, 3])
@pytest.mark.parametrize("async_scheduling", [False, True])
def test_intervals_of_running_rows_while_a_prompt_is_read(
    build_engine: Callable[..., Engine], num_draft: int, async_scheduling: bool
) -> None:
    limit = 32
    engine = build_engine(
        num_draft, max_num_seqs=NUM_RUNNING + 1, max_num_batched_tokens=limit, async_scheduling=async_scheduling
    )
    running = [repetitive_request(f"r{i}", 20, 400, 256, num_draft, seed=i) for i in range(NUM_RUNNING)]
    prompts = [random_request(f"p{i}", 100, 1, 256, seed=i) for i in range(4)]
    arrivals = measure_arrivals(engine, running, prompts, 5, TickingClock())
    assert len(arrivals) == 3  # the first one warmed up
    num_tokens_beside = limit - NUM_RUNNING * (num_draft + 1)
    for arrival in arrivals:
        # Each running row gets tokens in every step, also in those that the prompt shares.
        assert len(arrival.before_s) == 5 * NUM_RUNNING
        assert len(arrival.during_s) == arrival.num_steps * NUM_RUNNING
        # With two steps in flight, one was planned before the prompt came.
        assert arrival.num_steps == math.ceil(100 / num_tokens_beside) + async_scheduling
        assert set(arrival.during_s[NUM_RUNNING:]) == {1.0}, "one look at the clock a step"
    assert not engine.has_work
    found = summarize("tiny", num_draft, limit, arrivals)
    assert found.itl_ms_before.median == found.itl_ms_during.median == 1000.0
    assert found.itl_ms_before.num_runs == 3 * 5 * NUM_RUNNING


def test_a_running_request_that_ends_is_an_error(build_engine: Callable[..., Engine]) -> None:
    engine = build_engine(0, max_num_seqs=2)
    with pytest.raises(RuntimeError, match="r0 ended"):
        measure_arrivals(engine, [random_request("r0", 20, 8, 256, 0)], [random_request("p", 10, 1, 256, 1)], 5)


def test_every_prompt_is_read_and_gives_one_token(build_engine: Callable[..., Engine]) -> None:
    engine = build_engine(0, max_num_seqs=4, max_num_batched_tokens=64)
    seconds = read_prompts(engine, [random_request(f"p{i}", 40, 1, 256, i) for i in range(9)], TickingClock())
    assert seconds == 1.0
    assert engine.orchestrator.pool.num_free == engine.orchestrator.pool.num_blocks - 1
    assert not engine.has_work
    assert engine.orchestrator.stats.num_prefix_hits == 0
