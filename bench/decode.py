"""`python -m bench decode`: decode speed on a GPU, against the floor measured in the same run.

Random weights of known shapes, prompts of repeated random segments, and drafts that are accepted by chance at given
rates, so that only shapes matter. A time per output token is that of a row while every row of the batch decodes: from
the step in which the last row got its first token to the first one that ends.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import asdict, dataclass, field

import torch
from rich.console import Console
from rich.table import Table

from bench.floors import kv_bytes_per_token, measure_copy_bandwidth, measure_gemm_floor
from bench.random_engine import make_engine, repetitive_request
from bench.random_model import SHAPES, make_random_model
from bench.records import Sample, make_record, write_record
from common.types import Request
from model_executor.models.registry import LoadedModel
from verifier_svc.engine.engine import Engine

PROMPT_LEN = 1024
TOKENS_A_STEP = 8192


@dataclass(frozen=True, slots=True)
class DecodeResult:
    """One batch size, with or without speculation. Times in milliseconds."""

    shape: str
    batch: int
    num_draft: int
    ms_per_token: float
    """Over all runs."""
    ms_per_token_of_runs: Sample
    step_ms_p50: float
    step_ms_p99: float
    tokens_per_step: float
    """Of a row: measured."""
    prefill_tokens_per_s: float
    """Prompts of the whole batch, from the start to the last row's first token, in the best run."""
    floor_ms_per_token: float
    gemm_floor_ms: float
    kv_floor_ms: float
    num_eager_steps: int
    num_replays: int

    @property
    def of_floor(self) -> float:
        return self.ms_per_token / self.floor_ms_per_token


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shapes", default="8b,1b", help="of 8b, 1b; default: %(default)s")
    parser.add_argument("--batches", default="1,16,64", help="default: %(default)s")
    parser.add_argument("--num-speculative-tokens", type=int, default=3, metavar="K", help="default: %(default)s")
    parser.add_argument("--forced-acceptance", default=".8,.6,.4", help="rate per draft position; default: %(default)s")
    parser.add_argument("--new-tokens", type=int, default=512, help="default: %(default)s")
    parser.add_argument("--runs", type=int, default=5, help="each with other prompts; default: %(default)s")


def run(args: argparse.Namespace) -> int:
    console = Console()
    if not torch.cuda.is_available():
        console.print("decode: needs a CUDA device")
        return 2
    rates = [float(rate) for rate in args.forced_acceptance.split(",")]
    device = torch.device("cuda")
    bandwidth = measure_copy_bandwidth(device)
    results: list[DecodeResult] = []
    for shape in args.shapes.split(","):
        loaded = make_random_model(SHAPES[shape], PROMPT_LEN + args.new_tokens, device)
        for batch in map(int, args.batches.split(",")):
            for num_draft in (0, args.num_speculative_tokens):
                workload = Workload(shape, batch, num_draft, args.new_tokens, args.runs)
                result = measure(workload, loaded, rates, bandwidth)
                console.print(f"{shape} batch {batch} K={num_draft}: {result.ms_per_token:.3f} ms a token")
                results.append(result)
        del loaded
        torch.cuda.empty_cache()
    console.print(_table(results, bandwidth))
    config = {"prompt_len": PROMPT_LEN, "new_tokens": args.new_tokens, "forced_acceptance": rates, "dtype": "bfloat16"}
    record = make_record("decode", config, {"copy_bytes_per_s": bandwidth, "rows": [asdict(r) for r in results]}, [])
    console.print(f"record: {write_record(record, args.output)}")
    return 0


@dataclass(frozen=True, slots=True)
class Workload:
    """What is decoded."""

    shape: str
    batch: int
    num_draft: int
    new_tokens: int
    num_runs: int


def measure(workload: Workload, loaded: LoadedModel, rates: list[float], bandwidth: float) -> DecodeResult:
    """Decode a batch of requests of one prompt length to their end, several times."""
    shape, batch, num_draft, new_tokens = workload.shape, workload.batch, workload.num_draft, workload.new_tokens
    vocab_size = loaded.config.vocab_size
    # Prompts come first, however many rows decode by then: the last row must start before the first one ends.
    engine = make_engine(shape, loaded, num_draft, rates, max_num_seqs=batch, max_prefill_beside_decode=TOKENS_A_STEP)
    runs: list[DecodeRun] = []
    try:
        for start in range(0, workload.num_runs * batch, batch):
            seeds = range(start, start + batch)
            requests = [
                repetitive_request(f"r{seed}", PROMPT_LEN, new_tokens, vocab_size, num_draft, seed) for seed in seeds
            ]
            runs.append(drive(engine, requests))
        stats = engine.executor.stats  # type: ignore[attr-defined]
        num_replays, num_eager = sum(stats.num_replays.values()), stats.num_eager_steps
    finally:
        engine.close()
    steps = sorted(step for run in runs for step in run.step_ms)
    tokens_per_step = sum(run.num_tokens for run in runs) / batch / len(steps)
    expected = 1 + sum(rates[:num_draft]) if num_draft else 1.0
    gemm_ms = measure_gemm_floor(loaded, batch * (num_draft + 1))
    kv_bytes = batch * (PROMPT_LEN + new_tokens / 2) * kv_bytes_per_token(loaded)
    kv_ms = kv_bytes / bandwidth * 1e3
    return DecodeResult(
        shape=shape,
        batch=batch,
        num_draft=num_draft,
        ms_per_token=sum(steps) / len(steps) / tokens_per_step,
        ms_per_token_of_runs=Sample.of([sum(run.step_ms) / run.num_tokens * batch for run in runs]),
        step_ms_p50=statistics.median(steps),
        step_ms_p99=steps[int(len(steps) * 0.99)],
        tokens_per_step=tokens_per_step,
        prefill_tokens_per_s=batch * PROMPT_LEN / min(run.prefill_s for run in runs),
        floor_ms_per_token=(gemm_ms + kv_ms) / expected,
        gemm_floor_ms=gemm_ms,
        kv_floor_ms=kv_ms,
        num_eager_steps=num_eager,
        num_replays=num_replays,
    )


@dataclass(slots=True)
class DecodeRun:
    """What one batch did."""

    prefill_s: float = 0.0
    step_ms: list[float] = field(default_factory=list[float])
    """Steps while every row decoded."""
    num_tokens: int = 0
    """Committed in those steps, by all rows."""


def drive(engine: Engine, requests: list[Request]) -> DecodeRun:
    """Serve all requests to their end."""
    for request in requests:
        engine.add(request)
    run = DecodeRun()
    started: set[str] = set()
    start = before = time.perf_counter()
    while engine.has_work:
        all_decoded = len(started) == len(requests)
        events = engine.step()
        now = time.perf_counter()
        if all_decoded and engine.orchestrator.num_running == len(requests):
            run.step_ms.append((now - before) * 1e3)
            run.num_tokens += sum(len(event.tokens) for event in events)
        started.update(event.request_id for event in events if event.tokens)
        if not run.prefill_s and len(started) == len(requests):
            run.prefill_s = now - start
        before = now
    return run


def _table(results: list[DecodeResult], bandwidth: float) -> Table:
    table = Table(title=f"decode, copy bandwidth {bandwidth / 1e12:.2f} TB/s")
    columns = (
        "shape",
        "batch",
        "K",
        "ms/token",
        "floor",
        "of floor",
        "step p50",
        "step p99",
        "tokens/step",
        "prefill/s",
    )
    for column in columns:
        table.add_column(column, justify="right")
    for r in results:
        cells = [r.shape, r.batch, r.num_draft, f"{r.ms_per_token:.3f}", f"{r.floor_ms_per_token:.3f}"]
        cells += [f"{r.of_floor:.2f}", f"{r.step_ms_p50:.3f}", f"{r.step_ms_p99:.3f}"]
        cells += [f"{r.tokens_per_step:.2f}", f"{r.prefill_tokens_per_s:.0f}"]
        table.add_row(*map(str, cells))
    return table
