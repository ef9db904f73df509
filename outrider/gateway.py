"""Start smg's router with its control plane closed, and with a key that no process list shows.

    python -m outrider.gateway [--api-key-file FILE] [launch] ARGUMENTS OF `smg launch`

smg takes its key as an argument, which every user of the machine can read; here it comes from a file. And smg lets all
who may use the models add and remove verifiers as well; here nobody may, unless keys for that are given
(`--control-plane-api-keys`). All else is `smg launch`.
"""

from __future__ import annotations

import argparse
import secrets
import sys
from collections.abc import Sequence
from pathlib import Path

from common.errors import InvalidArgumentError, OutriderError

# What made recovery quick: a verifier that died was out of use after 3 seconds instead of 57.
RECOVERY_FLAGS = (
    *("--policy", "least_load"),
    *("--load-monitor-interval", "1"),
    *("--health-check-interval-secs", "1"),
    *("--health-check-timeout-secs", "2"),
    *("--cb-timeout-duration-secs", "5"),
    *("--worker-startup-check-interval", "1"),
)

INSTALL_HINT = "pip install 'outrider[serve]'"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the router until SIGTERM. Returns 2, with one line on standard error, if it cannot be started."""
    parser = argparse.ArgumentParser(prog="python -m outrider.gateway", allow_abbrev=False, add_help=False)
    parser.add_argument("--api-key-file", type=Path)
    args, arguments = parser.parse_known_args(argv)
    try:
        from smg import launch_router
    except ImportError:
        sys.stderr.write(f"outrider: smg is not installed: {INSTALL_HINT}\n")
        return 2
    try:
        key = None if args.api_key_file is None else read_api_key(args.api_key_file)
    except OutriderError as error:
        sys.stderr.write(f"outrider: {error}\n")
        return 2
    # A container's entry point puts flags before its command.
    options = launch_router.parse_router_args([argument for argument in arguments if argument != "launch"])
    if key is not None:
        options.api_key = key
    # Without a key of its own the control plane takes the key of the clients, or none, and lets them add verifiers.
    if not options.control_plane_api_keys:
        options.control_plane_api_keys = [("nobody", "nobody", secrets.token_hex(32), "admin")]
    # What it writes goes to a log, and the banner says nothing that is not in its first lines.
    launch_router.print_banner = lambda *_: None
    launch_router.launch_router(options)
    return 0


def read_api_key(path: Path) -> str:
    """The one key of a file. The router knows a single one.

    Raises:
        InvalidArgumentError: the file cannot be read, or does not hold exactly one key.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgumentError("api_key_file", str(path), f"a file that can be read ({error})") from None
    keys = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
    if len(keys) != 1:
        raise InvalidArgumentError("api_key_file", str(path), f"a file with one key; it has {len(keys)}")
    return keys[0]


if __name__ == "__main__":
    sys.exit(main())
