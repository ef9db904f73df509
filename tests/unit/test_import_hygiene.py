"""The packages that must stay light do so at run time, where an import inside a function would escape import-linter."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("common", "model_executor", "drafter_svc", "verifier_svc", "outrider")

# Imports every module of the package argv[1], then prints which of the modules argv[2:] are loaded.
IMPORT_ALL = """
import importlib, pkgutil, sys

def fail(name):
    raise

package = importlib.import_module(sys.argv[1])
for module in pkgutil.walk_packages(package.__path__, package.__name__ + ".", onerror=fail):
    if not module.name.endswith(".__main__"):
        importlib.import_module(module.name)
print(*(name for name in sys.argv[2:] if name in sys.modules))
"""


@pytest.mark.parametrize(
    ("package", "forbidden"),
    [
        ("common", ["torch", "triton"]),
        ("verifier_svc.orchestrator", ["torch", "triton", "grpc", "model_executor"]),
        ("verifier_svc.front", ["torch", "triton", "model_executor"]),
    ],
)
def test_package_loads_without(package: str, forbidden: list[str]) -> None:
    command = [sys.executable, "-c", IMPORT_ALL, package, *forbidden]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=60)
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == []


def test_init_files_are_empty() -> None:
    inits = [path for package in PACKAGES for path in (ROOT / package).rglob("__init__.py")]
    assert len(inits) >= len(PACKAGES)
    filled = [str(path.relative_to(ROOT)) for path in inits if path.stat().st_size > 0]
    assert set(filled) <= {"outrider/__init__.py"}
