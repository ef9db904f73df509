"""The `outrider` command."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib.metadata import version

from common.errors import OutriderError
from common.logging import configure_logging


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand; returns the exit status. An error of ours is one line on standard error, with status 2."""
    args = build_parser().parse_args(argv)
    configure_logging(args.log_level)
    try:
        return args.run(args)
    except OutriderError as error:
        print(f"outrider: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="outrider", description="Speculative decoding for large language models, as services."
    )
    parser.add_argument("--version", action="version", version=f"outrider {version('outrider')}")
    parser.add_argument(
        "--log-level", default="warning", choices=("debug", "info", "warning", "error"), help="default: %(default)s"
    )
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    summary = "watch a small model write code with speculation, then compare it with speculation off"
    demo = commands.add_parser("demo", help=summary, description=summary.capitalize() + ".")
    _add_demo_arguments(demo)
    return parser


def _add_demo_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", metavar="DIR", help="model directory; default: the demo model of the repository")
    parser.add_argument("--prompt", help="what the model continues; default: a few of ours")
    parser.add_argument("--num-speculative-tokens", type=int, default=3, metavar="K", help="default: %(default)s")
    parser.add_argument("--max-tokens", type=int, default=192, help="per prompt; default: %(default)s")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy; default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="of the noise, above temperature 0; default: %(default)s")
    parser.set_defaults(run=_run_demo)


def _run_demo(args: argparse.Namespace) -> int:
    from outrider.demo import run_demo  # late: it imports torch, and `--help` should not wait for that

    return run_demo(args)
