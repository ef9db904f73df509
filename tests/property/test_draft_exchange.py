"""Whatever befalls drafters and network, the committed streams are those of a run without drafts. In virtual time."""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import fields

import pytest

from tests.draft_simulation import DEADLINE_S, WEATHERS, DraftSimulation, LongSimulation, Weather
from tests.fake_transport import Faults
from verifier_svc.drafts.drafter_link import HANG_S, DrafterStats

DEFAULT_SEEDS = 440
SEEDS_PER_CASE = 500

# What each kind of schedule must really have caused, for all its seeds together.
CAUSED = {
    "calm": (),
    "liar": (),
    "slow": ("num_deadline_misses", "num_late_replies", "num_stale_branches", "num_hangs"),
    "lossy": ("num_faults", "num_row_errors", "num_resyncs", "num_deadline_misses"),
    "disorder": ("num_faults", "num_row_errors", "num_resyncs", "num_repeated_frames"),
    "damage": ("num_faults", "num_row_errors", "num_invalid_branches", "num_stale_branches"),
    "garbage": ("num_faults", "num_downs", "num_malformed_frames", "num_malformed_replies"),
    "breaks": ("num_faults", "num_downs", "num_resyncs", "num_rows_moved"),
    "crashes": ("num_downs", "num_resyncs"),
    "hangs": ("num_hangs", "num_deadline_misses"),
    "storm": ("num_faults", "num_downs", "num_row_errors", "num_deadline_misses", "num_malformed_frames"),
}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "seeds" in metafunc.fixturenames:
        num_seeds: int = metafunc.config.getoption("--num-seeds") or DEFAULT_SEEDS
        per_weather = -(-num_seeds // len(WEATHERS))
        starts = range(0, per_weather, SEEDS_PER_CASE)
        metafunc.parametrize("seeds", [range(s, min(s + SEEDS_PER_CASE, per_weather)) for s in starts], ids=str)


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    """Thousands of refused streams are what these tests are about."""
    caplog.set_level(logging.CRITICAL)


@pytest.mark.parametrize("weather", WEATHERS)
def test_every_stream_is_the_one_without_drafts(weather: str, seeds: range) -> None:
    counts: Counter[str] = Counter()
    for seed in seeds:
        run = DraftSimulation(seed, WEATHERS[weather])
        try:
            run.execute()
            run.check()
        except Exception as error:
            raise AssertionError(f"seed {seed}, weather {weather}: {error!r}") from error
        _add_counts(counts, run)
    assert counts["num_accepted_tokens"] > 0
    for name in CAUSED[weather] if len(seeds) >= 40 else ():
        assert counts[name] > 0, f"no schedule has caused {name}"
    if weather == "calm":
        # Drafts that are right come in time and are accepted, but for what an end cuts off and rows without a drafter.
        assert counts["num_accepted_tokens"] > 0.95 * counts["num_draft_tokens"]
        assert counts["num_branches_used"] > 0.9 * (counts["num_branches_used"] + counts["num_fallbacks"])


def _add_counts(counts: Counter[str], run: DraftSimulation) -> None:
    stats = run.drafts.stats
    counts.update({name: getattr(stats, name) for name in ("num_branches_used", "num_fallbacks", "num_rows_moved")})
    names = [field.name for field in fields(DrafterStats) if field.name.startswith("num_")]
    for drafter in stats.drafters:
        counts.update({name: getattr(drafter, name) for name in names})
    for transport in run.transports:
        counts["num_faults"] += transport.num_faults
        counts["num_malformed_replies"] += transport.num_malformed_frames
    for peer in run.drafters:
        counts["num_malformed_frames"] += peer.num_malformed_frames
        counts["num_repeated_frames"] += peer.num_repeated_frames


@pytest.mark.parametrize("seed", range(2))
def test_a_drafter_that_hangs_for_good_costs_100_ms_and_then_nothing(seed: int) -> None:
    run = LongSimulation(seed)
    run.network.after(0.5, lambda: run.drafters[0].hang(1e9))
    run.execute()
    run.check()
    (stats,) = run.drafts.stats.drafters
    assert stats.is_hung
    assert stats.num_hangs == 1
    assert 0.5 * HANG_S <= run.waited_s(run.start_s + 0.5) <= HANG_S + DEADLINE_S
    assert run.waited_s(run.start_s + 2.0) == 0


@pytest.mark.parametrize("seed", range(2))
def test_drafts_resume_after_a_hang(seed: int) -> None:
    run = LongSimulation(seed)
    run.network.after(0.2, lambda: run.drafters[0].hang(1.5))
    used: list[int] = []
    run.network.after(1.6, lambda: used.append(run.drafts.stats.num_branches_used))
    run.execute()
    run.check()
    (stats,) = run.drafts.stats.drafters
    assert not stats.is_hung
    assert stats.num_hangs == 1
    assert run.drafts.stats.num_branches_used > used[0] + 50
    assert run.waited_s(run.start_s + 0.2) <= 2 * (HANG_S + DEADLINE_S)


@pytest.mark.parametrize("seed", range(2))
def test_drafts_that_are_always_late_are_used_and_not_waited_for(seed: int) -> None:
    run = LongSimulation(seed, Weather(Faults(delay_s=(0.03, 0.03))))  # there and back as long as three steps
    run.execute()
    run.check()
    (stats,) = run.drafts.stats.drafters
    assert stats.num_late_replies > 50
    assert run.waited_s() <= HANG_S + DEADLINE_S + 1e-6
    assert run.drafts.stats.num_branches_used > run.drafts.stats.num_fallbacks


@pytest.mark.parametrize("seed", range(2))
def test_rows_of_a_drafter_that_dies_move_to_the_other(seed: int) -> None:
    class TwoDrafters(LongSimulation):
        NUM_DRAFTERS = (2,)

    run = TwoDrafters(seed)
    run.network.after(0.5, run.drafters[0].crash)
    used: list[int] = []
    run.network.after(0.6, lambda: used.append(run.drafts.stats.num_branches_used))
    run.execute()
    run.check()
    assert run.drafts.stats.num_branches_used > used[0] + 50
    assert run.drafts.stats.drafters[0].num_downs == 1
    assert run.drafts.stats.drafters[1].num_downs == 0


def test_a_drafter_that_is_always_wrong_gets_a_second_chance_and_no_third() -> None:
    run = LongSimulation(7, Weather(lie=1.0))
    run.execute()
    run.check()
    (stats,) = run.drafts.stats.drafters
    assert stats.is_distrusted
    assert stats.num_rows == 0
    assert stats.num_resyncs > 0
    assert stats.num_accepted_tokens < 0.02 * stats.num_draft_tokens
    assert stats.num_drafts < 1200, "twice 256 drafts, and those in flight"


def test_a_schedule_is_the_same_each_time() -> None:
    runs = [DraftSimulation(5, WEATHERS["storm"]) for _ in range(2)]
    for run in runs:
        run.execute()
    assert runs[0].network.now == runs[1].network.now
    assert runs[0].drafts.stats.num_branches_used == runs[1].drafts.stats.num_branches_used
