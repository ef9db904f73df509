"""`outrider drafter`: drafts for any number of verifiers."""

from __future__ import annotations

import argparse
import asyncio
import os

from common.logging import get_logger
from common.options import add_options, log_options, resolve_options
from drafter_svc.config import DrafterConfig
from outrider.ready_line import print_ready


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_options(parser, DrafterConfig)


def run(args: argparse.Namespace) -> int:
    """Serve until SIGTERM or Ctrl-C. Prints one line when ready. Returns 0, or 1 if the draft worker died."""
    from drafter_svc.server import serve_drafter

    logger = get_logger(__name__)
    config = resolve_options(DrafterConfig, args, os.environ, logger)
    log_options(logger, config)

    def announce(address: str) -> None:
        print_ready("drafter", f"grpc://{address}")

    return asyncio.run(serve_drafter(config, args.log_level, announce, _run_worker))


def _run_worker(*args: object) -> None:
    """In the worker's process, which alone imports torch."""
    from drafter_svc.worker import run_worker

    run_worker(*args)  # type: ignore[arg-type]
