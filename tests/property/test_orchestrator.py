"""The orchestrator against a simulated device: random acceptance, delay, aborts and memory pressure."""

from __future__ import annotations

import pytest

from common.errors import ResourceExhaustedError
from tests.simulated_run import SimulatedRun

SEEDS_PER_CASE = 500
DEFAULT_SEEDS = 2000
PREFILL_BOUNDS = (None, 1, 2, 5)
"""Prompt tokens of a step in which rows decode; each for every fourth seed."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    num_seeds: int = metafunc.config.getoption("--num-seeds") or DEFAULT_SEEDS
    metafunc.parametrize("start", range(0, num_seeds, SEEDS_PER_CASE))


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_every_stream_is_the_sequential_one(start: int, depth: int) -> None:
    preemptions = stale = hits = bounded = 0
    for seed in range(start, start + SEEDS_PER_CASE):
        run = SimulatedRun(seed, depth, PREFILL_BOUNDS[seed % len(PREFILL_BOUNDS)])
        try:
            run.execute()
            run.check()
        except (AssertionError, KeyError, IndexError, ResourceExhaustedError) as error:
            raise AssertionError(f"seed {seed}, depth {depth}: {error!r}") from error
        preemptions += run.orchestrator.stats.num_preemptions
        stale += run.orchestrator.stats.num_stale_outcomes
        hits += run.orchestrator.stats.num_prefix_hits
        bounded += run.num_bounded
    # The schedules must really have caused what they are for.
    assert preemptions > 0
    assert hits > 0
    assert bounded > 0
    assert depth == 1 or stale > 0
