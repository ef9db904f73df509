"""`python -m bench prefill`: prompts on a GPU. How fast many are read, and what one long one does to running rows.

Throughput: 64 prompts of 1024 random tokens at once, one output token each, against the matrix products of the same
steps alone. Inter-token latency: 16 rows decode, then a prompt of 4096 tokens arrives; steps are shared, and the limit
of tokens a step decides between the latency of the rows and that of the prompt.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from bench.beside_prefill import Arrival, measure_arrivals
from bench.floors import measure_gemm_floor
from bench.random_engine import make_engine, random_request, repetitive_request
from bench.random_model import SHAPES, make_random_model
from bench.records import Sample, make_record, write_record
from common.types import Request
from model_executor.models.registry import LoadedModel
from verifier_svc.engine.engine import Engine

NUM_PROMPTS, PROMPT_LEN = 64, 1024
TOKENS_A_STEP = 8192
NUM_RUNNING, LONG_PROMPT_LEN = 16, 4096
STEPS_BETWEEN = 64
MAX_MODEL_LEN = 8192


@dataclass(frozen=True, slots=True)
class Throughput:
    """All prompts at once."""

    shape: str
    seconds: Sample
    floor_s: float
    """The matrix products of the steps alone: no attention, nothing else between them."""

    @property
    def tokens_per_s(self) -> float:
        return NUM_PROMPTS * PROMPT_LEN / self.seconds.median

    @property
    def of_floor(self) -> float:
        """Time, as a multiple of the floor's."""
        return self.seconds.median / self.floor_s


@dataclass(frozen=True, slots=True)
class Beside:
    """Rows that decode while a long prompt arrives. Times in milliseconds; ratios are to the median before it."""

    shape: str
    num_draft: int
    max_num_batched_tokens: int
    itl_ms_before: Sample
    itl_ms_during: Sample
    itl_ms_max: Sample
    """The longest interval of an arrival."""
    median_ratio: Sample
    max_ratio: Sample
    ttft_ms: Sample
    num_steps: Sample
    """From the arrival to the first token."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shapes", default="8b,1b", help="of 8b, 1b; default: %(default)s")
    parser.add_argument("--runs", type=int, default=7, help="runs and arrivals, one more to warm up; %(default)s")
    parser.add_argument("--batched-tokens", default="512,2048", help="limits beside running rows; default: %(default)s")
    parser.add_argument("--num-speculative-tokens", type=int, default=3, metavar="K", help="default: %(default)s")
    parser.add_argument("--forced-acceptance", default=".8,.6,.4", help="rate per draft position; default: %(default)s")
    parser.add_argument("--only", choices=("throughput", "beside"), help="one part; default: both")


def run(args: argparse.Namespace) -> int:
    console = Console()
    if not torch.cuda.is_available():
        console.print("prefill: needs a CUDA device")
        return 2
    rates = [float(rate) for rate in args.forced_acceptance.split(",")]
    throughputs: list[Throughput] = []
    besides: list[Beside] = []
    for shape in args.shapes.split(","):
        loaded = make_random_model(SHAPES[shape], MAX_MODEL_LEN, torch.device("cuda"))
        if args.only != "beside":
            throughputs.append(_measure_throughput(shape, loaded, args.runs))
            console.print(f"{shape}: {throughputs[-1].tokens_per_s:.0f} tokens/s")
        if args.only != "throughput":
            for limit in map(int, args.batched_tokens.split(",")):
                for num_draft in (0, args.num_speculative_tokens):
                    besides.append(_measure_beside(shape, loaded, num_draft, limit, rates, args.runs))
                    console.print(f"{shape} K={num_draft}, {limit} tokens a step: {besides[-1].max_ratio.median:.1f} x")
        del loaded
        torch.cuda.empty_cache()
    for table in _tables(throughputs, besides):
        console.print(table)
    config: dict[str, Any] = {
        "throughput": {"num_prompts": NUM_PROMPTS, "prompt_len": PROMPT_LEN, "max_num_batched_tokens": TOKENS_A_STEP},
        "beside": {"num_running": NUM_RUNNING, "prompt_len": LONG_PROMPT_LEN, "context": PROMPT_LEN},
        "forced_acceptance": rates,
        "dtype": "bfloat16",
    }
    results = {
        "throughput": [asdict(r) | {"tokens_per_s": r.tokens_per_s} for r in throughputs],
        "beside": [asdict(r) for r in besides],
    }
    console.print(f"record: {write_record(make_record('prefill', config, results, []), args.output)}")
    return 0


def read_prompts(engine: Engine, requests: Sequence[Request], clock: Callable[[], float] = time.perf_counter) -> float:
    """Serve `requests` to their end; returns the seconds from the first call to the last token."""
    start = clock()
    for request in requests:
        engine.add(request)
    missing = {request.request_id for request in requests}
    while missing:
        missing -= {event.request_id for event in engine.step() if event.finish_reason is not None}
    seconds = clock() - start
    engine.drain()
    return seconds


def _measure_throughput(shape: str, loaded: LoadedModel, num_runs: int) -> Throughput:
    engine = make_engine(shape, loaded, 0, max_num_seqs=NUM_PROMPTS, max_num_batched_tokens=TOKENS_A_STEP)
    seconds: list[float] = []
    try:
        for index in range(num_runs + 1):
            requests = [
                random_request(f"{index}-{i}", PROMPT_LEN, 1, loaded.config.vocab_size, seed=index * NUM_PROMPTS + i)
                for i in range(NUM_PROMPTS)
            ]
            took_s = read_prompts(engine, requests)
            if index:  # the first compiles
                seconds.append(took_s)
    finally:
        engine.close()
    num_steps = NUM_PROMPTS * PROMPT_LEN // TOKENS_A_STEP
    floor_s = num_steps * measure_gemm_floor(loaded, TOKENS_A_STEP, NUM_PROMPTS // num_steps) / 1e3
    return Throughput(shape, Sample.of(seconds), floor_s)


def _measure_beside(
    shape: str, loaded: LoadedModel, num_draft: int, limit: int, rates: list[float], num_runs: int
) -> Beside:
    vocab_size = loaded.config.vocab_size
    engine = make_engine(shape, loaded, num_draft, rates, max_num_seqs=NUM_RUNNING + 1, max_num_batched_tokens=limit)
    new_tokens = MAX_MODEL_LEN - PROMPT_LEN
    running = [
        repetitive_request(f"r{index}", PROMPT_LEN, new_tokens, vocab_size, num_draft, seed=index)
        for index in range(NUM_RUNNING)
    ]
    prompts = [
        random_request(f"p{index}", LONG_PROMPT_LEN, 1, vocab_size, seed=1000 + index) for index in range(num_runs + 1)
    ]
    try:
        arrivals = measure_arrivals(engine, running, prompts, STEPS_BETWEEN)
    finally:
        engine.close()
    return summarize(shape, num_draft, limit, arrivals)


def summarize(shape: str, num_draft: int, limit: int, arrivals: Sequence[Arrival]) -> Beside:
    """Medians over arrivals; the intervals of all of them are one sample."""
    return Beside(
        shape,
        num_draft,
        limit,
        Sample.of([1e3 * interval for arrival in arrivals for interval in arrival.before_s]),
        Sample.of([1e3 * interval for arrival in arrivals for interval in arrival.during_s]),
        Sample.of([1e3 * max(arrival.during_s) for arrival in arrivals]),
        Sample.of([arrival.median_ratio for arrival in arrivals]),
        Sample.of([arrival.max_ratio for arrival in arrivals]),
        Sample.of([1e3 * arrival.ttft_s for arrival in arrivals]),
        Sample.of([arrival.num_steps for arrival in arrivals]),
    )


def _tables(throughputs: list[Throughput], besides: list[Beside]) -> list[Table]:
    tables: list[Table] = []
    if throughputs:
        table = Table(title=f"{NUM_PROMPTS} prompts of {PROMPT_LEN} tokens")
        for column in ("shape", "tokens/s", "with p99", "floor", "of floor"):
            table.add_column(column, justify="right")
        num_tokens = NUM_PROMPTS * PROMPT_LEN
        for r in throughputs:
            cells = [f"{num_tokens / value:.0f}" for value in (r.seconds.median, r.seconds.p99, r.floor_s)]
            table.add_row(r.shape, *cells, f"{r.of_floor:.2f}")
        tables.append(table)
    if besides:
        table = Table(title=f"{NUM_RUNNING} rows decode, {LONG_PROMPT_LEN} tokens arrive (ITL in ms)")
        columns = ("shape", "K", "tokens a step", "before", "during", "longest", "ratio", "longest", "TTFT", "steps")
        for column in columns:
            table.add_column(column, justify="right")
        for r in besides:
            cells = [f"{s.median:.2f}" for s in (r.itl_ms_before, r.itl_ms_during, r.itl_ms_max)]
            cells += [f"{s.median:.1f}" for s in (r.median_ratio, r.max_ratio, r.ttft_ms)]
            table.add_row(r.shape, str(r.num_draft), str(r.max_num_batched_tokens), *cells, f"{r.num_steps.median:.0f}")
        tables.append(table)
    return tables
