"""Resolve `pyproject.toml` into `constraints.txt`: one version of everything, for all supported Pythons and platforms.

Package indexes call the CUDA build of torch `2.13.0` and the CPU build for Linux `2.13.0+cpu`. The resolver is given
the plain name, which exists for every platform, and the CPU build is written in afterwards. The pins of the CUDA
libraries stay: a constraint installs nothing by itself, and they make `make setup BACKEND=cuda` repeatable as well.

Usage: python deploy/lock.py UV [--upgrade]     (`make lock`, `make lock UPGRADE=1`)
"""

import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LOCK = ROOT / "constraints.txt"
HEADER = """\
# Exact versions of everything, for Python 3.11 to 3.13. Written by `make lock`: edit pyproject.toml instead.
# deploy/install.py explains where the +cpu build of torch comes from.
"""


def locked_lines(resolved: str) -> list[str]:
    """Turn the resolver's pins into lines of the lock.

    A pin constrains a package only where something asks for it, so its marker is needed only to tell two versions of
    one package apart.
    """
    pins = [line.partition(";") for line in resolved.splitlines()]
    num_versions = Counter(pin.partition("==")[0] for pin, _, _ in pins)
    if num_versions["torch"] != 1:
        sys.exit(f"lock: expected one version of torch, found {num_versions['torch']}")
    lines: list[str] = []
    for pin, _, marker in pins:
        name, _, version = pin.strip().partition("==")
        if name == "torch":
            lines += [f'torch=={version}+cpu ; sys_platform == "linux"', f'torch=={version} ; sys_platform != "linux"']
        elif num_versions[name] > 1:
            lines.append(f"{name}=={version} ; {marker.strip()}")
        else:
            lines.append(f"{name}=={version}")
    return lines


def main() -> None:
    uv, *options = sys.argv[1:]
    with tempfile.TemporaryDirectory() as folder:
        resolved = Path(folder) / "resolved.txt"
        if LOCK.exists():
            # The resolver keeps the versions it finds here, unless it is told to upgrade.
            resolved.write_text(re.sub(r"^(torch==[\d.]+) ;.*", r"\1", LOCK.read_text(), flags=re.MULTILINE))
        command = [uv, "pip", "compile", "--quiet", "--no-header", "--no-annotate", "--all-extras", "--universal"]
        # The oldest Python decides: one version that works everywhere beats a newer one for some.
        command += ["--python-version", "3.11", "--fork-strategy", "fewest"]
        command += ["--output-file", str(resolved), *options, "pyproject.toml"]
        status = subprocess.run(command, cwd=ROOT, stdout=subprocess.DEVNULL, check=False).returncode
        if status != 0:
            sys.exit(f"lock: the resolver failed with status {status}; {LOCK.name} is unchanged")
        LOCK.write_text(HEADER + "\n".join(locked_lines(resolved.read_text())) + "\n")


if __name__ == "__main__":
    main()
