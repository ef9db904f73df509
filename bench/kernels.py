"""`python -m bench kernels`: time of each kernel alone at the sizes of real steps, against bandwidth or as FLOP/s.

Each case is a CUDA graph of many launches, one after the other. Weights, KV and texts change from launch to launch, so
that none is found in the L2 where a step would not find it; what the kernel before would have just written is not.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict, dataclass

import torch
from rich.console import Console
from rich.table import Table

from bench.floors import measure_copy_bandwidth
from bench.kernel_case import DEFAULT_SIZES, Case, Shape
from bench.random_model import SHAPES
from bench.records import make_record, write_record
from bench.timing import graph_ms

LAUNCHES = 16
"""Of a graph at least, so that its own launch does not show."""


@dataclass(frozen=True, slots=True)
class KernelResult:
    """One launch of one case."""

    kernel: str
    size: str
    us: float
    num_bytes: int
    num_flops: int

    @property
    def bytes_per_s(self) -> float:
        return self.num_bytes / self.us * 1e6

    @property
    def flops_per_s(self) -> float:
        return self.num_flops / self.us * 1e6


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shapes", default="8b,1b", help="of 8b, 1b; default: %(default)s")
    parser.add_argument("--only", default="", metavar="KERNELS", help="names with commas between; default: all")


def run(args: argparse.Namespace) -> int:
    console = Console()
    if not torch.cuda.is_available():
        console.print("kernels: needs a CUDA device")
        return 2
    from bench.kernel_cases import kernel_cases  # kernels need Triton, which a CPU does without

    device = torch.device("cuda")
    bandwidth = measure_copy_bandwidth(device)
    shapes = [Shape(name, SHAPES[name]) for name in args.shapes.split(",")]
    wanted = set(filter(None, args.only.split(",")))
    results: list[KernelResult] = []
    for case in kernel_cases(shapes, DEFAULT_SIZES):
        if wanted and case.kernel not in wanted:
            continue
        result = measure(case, device)
        console.print(
            f"{result.us:9.1f} us  {_rate(result, bandwidth):>12}  {case.kernel}: {case.size}", highlight=False
        )
        results.append(result)
    console.print(_table(results, bandwidth))
    config = {"dtype": "bfloat16", "sizes": asdict(DEFAULT_SIZES), "launches": LAUNCHES}
    rows = [asdict(result) for result in results]
    record = make_record("kernels", config, {"copy_bytes_per_s": bandwidth, "rows": rows}, [])
    console.print(f"record: {write_record(record, args.output)}")
    return 0


def measure(case: Case, device: torch.device) -> KernelResult:
    """Median time of a launch of the case."""
    work = case.make(device)
    rounds = -(-LAUNCHES // len(work.launches))

    def launch_all() -> None:
        for _ in range(rounds):
            for launch in work.launches:
                launch()

    us = graph_ms(launch_all, replays=3) * 1e3 / (rounds * len(work.launches))
    return KernelResult(case.kernel, case.size, us, work.num_bytes, work.num_flops)


def _rate(result: KernelResult, bandwidth: float) -> str:
    if result.num_flops:
        return f"{result.flops_per_s / 1e12:.0f} TFLOP/s"
    return f"{result.bytes_per_s / bandwidth:.0%} of copy"


def _table(results: list[KernelResult], bandwidth: float) -> Table:
    table = Table(title=f"kernels, copy bandwidth {bandwidth / 1e12:.2f} TB/s")
    table.add_column("kernel")
    table.add_column("size")
    for column in ("us", "MB", "rate"):
        table.add_column(column, justify="right")
    for r in results:
        table.add_row(r.kernel, r.size, f"{r.us:.1f}", f"{r.num_bytes / 1e6:.1f}", _rate(r, bandwidth))
    return table
