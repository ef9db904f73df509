"""The Dockerfile, read without an engine: its sources exist, and its last stages are what they promise."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.deployment_files import DOCKERFILE, ROOT, Stage, lineage, read_dockerfile

STAGES = read_dockerfile()
IMAGES = ("cpu", "cuda", "gateway")
IGNORE = DOCKERFILE.with_name("Dockerfile.dockerignore")


def copies(stage: Stage) -> list[tuple[str | None, list[str], str]]:
    """(stage it copies from, sources, destination) of every COPY."""
    found: list[tuple[str | None, list[str], str]] = []
    for arguments in stage.all("COPY"):
        parts = shlex.split(arguments)
        options = dict(part.removeprefix("--").split("=") for part in parts if part.startswith("--"))
        *sources, destination = [part for part in parts if not part.startswith("--")]
        found.append((options.get("from"), sources, destination))
    return found


def test_every_source_exists_and_is_in_the_build_context() -> None:
    allowed = [line[1:] for line in IGNORE.read_text().splitlines() if line.startswith("!")]
    for stage in STAGES.values():
        for origin, sources, _ in copies(stage):
            for source in sources:
                if origin is not None:
                    assert origin in STAGES
                    continue
                assert (ROOT / source).exists(), f"{stage.name}: {source}"
                assert any(source == path or source.startswith(f"{path}/") for path in allowed), source


def test_stages_begin_with_a_stage_or_with_the_pinned_image() -> None:
    assert re.search(r"^ARG PYTHON_IMAGE=python:3\.1[123]-slim-\w+$", DOCKERFILE.read_text(), flags=re.MULTILINE)
    assert all(stage.base in STAGES or stage.base == "${PYTHON_IMAGE}" for stage in STAGES.values())


@pytest.mark.parametrize("image", IMAGES)
def test_an_image_runs_as_a_user_and_has_no_compiler(image: str) -> None:
    users = [user for stage in lineage(STAGES, image) for user in stage.all("USER")]
    assert users == ["10001:10001"]
    commands = " ".join(command for stage in lineage(STAGES, image) for command in stage.all("RUN"))
    assert not re.search(r"apt-get|gcc|g\+\+|clang|build-essential|pip install", commands)


@pytest.mark.parametrize("image", IMAGES)
def test_the_user_comes_after_all_that_root_does(image: str) -> None:
    keywords = [keyword for keyword, _ in STAGES[image].instructions]
    assert keywords.index("USER") > max(index for index, keyword in enumerate(keywords) if keyword == "COPY")
    assert keywords[-2:] == ["ENTRYPOINT", "CMD"]


def test_everything_that_is_installed_is_pinned() -> None:
    for stage in STAGES.values():
        for command in stage.all("RUN"):
            for install in re.findall(r"pip install[^&]*", command):
                assert "constraints.txt" in install or "--no-deps" in install, install
            assert not re.search(r"deploy/install\.py(?!.*--backend)", command)


def test_both_engines_are_built_from_the_same_packages() -> None:
    def packages(name: str) -> set[str]:
        return {source for _, sources, _ in copies(STAGES[name]) for source in sources if "/" not in source}

    folders = {path.parent.name for path in ROOT.glob("*/__init__.py")} - {"bench", "models", "tests"}
    assert packages("build-cpu") == packages("build-cuda") == folders


def test_the_gateway_image_has_all_that_its_modules_import(tmp_path: Path) -> None:
    for origin, sources, destination in copies(STAGES["gateway"]):
        if origin is None:
            folder = tmp_path / Path(destination).name
            folder.mkdir()
            for source in sources:
                shutil.copy(ROOT / source, folder)
    program = "import outrider.gateway, outrider.healthcheck, sys; sys.exit('torch' in sys.modules)"
    run = subprocess.run(
        [sys.executable, "-P", "-c", program],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert run.returncode == 0, run.stderr
