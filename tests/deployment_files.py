"""docker-compose.yml and the Dockerfile, read as far as tests need them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[1]
COMPOSE_FILE = ROOT / "docker-compose.yml"
SECURE_FILE = ROOT / "deploy" / "compose.secure.yml"
DOCKERFILE = ROOT / "deploy" / "Dockerfile"

_VARIABLE = re.compile(r"\$\{(\w+)(?::-([^}]*))?\}|\$(\$)")


@dataclass(frozen=True)
class ServiceSpec:
    """A service of the compose file, with its variables filled in."""

    name: str
    values: dict[str, Any]

    @property
    def command(self) -> list[str]:
        """Entry point and command, as the container runs them."""
        entrypoint = self.values.get("entrypoint")
        if entrypoint is None:
            entrypoint = entrypoint_of(self.values["build"]["target"])
        return [*words(entrypoint), *words(self.values["command"])]

    @property
    def probe(self) -> list[str]:
        """The command of the healthcheck."""
        kind, *command = self.values["healthcheck"]["test"]
        assert kind == "CMD", f"{self.name}: {kind}"
        return command

    @property
    def profiles(self) -> set[str]:
        return set(self.values.get("profiles", ()))


def read_compose(variables: Mapping[str, str] | None = None, *overlays: Path) -> dict[str, ServiceSpec]:
    """The services of docker-compose.yml, with overlays merged as far as these need it."""
    services: dict[str, dict[str, Any]] = {}
    for path in (COMPOSE_FILE, *overlays):
        for name, values in interpolate(yaml.safe_load(path.read_text()), variables or {})["services"].items():
            services[name] = services.get(name, {}) | values
    return {name: ServiceSpec(name, values) for name, values in services.items()}


def interpolate(value: Any, variables: Mapping[str, str]) -> Any:
    """Fill in `${NAME:-default}` and `${NAME}`; `$$` is a dollar sign."""
    if isinstance(value, dict):
        return {key: interpolate(item, variables) for key, item in value.items()}
    if isinstance(value, list):
        return [interpolate(item, variables) for item in value]
    if not isinstance(value, str):
        return value

    def fill(match: re.Match[str]) -> str:
        if match[3]:
            return "$"
        return variables.get(match[1]) or match[2] or ""

    return _VARIABLE.sub(fill, value)


def words(command: str | list[str]) -> list[str]:
    """A command as compose splits it."""
    return shlex.split(command) if isinstance(command, str) else command


def seconds(duration: str) -> float:
    """Of a duration such as 90s, 2m or 500ms."""
    units = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
    parts = re.findall(r"(\d+)(ms|s|m|h)", duration)
    assert "".join(number + unit for number, unit in parts) == duration, duration
    return sum(float(number) * units[unit] for number, unit in parts)


@dataclass
class Stage:
    """A stage of the Dockerfile."""

    name: str
    base: str
    instructions: list[tuple[str, str]] = field(default_factory=list)

    def all(self, keyword: str) -> list[str]:
        return [arguments for name, arguments in self.instructions if name == keyword]


def read_dockerfile() -> dict[str, Stage]:
    """The stages of the Dockerfile by name, with continued lines joined."""
    text = re.sub(r"^\s*#.*\n", "", DOCKERFILE.read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    stages: dict[str, Stage] = {}
    stage: Stage | None = None
    for line in filter(None, map(str.strip, text.splitlines())):
        keyword, _, arguments = line.partition(" ")
        if keyword == "FROM":
            base, _, name = arguments.partition(" AS ")
            stage = stages[name] = Stage(name, base)
        elif stage is not None:
            stage.instructions.append((keyword, arguments.strip()))
        else:
            assert keyword == "ARG", f"{keyword} before the first stage"
    return stages


def lineage(stages: dict[str, Stage], name: str) -> list[Stage]:
    """A stage and all that it is built on, the stage first."""
    found: list[Stage] = []
    while name in stages:
        found.append(stages[name])
        name = stages[name].base
    return found


def entrypoint_of(target: str) -> list[str]:
    for stage in lineage(read_dockerfile(), target):
        if entrypoints := stage.all("ENTRYPOINT"):
            return yaml.safe_load(entrypoints[-1])
    raise AssertionError(f"{target}: no entry point")
