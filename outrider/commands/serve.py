"""`outrider serve`: OpenAI's interface over HTTP, with a verifier behind it that drafts by itself."""

from __future__ import annotations

import argparse
import asyncio
import os

from common.logging import get_logger
from common.options import add_options, log_options, resolve_options
from outrider.ready_line import print_ready
from outrider.serve_config import EXCLUDED, ServeConfig


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_options(parser, ServeConfig, positional=("model",), exclude=EXCLUDED)


def run(args: argparse.Namespace) -> int:
    """Serve until SIGTERM or Ctrl-C. Prints one line when ready. Returns 0."""
    from outrider.serve import serve

    logger = get_logger(__name__)
    config = resolve_options(ServeConfig, args, os.environ, logger)
    log_options(logger, config)

    def announce(url: str) -> None:
        print_ready("serve", url)

    return asyncio.run(serve(config, args.log_level, announce))
