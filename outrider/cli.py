"""The `outrider` command."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version

from common.errors import OutriderError
from common.logging import configure_logging
from common.options import OptionParser

_COMMANDS = {
    "verifier": "serve a model over gRPC",
    "drafter": "draft for verifiers over gRPC",
    "serve": "serve a model over HTTP, as OpenAI does",
    "client": "send a prompt to a verifier, and watch the text come",
    "top": "watch verifiers: load, speed, acceptance, drafters",
    "demo": "watch a small model write code with speculation, then compare it with speculation off",
}

_SERVICES = ("verifier", "drafter")
"""Commands that log what they do unless told otherwise."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status. An error of ours is one line on standard error, with status 2."""
    args = build_parser().parse_args(argv)
    command = importlib.import_module(f"outrider.commands.{args.command}")
    args.log_level = args.log_level or ("info" if args.command in _SERVICES else "warning")
    configure_logging(args.log_level)
    try:
        return command.run(args)
    except OutriderError as error:
        print(f"outrider: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def build_parser() -> argparse.ArgumentParser:
    """Each command is a module of `outrider.commands` with `add_arguments(parser)` and `run(args) -> status`."""
    parser = OptionParser(prog="outrider", description="Speculative decoding for large language models, as services.")
    parser.add_argument("--version", action="version", version=f"outrider {package_version()}")
    parser.add_argument(
        "--log-level",
        choices=("debug", "info", "warning", "error"),
        help="default: info for services, warning for other commands",
    )
    commands = parser.add_subparsers(title="commands", dest="command", required=True, metavar="COMMAND")
    for name, summary in _COMMANDS.items():
        command = commands.add_parser(name, help=summary, description=f"{summary.capitalize()}.")
        importlib.import_module(f"outrider.commands.{name}").add_arguments(command)
    return parser


def package_version() -> str:
    """Of this package."""
    try:
        return version("outrider")
    except PackageNotFoundError:  # run from a folder, not installed
        return "unknown"
