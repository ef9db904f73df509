"""`python -m bench trace`: what the GPU and the host do in a decode step, batch 16.

Three parts. Steps: thousands without a profiler, for their evenness and the host's share. Timeline: hundreds under
torch.profiler, for the idle time between kernels; the profiler makes gaps longer, so the time of a step without it
stands beside. Loops: the same prompts with one step in flight and with two.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch.profiler import ProfilerActivity, profile

from bench.decode import PROMPT_LEN, drive
from bench.random_engine import make_engine, repetitive_request
from bench.random_model import SHAPES, make_random_model
from bench.records import Check, Sample, make_record, write_record
from bench.step_times import HostTime, StepTimer, ratios_to_local_median
from bench.timeline import Idle, KernelTime, measure_idle, read_trace, top_kernels, whole_steps
from common.types import Request
from model_executor.models.registry import LoadedModel
from verifier_svc.engine.engine import Engine

MAX_IDLE_PERCENT = 1.0
MAX_HOST_PERCENT = 25.0
MAX_UNEVENNESS = 1.05
_WARM_STEPS = 50
_SKIPPED_STEPS = 10  # at both ends of a trace


@dataclass(frozen=True, slots=True)
class StepResult:
    """Steps without a profiler. Times in milliseconds."""

    shape: str
    num_draft: int
    step_ms: Sample
    p99_to_local_median: float
    host_share: float
    host_us_per_step: dict[str, float]
    num_eager_steps: int
    """Of the measured ones; a step that is a graph is none."""


@dataclass(frozen=True, slots=True)
class TimelineResult:
    """Steps under the profiler."""

    shape: str
    num_draft: int
    idle: Idle
    plain_step_us: float
    """Median of as many steps at the same context, without the profiler."""
    top: list[KernelTime]

    @property
    def plain_idle_share(self) -> float:
        """What the kernels leave of the time that a step takes without the profiler."""
        return 1 - self.idle.busy_us_per_step / self.plain_step_us


@dataclass(frozen=True, slots=True)
class LoopResult:
    """Two steps in flight against one: tokens a second while every row decodes."""

    shape: str
    async_tokens_per_s: Sample
    sync_tokens_per_s: Sample
    ratio: Sample


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shapes", default="8b,1b", help="of 8b, 1b; default: %(default)s")
    parser.add_argument("--batch", type=int, default=16, help="default: %(default)s")
    parser.add_argument("--num-speculative-tokens", type=int, default=3, metavar="K", help="default: %(default)s")
    parser.add_argument("--forced-acceptance", default=".8,.6,.4", help="rate per draft position; default: %(default)s")
    parser.add_argument("--steps", type=int, default=2000, help="without the profiler; default: %(default)s")
    parser.add_argument("--traced-steps", type=int, default=200, help="under the profiler; default: %(default)s")
    parser.add_argument("--runs", type=int, default=5, help="of each loop, one more to warm up; default: %(default)s")
    parser.add_argument("--new-tokens", type=int, default=512, help="of a run of the loops; default: %(default)s")
    parser.add_argument("--keep-traces", type=Path, metavar="DIR", help="write the profiler's traces there")


def run(args: argparse.Namespace) -> int:
    """Measure, print, write a record. Exit status 1 if a bound is missed."""
    console = Console()
    if not torch.cuda.is_available():
        console.print("trace: needs a CUDA device")
        return 2
    bench = _Bench(args, [float(rate) for rate in args.forced_acceptance.split(",")])
    shapes = args.shapes.split(",")
    steps: list[StepResult] = []
    loops: list[LoopResult] = []
    timelines: list[TimelineResult] = []
    # The profiler comes last: what it leaves behind in the driver would be in the times of a step.
    for shape in shapes:
        with bench.model(shape) as loaded:
            steps += [bench.measure_steps(shape, loaded, num_draft) for num_draft in bench.draft_counts]
            loops.append(bench.measure_loops(shape, loaded))
    for shape in shapes:
        with bench.model(shape) as loaded:
            timelines += [bench.measure_timeline(shape, loaded, num_draft) for num_draft in bench.draft_counts]
    for table in _tables(steps, timelines, loops):
        console.print(table)
    checks = make_checks(steps, timelines)
    for check in checks:
        console.print(str(check), highlight=False)
    results = {
        "steps": [asdict(r) for r in steps],
        "timelines": [asdict(r) | {"plain_idle_share": r.plain_idle_share} for r in timelines],
        "loops": [asdict(r) for r in loops],
    }
    config = {"batch": args.batch, "prompt_len": PROMPT_LEN, "forced_acceptance": bench.rates, "dtype": "bfloat16"}
    console.print(f"record: {write_record(make_record('trace', config, results, checks), args.output)}")
    return 0 if all(check.holds for check in checks) else 1


def make_checks(steps: Sequence[StepResult], timelines: Sequence[TimelineResult]) -> list[Check]:
    """In percent where it is a share."""
    bounds: list[tuple[str, float, float]] = []
    for r in timelines:
        name = f"{r.shape} K={r.num_draft}"
        bounds.append(
            (f"{name}: % of the time that the GPU is idle between steps", 100 * r.idle.between_share, MAX_IDLE_PERCENT)
        )
    for r in steps:
        name = f"{r.shape} K={r.num_draft}"
        bounds.append((f"{name}: % of a step on the host", 100 * r.host_share, MAX_HOST_PERCENT))
        bounds.append((f"{name}: step p99 / p50 around it", r.p99_to_local_median, MAX_UNEVENNESS))
    return [Check(name, value, bound, at_least=False) for name, value, bound in bounds]


def fill(engine: Engine, requests: Sequence[Request], num_warm_steps: int) -> None:
    """Add requests, and step until all of them decode, and some steps more."""
    for request in requests:
        engine.add(request)
    waiting = {request.request_id for request in requests}
    while waiting:
        waiting -= {event.request_id for event in engine.step() if event.tokens}
    for _ in range(num_warm_steps):
        engine.step()


def time_steps(timer: StepTimer, num_steps: int, num_rows: int) -> HostTime:
    """Steps of an engine that `fill` has prepared.

    Raises:
        RuntimeError: a row ended, or had no place in a step.
    """
    with timer.installed():
        for _ in range(num_steps):
            events = timer.step()
            if len(events) != num_rows or any(event.finish_reason is not None for event in events):
                raise RuntimeError(f"a step brought {len(events)} events: expected {num_rows} rows that go on")
    return timer.time


class _Bench:
    """The three parts, for any model."""

    def __init__(self, args: argparse.Namespace, rates: list[float]) -> None:
        self._args = args
        self.rates = rates
        self.draft_counts = (0, args.num_speculative_tokens)
        self.plain_step_us: dict[tuple[str, int], float] = {}
        """Median of the first steps of `measure_steps`, by shape and K."""
        tokens_a_step = 1 + sum(rates[: args.num_speculative_tokens])
        num_steps = args.steps + _WARM_STEPS + 2 * _SKIPPED_STEPS
        # Room for an acceptance that is by chance above what was asked for.
        self._new_tokens = max(int(1.1 * tokens_a_step * num_steps), args.new_tokens)

    @contextmanager
    def model(self, shape: str) -> Iterator[LoadedModel]:
        yield make_random_model(SHAPES[shape], PROMPT_LEN + self._new_tokens, torch.device("cuda"))
        torch.cuda.empty_cache()

    def measure_steps(self, shape: str, loaded: LoadedModel, num_draft: int) -> StepResult:
        with self._decoding(shape, loaded, num_draft) as engine:
            stats = engine._executor.stats  # type: ignore[attr-defined]
            num_eager = stats.num_eager_steps
            timer = StepTimer(engine)
            host_time = time_steps(timer, self._args.steps, self._args.batch)
            num_eager = stats.num_eager_steps - num_eager
        if host_time.wait_s == 0:
            raise RuntimeError("the executor waits by something else than Event.synchronize: host time is unknown")
        times = host_time.step_s
        self.plain_step_us[shape, num_draft] = 1e6 * statistics.median(times[: self._args.traced_steps])
        return StepResult(
            shape,
            num_draft,
            Sample.of([1e3 * value for value in times]),
            Sample.of(ratios_to_local_median(times)).p99,
            host_time.host_share,
            host_time.us_per_step(),
            num_eager,
        )

    def measure_timeline(self, shape: str, loaded: LoadedModel, num_draft: int) -> TimelineResult:
        with self._decoding(shape, loaded, num_draft) as engine, tempfile.TemporaryDirectory() as directory:
            with profile(activities=[ProfilerActivity.CUDA]) as profiler:
                for _ in range(self._args.traced_steps + 2 * _SKIPPED_STEPS):
                    engine.step()
            path = (self._args.keep_traces or Path(directory)) / f"{shape}-k{num_draft}.json"
            path.parent.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(str(path))
            intervals = whole_steps(read_trace(path), _SKIPPED_STEPS, _SKIPPED_STEPS)
        idle = measure_idle(intervals)
        plain_step_us = self.plain_step_us[shape, num_draft]
        return TimelineResult(shape, num_draft, idle, plain_step_us, top_kernels(intervals, idle.num_steps, 12))

    def measure_loops(self, shape: str, loaded: LoadedModel) -> LoopResult:
        num_draft = self._args.num_speculative_tokens
        engines = {
            is_async: make_engine(
                shape, loaded, num_draft, self.rates, max_num_seqs=self._args.batch, async_scheduling=is_async
            )
            for is_async in (True, False)
        }
        found: dict[bool, list[float]] = {True: [], False: []}
        try:
            for index in range(self._args.runs + 1):
                for is_async, engine in engines.items():
                    result = drive(engine, self._requests(loaded, num_draft, self._args.new_tokens))
                    if index:  # the first one compiles
                        found[is_async].append(result.num_tokens / (sum(result.step_ms) / 1e3))
        finally:
            for engine in engines.values():
                engine.close()
        ratios = [fast / slow for fast, slow in zip(found[True], found[False], strict=True)]
        return LoopResult(shape, Sample.of(found[True]), Sample.of(found[False]), Sample.of(ratios))

    @contextmanager
    def _decoding(self, shape: str, loaded: LoadedModel, num_draft: int) -> Iterator[Engine]:
        """An engine whose rows all decode."""
        engine = make_engine(shape, loaded, num_draft, self.rates, max_num_seqs=self._args.batch)
        try:
            fill(engine, self._requests(loaded, num_draft, self._new_tokens), _WARM_STEPS)
            yield engine
        finally:
            engine.close()

    def _requests(self, loaded: LoadedModel, num_draft: int, new_tokens: int) -> list[Request]:
        vocab_size = loaded.config.vocab_size
        return [
            repetitive_request(f"r{index}", PROMPT_LEN, new_tokens, vocab_size, num_draft, seed=index)
            for index in range(self._args.batch)
        ]


def _tables(
    steps: Sequence[StepResult], timelines: Sequence[TimelineResult], loops: Sequence[LoopResult]
) -> Iterator[Table]:
    table = Table(title="steps without a profiler")
    for column in ("shape", "K", "p50 ms", "p99 ms", "p99 / local p50", "host", "host us a step", "eager"):
        table.add_column(column, justify="right")
    for r in steps:
        parts = ", ".join(f"{name} {value:.0f}" for name, value in r.host_us_per_step.items())
        cells = [f"{r.step_ms.median:.3f}", f"{r.step_ms.p99:.3f}", f"{r.p99_to_local_median:.3f}"]
        table.add_row(r.shape, str(r.num_draft), *cells, f"{r.host_share:.1%}", parts, str(r.num_eager_steps))
    yield table
    table = Table(title="timeline under the profiler")
    for column in ("shape", "K", "steps", "us a step", "without profiler", "busy us", "idle", "between", "inside"):
        table.add_column(column, justify="right")
    for r in timelines:
        idle = r.idle
        cells = [f"{idle.us_per_step:.0f}", f"{r.plain_step_us:.0f}", f"{idle.busy_us_per_step:.0f}"]
        cells += [f"{share:.2%}" for share in (idle.share, idle.between_share, idle.inside_share)]
        table.add_row(r.shape, str(r.num_draft), str(idle.num_steps), *cells)
    yield table
    for r in timelines:
        table = Table(title=f"{r.shape}, K={r.num_draft}: kernels")
        for column in ("us a step", "runs a step", "share", "kernel"):
            table.add_column(column, justify="left" if column == "kernel" else "right")
        for kernel in r.top:
            cells = [f"{kernel.us_per_step:.1f}", f"{kernel.per_step:.1f}", f"{kernel.share:.1%}"]
            table.add_row(*cells, kernel.name[:70])
        yield table
    table = Table(title="two steps in flight against one, n-gram drafts")
    for column in ("shape", "async tokens/s", "sync tokens/s", "ratio"):
        table.add_column(column, justify="right")
    for r in loops:
        cells = [f"{r.async_tokens_per_s.median:.0f}", f"{r.sync_tokens_per_s.median:.0f}", f"{r.ratio.median:.3f}"]
        table.add_row(r.shape, *cells)
    yield table
