"""Drafts that a device chooses for itself, whatever befalls drafters and network: streams, counts and waits."""

from __future__ import annotations

import logging

import pytest

from tests.device_draft_simulation import DeviceDraftSimulation, LongDeviceSimulation
from tests.draft_simulation import DEADLINE_S, WEATHERS, Weather
from tests.fake_transport import Faults
from verifier_svc.drafts.drafter_link import HANG_S

DEFAULT_SEEDS = 220


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "num_seeds" in metafunc.fixturenames:
        total: int = metafunc.config.getoption("--num-seeds") or DEFAULT_SEEDS
        metafunc.parametrize("num_seeds", [-(-total // len(WEATHERS))])


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    """Thousands of refused streams are what these tests are about."""
    caplog.set_level(logging.CRITICAL)


@pytest.mark.parametrize("weather", WEATHERS)
def test_every_stream_is_the_one_without_drafts(weather: str, num_seeds: int) -> None:
    num_used = num_fallbacks = num_drafted = num_accepted = 0
    for seed in range(num_seeds):
        run = DeviceDraftSimulation(seed, WEATHERS[weather])
        try:
            run.execute()
            run.check()
        except Exception as error:
            raise AssertionError(f"seed {seed}, weather {weather}: {error!r}") from error
        num_used += run.drafts.stats.num_branches_used
        num_fallbacks += run.drafts.stats.num_fallbacks
        num_drafted += sum(drafter.num_draft_tokens for drafter in run.drafts.stats.drafters)
        num_accepted += sum(drafter.num_accepted_tokens for drafter in run.drafts.stats.drafters)
    assert num_accepted > 0
    if weather == "calm":
        # Left out are rows without a drafter, and the first steps of a row, which are handed over before it is opened.
        assert num_used > 0.8 * (num_used + num_fallbacks)
        assert num_accepted > 0.95 * num_drafted


@pytest.mark.parametrize("seed", range(3))
def test_a_drafter_that_is_quick_enough_fills_every_step(seed: int) -> None:
    """The answer to step N - 1 comes while step N runs, and its branches are long enough for step N + 1."""
    run = LongDeviceSimulation(seed)
    run.execute()
    run.check()
    stats = run.drafts.stats
    assert stats.num_branches_used > 0.95 * (stats.num_branches_used + stats.num_fallbacks)


@pytest.mark.parametrize("seed", range(3))
def test_a_drafter_that_hangs_for_good_costs_100_ms_and_then_nothing(seed: int) -> None:
    run = LongDeviceSimulation(seed)
    run.network.after(0.5, lambda: run.drafters[0].hang(1e9))
    run.execute()
    run.check()
    (stats,) = run.drafts.stats.drafters
    assert stats.is_hung
    assert stats.num_hangs == 1
    assert 0.5 * HANG_S <= run.waited_s(run.start_s + 0.5) <= HANG_S + DEADLINE_S
    assert run.waited_s(run.start_s + 2.0) == 0


@pytest.mark.parametrize("seed", range(3))
def test_a_drafter_that_dies_for_good_costs_no_more_waits(seed: int) -> None:
    run = LongDeviceSimulation(seed)
    run.network.after(0.5, run.drafters[0].crash)
    used: list[int] = []
    run.network.after(0.6, lambda: used.append(run.drafts.stats.num_branches_used))
    run.execute()
    run.check()
    assert run.waited_s(run.start_s + 0.6) == 0
    # Steps that were in flight may still have used branches that landed before.
    assert run.drafts.stats.num_branches_used <= used[0] + 3 * run.max_num_seqs


@pytest.mark.parametrize("seed", range(3))
def test_drafts_that_are_always_late_are_not_waited_for(seed: int) -> None:
    run = LongDeviceSimulation(seed, Weather(Faults(delay_s=(0.03, 0.03))))  # there and back as long as three steps
    run.execute()
    run.check()
    (stats,) = run.drafts.stats.drafters
    assert stats.num_late_replies > 50
    assert run.waited_s() <= HANG_S + DEADLINE_S + 1e-6


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_drafter_that_is_always_wrong_gets_a_second_chance_and_no_third(seed: int) -> None:
    """With two steps in flight none of its branches lives until a step could draft from it; that is seen, too."""
    run = LongDeviceSimulation(seed, Weather(lie=1.0))
    run.execute()
    run.check()
    (stats,) = run.drafts.stats.drafters
    assert stats.is_distrusted
    assert stats.num_rows == 0
    assert stats.num_resyncs > 0
    assert stats.num_accepted_tokens <= 0.02 * stats.num_draft_tokens
    assert stats.num_drafts < 1200, "twice 256 drafts, and those in flight"
    assert (stats.num_drafts < 100) == (run.depth > 1)


@pytest.mark.parametrize("seed", [1, 4])
def test_a_drafter_that_is_right_half_the_time_is_kept(seed: int) -> None:
    run = LongDeviceSimulation(seed, Weather(lie=0.5))
    run.execute()
    run.check()
    (stats,) = run.drafts.stats.drafters
    assert run.depth == 2
    assert stats.num_resyncs == 0
    assert stats.num_accepted_tokens > 0.2 * stats.num_draft_tokens
