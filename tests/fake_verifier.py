"""`outrider verifier` in front of an engine without a model: `python -m tests.fake_verifier ENGINE_FLAGS -- FLAGS`."""

from __future__ import annotations

import sys

from outrider import cli
from outrider.commands import verifier


def main(argv: list[str]) -> int:
    split = argv.index("--")
    verifier.ENGINE_COMMAND = (sys.executable, "-m", "tests.fake_engine", *argv[:split])
    return cli.main(["--log-level", "warning", "verifier", "fake-model", *argv[split + 1 :]])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
