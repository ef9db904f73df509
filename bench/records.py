"""One JSON record a run: what was measured, where, with which versions, at which commit."""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

_PACKAGES = ("torch", "transformers", "numpy")


@dataclass(frozen=True, slots=True)
class Sample:
    """Median, 99th percentile and number of repeated measurements."""

    median: float
    p99: float
    num_runs: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Sample:
        ordered = sorted(values)
        return cls(statistics.median(ordered), ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))], len(ordered))


@dataclass(frozen=True, slots=True)
class Check:
    """A figure and the bound it is held to."""

    name: str
    value: float
    bound: float
    at_least: bool

    @property
    def holds(self) -> bool:
        return self.value >= self.bound if self.at_least else self.value <= self.bound

    def __str__(self) -> str:
        sign = ">=" if self.at_least else "<="
        return f"{'ok    ' if self.holds else 'MISSED'} {self.name}: {self.value:.2f} ({sign} {self.bound:g})"


def make_record(name: str, config: dict[str, Any], results: dict[str, Any], checks: Sequence[Check]) -> dict[str, Any]:
    """Everything a reader needs to run it again and compare."""
    return {
        "bench": name,
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": _commit(),
        "device": _device(),
        "versions": {"python": platform.python_version()} | {package: version(package) for package in _PACKAGES},
        "config": config,
        "results": results,
        "checks": [asdict(check) | {"holds": check.holds} for check in checks],
    }


def write_record(record: dict[str, Any], directory: Path) -> Path:
    """Write a record to a file named after its bench and time; returns the path."""
    directory.mkdir(parents=True, exist_ok=True)
    stamp = record["time"].replace(":", "").replace("-", "")[:15]
    path = directory / f"{record['bench']}-{stamp}.json"
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return path


def _commit() -> str:
    """Commit of the checkout, marked when the work tree differs from it."""
    git = ["git", "-C", str(Path(__file__).parent)]
    try:
        head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
        dirty = subprocess.run([*git, "status", "--porcelain"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return head + ("+changes" if dirty else "")


def _device() -> dict[str, Any]:
    device: dict[str, Any] = {"cpu": _cpu_name(), "cores": os.cpu_count(), "torch_threads": torch.get_num_threads()}
    if torch.cuda.is_available():
        device["gpu"] = torch.cuda.get_device_name()
    return device


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())
