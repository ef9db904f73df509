"""Install Outrider into the virtual environment that runs this script, with the versions of `constraints.txt`.

torch comes first and by itself, because a package index has several builds of one version, and the default one for
Linux brings gigabytes of CUDA libraries. On Linux the CPU build has a name of its own, `2.13.0+cpu`, so asking for
that name can never yield a CUDA build. It is not on every index: where pip does not find it, uv does, which knows
where the builds are published. On macOS and Windows the plain name is a CPU build.

Usage: python deploy/install.py [--backend cpu|cuda] [--extra NAME ...]
"""

import argparse
import importlib.metadata
import re
import runpy
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LOCK = ROOT / "constraints.txt"
# Modules are compiled when they are first imported. Compiling all of them here would take a quarter of a minute,
# and most are never used.
PIP_INSTALL = [sys.executable, "-m", "pip", "install", "-qq", "--disable-pip-version-check", "--no-compile"]


def locked_torch_version() -> str:
    """The version of torch in the lock, without the name of a build."""
    match = re.search(r"^torch==([\d.]+)", LOCK.read_text(), flags=re.MULTILINE)
    if match is None:
        sys.exit(f"setup: {LOCK.name} pins no version of torch")
    return match.group(1)


def installed_torch() -> tuple[str, str | None] | None:
    """Version and CUDA version of the installed torch, without the seconds that importing it takes."""
    try:
        torch = importlib.metadata.distribution("torch")
    except importlib.metadata.PackageNotFoundError:
        return None
    build = runpy.run_path(str(torch.locate_file("torch/version.py")))
    return torch.version, build["cuda"]


def describe(installed: tuple[str, str | None] | None) -> str:
    if installed is None:
        return "none"
    version, cuda = installed
    return f"{version}, built for {f'CUDA {cuda}' if cuda else 'the CPU'}"


def is_wanted(installed: tuple[str, str | None] | None, version: str, backend: str) -> bool:
    if installed is None:
        return False
    installed_version, cuda = installed
    return installed_version.partition("+")[0] == version and (cuda is not None) == (backend == "cuda")


def torch_requirement(version: str, backend: str) -> str:
    if sys.platform == "linux" and backend == "cpu":
        return f"torch=={version}+cpu"
    # Three equal signs: the build without a name, even where pip also finds `+cpu`, which counts as newer.
    return f"torch==={version}"


def install_torch(version: str, backend: str) -> None:
    """Install the build of torch for `backend`, or exit with a message that says what was tried."""
    requirement = torch_requirement(version, backend)
    print(f"setup: installing {requirement}", flush=True)
    # What torch depends on follows with everything else, under the lock. A build of the other kind is replaced.
    pip = subprocess.run(
        [*PIP_INSTALL, "--no-deps", "--force-reinstall", requirement], capture_output=True, text=True, check=False
    )
    if pip.returncode == 0:
        return
    error = f"setup: could not install {requirement} for Python {sys.version.split()[0]} on {sys.platform}\npip says:\n"
    error += pip.stderr
    if sys.platform == "linux":
        print(f"setup: pip does not find {requirement}; trying uv", flush=True)
        uv = install_torch_with_uv(requirement, backend)
        if uv.returncode == 0:
            return
        error += f"uv says:\n{uv.stderr}"
    sys.exit(error)


def install_torch_with_uv(requirement: str, backend: str) -> subprocess.CompletedProcess[str]:
    # uv is a tool here, not a part of the environment.
    with tempfile.TemporaryDirectory() as folder:
        fetch = [*PIP_INSTALL, "--constraint", str(LOCK), "--target", folder, "uv"]
        fetched = subprocess.run(fetch, capture_output=True, text=True, check=False)
        if fetched.returncode != 0:
            return fetched
        torch_backend = "cpu" if backend == "cpu" else "auto"
        command = [str(Path(folder) / "bin" / "uv"), "pip", "install", "--quiet", "--python", sys.executable]
        command += ["--no-deps", "--reinstall", f"--torch-backend={torch_backend}", requirement.replace("===", "==")]
        return subprocess.run(command, capture_output=True, text=True, check=False)


def install_outrider(torch_version: str, extras: list[str]) -> None:
    """Install everything else as locked, and the package itself in editable form."""
    with tempfile.TemporaryDirectory() as folder:
        # The lock names the CPU build; the build that is installed now must be left in place.
        constraints = Path(folder) / "constraints.txt"
        locked = re.sub(r"^torch==.*\n", "", LOCK.read_text(), flags=re.MULTILINE)
        constraints.write_text(f"{locked}torch==={torch_version}\n")
        package = f"{ROOT}[{','.join(extras)}]" if extras else str(ROOT)
        print(f"setup: installing outrider[{','.join(extras)}]", flush=True)
        run_pip("--constraint", str(constraints), "--no-build-isolation", "--editable", package)


def run_pip(*arguments: str) -> None:
    status = subprocess.run([*PIP_INSTALL, *arguments], check=False).returncode
    if status != 0:
        sys.exit(f"setup: pip failed with status {status}; its message is above")


def main() -> None:
    parser = argparse.ArgumentParser(description="Install Outrider with the locked versions.")
    parser.add_argument("--backend", choices=["cpu", "cuda"], default="cpu", help="which build of torch (default: cpu)")
    parser.add_argument("--extra", action="append", default=[], help="an extra of pyproject.toml; may be repeated")
    options = parser.parse_args()
    if sys.prefix == sys.base_prefix:
        sys.exit("setup: run this with the Python of a virtual environment")
    # Without isolation pip builds the package with the locked setuptools, instead of fetching the newest one.
    run_pip("--constraint", str(LOCK), "setuptools")
    version = locked_torch_version()
    if not is_wanted(installed_torch(), version, options.backend):
        install_torch(version, options.backend)
    installed = installed_torch()
    if installed is None or not is_wanted(installed, version, options.backend):
        sys.exit(f"setup: expected a {options.backend} build of torch {version}, found {describe(installed)}")
    install_outrider(installed[0], options.extra + (["gpu"] if options.backend == "cuda" else []))
    if installed_torch() != installed:
        sys.exit(f"setup: expected torch to stay {describe(installed)}, found {describe(installed_torch())}")


if __name__ == "__main__":
    main()
