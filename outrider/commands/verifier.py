"""`outrider verifier`: serves a model over gRPC (vllm.grpc.engine.VllmEngine), in a front and an engine process."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys

from common.logging import get_logger
from common.options import add_options, log_options, resolve_options
from outrider.ready_line import print_ready
from verifier_svc.front.config import VerifierConfig

ENGINE_COMMAND = (sys.executable, "-m", "outrider.engine_main")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_options(parser, VerifierConfig, positional=("model",))


def run(args: argparse.Namespace) -> int:
    """Serve until SIGTERM. Returns 0 after a drain, 1 if the engine is lost."""
    from outrider.cli import package_version
    from verifier_svc.front.server import FrontOptions, serve

    logger = get_logger(__name__)
    config = resolve_options(VerifierConfig, args, os.environ, logger)
    log_options(logger, config)
    options = FrontOptions(ENGINE_COMMAND, args.log_level, package_version())
    return asyncio.run(serve(config, options, lambda address: _announce(config, address)))


def _announce(config: VerifierConfig, address: str) -> None:
    scheme = "grpc" if config.tls is None else "grpcs"
    print_ready("verifier", f"{scheme}://{address}")
