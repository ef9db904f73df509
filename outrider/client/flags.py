"""Flags of commands that connect to verifiers. Imports no gRPC, so that help is shown at once."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from common.errors import InvalidArgumentError

DEFAULT_ADDRESS = "127.0.0.1:50051"


def add_connection_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--api-key-file", metavar="FILE", help="file with the bearer key to send")
    parser.add_argument("--tls-ca", metavar="FILE", help="certificates to trust (PEM); turns TLS on")
    parser.add_argument("--tls-cert", metavar="FILE", help="certificate of this client, for mutual TLS")
    parser.add_argument("--tls-key", metavar="FILE", help="its key")


def connection_options(args: argparse.Namespace) -> dict[str, Any]:
    """Keyword arguments of a client.

    Raises:
        InvalidArgumentError: a file cannot be read.
    """
    # gRPC reads this when it is loaded. Its notes on lost connections would stand in the middle of the output.
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    return {
        "api_key": None if args.api_key_file is None else _read_key(args.api_key_file),
        "tls_ca": args.tls_ca,
        "tls_cert": args.tls_cert,
        "tls_key": args.tls_key,
    }


def _read_key(path: str) -> str:
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgumentError("--api-key-file", path, f"a file that can be read ({error})") from None
    for line in lines:
        if line.strip() and not line.startswith("#"):
            return line.strip()
    raise InvalidArgumentError("--api-key-file", path, "a file with a key")
