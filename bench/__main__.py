"""`python -m bench NAME`: measures, prints a short table, writes one JSON record under bench/results."""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path

_BENCHES = {
    "cpu": "the demo target on this CPU: against transformers, with and without speculation; host time of a step",
    "decode": "decode on a GPU with random weights: off and with n-gram drafts, against the floor",
    "divergence": "where bfloat16 outputs on a GPU differ with and without drafts, against the rounding measured there",
    "exchange": "the draft exchange over gRPC on loopback: round trip, codec, landing and matching",
    "kernels": "each GPU kernel alone at the sizes of real steps: time, share of the copy bandwidth, FLOP/s",
    "prefill": "prompts on a GPU with random weights: tokens/s against the floor, and the ITL of rows beside them",
    "serving": "a verifier under Poisson arrivals: latencies, goodput, acceptance; and what its front costs the engine",
    "trace": "a decode step on a GPU: idle time between kernels, host time, evenness; two steps in flight against one",
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench", description="Outrider's benchmarks.")
    subparsers = parser.add_subparsers(dest="name", required=True, metavar="NAME")
    modules = {name: importlib.import_module(f"bench.{name}") for name in _BENCHES}
    for name, summary in _BENCHES.items():
        sub = subparsers.add_parser(name, help=summary, description=summary)
        modules[name].add_arguments(sub)
        default = Path(__file__).parent / "results"
        sub.add_argument("--output", type=Path, default=default, help="directory of the JSON record")
    args = parser.parse_args()
    return modules[args.name].run(args)


if __name__ == "__main__":
    sys.exit(main())
