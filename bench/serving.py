"""`python -m bench serving`: a verifier under requests that come at random times, and what its front costs the engine.

The load is an open loop: requests are sent at the times of a Poisson process, whether or not the verifier keeps up.
Prompts, lengths, seeds and times follow from `--seed` alone, so a run can be repeated exactly.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.load_client import Finished, Sent, finish, send_all, tokens_fingerprint
from bench.overhead import measure_overhead
from bench.records import Check, Sample, make_record, write_record
from bench.service import RunningVerifier, running_verifier
from bench.workload import WorkloadShape, draw_workload, fingerprint, load_heldout
from common.types import DraftStats

REPOSITORY = Path(__file__).parent.parent
MIN_STEP_RATE_RATIO = 0.95
MAX_ENGINE_CPU_RATIO = 1.05


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default=str(REPOSITORY / "models" / "demo-target"), help="model directory")
    parser.add_argument("--address", help="HOST:PORT of a verifier that runs; without it one is started")
    parser.add_argument("--part", choices=("all", "load", "overhead"), default="all", help="what to measure")
    parser.add_argument("--drafter", default="ngram", help="of the verifier that is started")
    parser.add_argument("--rate", type=float, default=4.0, help="requests a second on average")
    parser.add_argument("--requests", type=int, default=64, help="of one run")
    parser.add_argument("--runs", type=int, default=5, help="of the load, all alike; alternating runs of the overhead")
    parser.add_argument("--prompt-tokens", type=int, nargs=2, default=(64, 256), metavar=("MIN", "MAX"))
    parser.add_argument("--new-tokens", type=int, nargs=2, default=(32, 128), metavar=("MIN", "MAX"))
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--timeout", type=float, default=120.0, help="of a request, seconds")
    parser.add_argument("--slo-ttft-ms", type=float, default=500.0, help="a good request has its first token by then")
    parser.add_argument("--slo-tpot-ms", type=float, default=50.0, help="and takes at most this for each further one")
    parser.add_argument("--slo-e2e-ms", type=float, help="and ends by then; default: no bound")
    parser.add_argument("--threads", type=int, nargs="+", default=(1,), help="of the forward pass")


def run(args: argparse.Namespace) -> int:
    """Measure, print tables, write a record. Exit status 1 if a bound is missed or a request failed."""
    console = Console()
    texts = load_heldout(args.model)
    results: dict[str, Any] = {}
    checks: list[Check] = []
    if args.part in ("all", "load"):
        results["load"] = _run_load(args, texts, console)
        checks.append(Check("requests that failed", results["load"]["num_failed"], 0, at_least=False))
    if args.part in ("all", "overhead") and args.address is None:
        results["overhead"] = [_run_overhead(args, texts, threads, console) for threads in args.threads]
        for entry in results["overhead"]:
            name = f"step rate through the front / offline, {entry['num_threads']} torch thread(s)"
            checks.append(Check(name, entry["step_rate_ratio"]["median"], MIN_STEP_RATE_RATIO, at_least=True))
            # Of the engine's process alone: it holds on a busy machine too.
            name = f"engine CPU a step, of offline, {entry['num_threads']} torch thread(s)"
            checks.append(
                Check(name, entry["engine_cpu_per_step_ratio"]["median"], MAX_ENGINE_CPU_RATIO, at_least=False)
            )
    for check in checks:
        console.print(str(check))
    config = {key: value for key, value in vars(args).items() if key not in ("name", "output")}
    config["model"] = Path(args.model).name  # where it lies is of no use to a reader
    console.print(f"record: {write_record(make_record('serving', config, results, checks), args.output)}")
    return 0 if all(check.holds for check in checks) else 1


# -- load --------------------------------------------------------------------------------------------------------------


def _run_load(args: argparse.Namespace, texts: list[list[int]], console: Console) -> dict[str, Any]:
    shape = WorkloadShape(
        num_requests=args.requests,
        rate=args.rate,
        min_prompt_tokens=args.prompt_tokens[0],
        max_prompt_tokens=args.prompt_tokens[1],
        min_new_tokens=args.new_tokens[0],
        max_new_tokens=args.new_tokens[1],
        temperature=args.temperature,
        seed=args.seed,
    )
    planned = draw_workload(shape, texts)
    # Without a prefix cache every run does the same work.
    flags = ["--drafter", args.drafter, "--num-threads", str(args.threads[0]), "--no-enable-prefix-caching"]
    service = nullcontext(None) if args.address is not None else running_verifier(args.model, flags)
    runs: list[dict[str, Any]] = []
    with service as verifier:
        address = args.address or _address(verifier)
        for number in range(args.runs):
            run_id = f"load-{args.seed}-{time.time_ns()}-{number}"
            start = time.perf_counter()
            sent = asyncio.run(send_all(address, planned, args.timeout, run_id))
            runs.append(_summary(sent, time.perf_counter() - start, args))
    result = {
        "workload": asdict(shape) | {"fingerprint": fingerprint(planned)},
        "slo_ms": {"ttft": args.slo_ttft_ms, "tpot": args.slo_tpot_ms, "e2e": args.slo_e2e_ms},
        "num_failed": sum(entry["num_failed"] for entry in runs),
        "same_tokens_in_all_runs": len({entry["tokens_fingerprint"] for entry in runs}) == 1,
        "runs": runs,
    }
    _print_load(result, console)
    return result


def _address(verifier: RunningVerifier | None) -> str:
    assert verifier is not None
    return verifier.address


def _summary(sent: list[Sent], elapsed_s: float, args: argparse.Namespace) -> dict[str, Any]:
    finished = [finish(entry) for entry in sent]
    outputs = [output for output in finished if output is not None]
    drafts = DraftStats()
    for output in outputs:
        drafts.merge(output.draft_stats)
    good = sum(_is_good(output, args) for output in outputs)
    latencies: dict[str, list[float]] = {
        "ttft_ms": [output.ttft_s for output in outputs],
        "itl_ms": [gap for output in outputs for gap in output.itl_s],
        "tpot_ms": [output.tpot_s for output in outputs if output.tpot_s is not None],
        "e2e_ms": [output.e2e_s for output in outputs],
    }
    return {
        "num_finished": len(outputs),
        "num_failed": len(sent) - len(outputs),
        "errors": sorted({entry.error for entry in sent if entry.error is not None}),
        "seconds": elapsed_s,
        "tokens_per_s": sum(len(output.token_ids) for output in outputs) / elapsed_s,
        "goodput_requests_per_s": good / elapsed_s,
        "good_share": good / len(sent),
        "client_late_ms_max": 1e3 * max(entry.sent_s - entry.planned.at_s for entry in sent),
        "acceptance": asdict(drafts) | {"length": drafts.acceptance_length, "rate": drafts.acceptance_rate},
        "tokens_fingerprint": tokens_fingerprint(finished),
    } | {
        name: {"p50": sample.median * 1e3, "p99": sample.p99 * 1e3, "count": sample.num_runs}
        for name, values in latencies.items()
        if values
        for sample in (Sample.of(values),)
    }


def _is_good(output: Finished, args: argparse.Namespace) -> bool:
    if output.ttft_s * 1e3 > args.slo_ttft_ms:
        return False
    if output.tpot_s is not None and output.tpot_s * 1e3 > args.slo_tpot_ms:
        return False
    return args.slo_e2e_ms is None or output.e2e_s * 1e3 <= args.slo_e2e_ms


def _print_load(result: dict[str, Any], console: Console) -> None:
    shape = result["workload"]
    title = f"{shape['num_requests']} requests at {shape['rate']:g}/s, workload {shape['fingerprint']}"
    table = Table(title=title)
    percentiles = [f"{name} p50/p99" for name in ("TTFT", "ITL", "TPOT", "E2E")]
    for column in ("run", *percentiles, "tokens/s", "good/s", "length"):
        table.add_column(column, justify="right")
    for number, entry in enumerate(result["runs"], start=1):
        cells = [f"{entry[name]['p50']:.0f}/{entry[name]['p99']:.0f}" if name in entry else "-" for name in
                 ("ttft_ms", "itl_ms", "tpot_ms", "e2e_ms")]  # fmt: skip
        table.add_row(
            str(number),
            *cells,
            f"{entry['tokens_per_s']:.0f}",
            f"{entry['goodput_requests_per_s']:.2f}",
            f"{entry['acceptance']['length']:.2f}",
        )
    console.print(table)
    same = "the same" if result["same_tokens_in_all_runs"] else "NOT the same"
    console.print(f"times in ms; tokens of all runs: {same}; failed: {result['num_failed']}")


# -- overhead ----------------------------------------------------------------------------------------------------------


def _run_overhead(args: argparse.Namespace, texts: list[list[int]], threads: int, console: Console) -> dict[str, Any]:
    result = measure_overhead(
        args.model,
        texts,
        num_runs=args.runs,
        new_tokens=args.new_tokens[1],
        num_threads=threads,
        drafter=args.drafter,
    )
    table = Table(title=f"{result['num_streams']} streams, {threads} torch thread(s), {args.drafter}")
    for column in ("", "offline", "through the front"):
        table.add_column(column, justify="left" if not column else "right")
    offline, front = result["offline_steps_per_s"], result["front_steps_per_s"]
    table.add_row("steps/s, median", f"{offline['median']:.1f}", f"{front['median']:.1f}")
    others = [result[f"{side}_other_cpu_share"]["median"] for side in ("offline", "front")]
    table.add_row("cores taken by other programs", *(f"{share:.2f}" for share in others))
    for name, key in (
        ("step rate, of offline", "step_rate_ratio"),
        ("engine CPU a step, of offline", "engine_cpu_per_step_ratio"),
        ("front CPU a message, us", "front_cpu_us_per_message"),
        ("client CPU a message, us", "client_cpu_us_per_message"),
    ):
        table.add_row(name, "", f"{result[key]['median']:.3g}")
    table.add_row("same tokens", "", "yes" if result["same_tokens"] else "no")
    console.print(table)
    return result
