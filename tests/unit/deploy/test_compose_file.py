"""docker-compose.yml against the schema of compose files, the services' own parsers, and what it promises."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from common.options import resolve_options
from drafter_svc.config import DrafterConfig
from outrider.cli import build_parser
from outrider.gateway import RECOVERY_FLAGS
from tests.deployment_files import (
    COMPOSE_FILE,
    ROOT,
    SECURE_FILE,
    ServiceSpec,
    read_compose,
    read_dockerfile,
    seconds,
    words,
)
from verifier_svc.front.config import VerifierConfig

PROFILES = ("one-gpu", "mps", "two-gpu", "cpu")
VERIFIERS = ("verifier", "verifier-cpu")
DRAFTERS = ("drafter", "drafter-gpu1", "drafter-cpu")
SERVICES = read_compose()
RAW: dict[str, Any] = yaml.safe_load(COMPOSE_FILE.read_text())


def started_by(profile: str) -> dict[str, ServiceSpec]:
    return {name: spec for name, spec in SERVICES.items() if not spec.profiles or profile in spec.profiles}


@pytest.mark.parametrize("path", [COMPOSE_FILE, SECURE_FILE], ids=lambda path: path.name)
def test_follows_the_schema(path: Path) -> None:
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec", str(path)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert run.returncode == 0, run.stdout + run.stderr


@pytest.mark.parametrize("profile", PROFILES)
def test_a_profile_starts_one_verifier_one_drafter_and_the_gateway(profile: str) -> None:
    started = started_by(profile)
    assert len([name for name in started if name in VERIFIERS]) == 1
    assert len([name for name in started if name in DRAFTERS]) == 1
    assert "gateway" in started
    assert ("mps" in started) == (profile == "mps")


def test_without_a_flag_the_profile_of_one_gpu_is_started() -> None:
    assert "COMPOSE_PROFILES=one-gpu" in (ROOT / ".env").read_text().splitlines()


@pytest.mark.parametrize("profile", PROFILES)
def test_names_that_services_call_are_in_a_network_that_both_are_in(profile: str) -> None:
    """`grpc://drafter:50052` of the verifier and `grpc://verifier:50051` of the gateway."""
    started = started_by(profile)
    for caller, called in (("gateway", "verifier"), ("verifier", "drafter")):
        (calling,) = [spec for name, spec in started.items() if name.partition("-")[0] == caller]
        names: set[str] = set()
        for name, spec in started.items():
            for network, settings in spec.values.get("networks", {}).items():
                if network in calling.values["networks"]:
                    names |= {name, *(settings or {}).get("aliases", ())}
        assert called in names


@pytest.mark.parametrize("name", VERIFIERS)
def test_verifiers_take_their_command_line(name: str) -> None:
    config = parsed(SERVICES[name], "verifier")
    assert isinstance(config, VerifierConfig)
    assert (config.host, config.port) == ("0.0.0.0", 50051)
    assert config.drafter == "grpc://drafter:50052"
    assert (config.metrics_host, config.metrics_port) == ("127.0.0.1", 29001)
    assert seconds(SERVICES[name].values["stop_grace_period"]) > config.shutdown_timeout + 5


@pytest.mark.parametrize("name", DRAFTERS)
def test_drafters_take_their_command_line(name: str) -> None:
    config = parsed(SERVICES[name], "drafter")
    assert isinstance(config, DrafterConfig)
    assert (config.host, config.port, config.method) == ("0.0.0.0", 50052, "ngram")


def test_the_gateway_takes_its_command_line() -> None:
    launch_router = pytest.importorskip("smg.launch_router")
    *program, launch = SERVICES["gateway"].command[:4]
    assert (program, launch) == (["python", "-m", "outrider.gateway"], "launch")
    arguments = SERVICES["gateway"].command[4:]
    args = launch_router.parse_router_args(arguments)
    assert args.worker_urls == ["grpc://verifier:50051"]
    recovery = launch_router.parse_router_args(list(RECOVERY_FLAGS))
    for flag in RECOVERY_FLAGS[::2]:
        name = flag.removeprefix("--").replace("-", "_")
        assert getattr(args, name) == getattr(recovery, name), flag
    # It listens for 5 seconds more after SIGTERM before the grace period begins.
    assert seconds(SERVICES["gateway"].values["stop_grace_period"]) > args.shutdown_grace_period_secs + 5
    assert args.prometheus_host == "127.0.0.1"


def test_several_verifiers_and_options_of_ones_own_reach_the_commands() -> None:
    variables = {
        "OUTRIDER_WORKER_URLS": "grpc://a:50051 grpc://b:50051",
        "OUTRIDER_MODEL": "/models/mine",
        "OUTRIDER_VERIFIER_ARGS": "--max-model-len 4096 --served-model-name mine",
        "OUTRIDER_DRAFTER": "grpc://x:1,grpc://y:2",
    }
    services = read_compose(variables)
    urls = services["gateway"].command
    assert urls[urls.index("--worker-urls") + 1 :][:2] == ["grpc://a:50051", "grpc://b:50051"]
    config = parsed(services["verifier-cpu"], "verifier")
    assert isinstance(config, VerifierConfig)
    assert (config.model, config.max_model_len, config.served_model_name) == ("/models/mine", 4096, "mine")
    assert config.drafter == "grpc://x:1,grpc://y:2"


@pytest.mark.parametrize("name", DRAFTERS)
def test_a_drafter_can_be_scaled_and_is_never_published(name: str) -> None:
    spec = SERVICES[name].values
    assert "container_name" not in spec
    assert "ports" not in spec
    assert set(spec["networks"]) == {"draft"}
    assert RAW["networks"]["draft"] == {"internal": True}


@pytest.mark.parametrize("name", VERIFIERS)
def test_a_verifier_can_be_scaled_and_is_reached_through_the_gateway_alone(name: str) -> None:
    spec = SERVICES[name].values
    assert "container_name" not in spec
    assert "ports" not in spec
    assert all(RAW["networks"][network] == {"internal": True} for network in spec["networks"])


def test_the_gateway_is_published_on_the_loopback_address_unless_told_otherwise() -> None:
    assert SERVICES["gateway"].values["ports"] == ["127.0.0.1:8000:8000"]


@pytest.mark.parametrize("name", SERVICES)
def test_every_service_is_confined_probed_and_restarted(name: str) -> None:
    spec = SERVICES[name].values
    assert spec["restart"] == "unless-stopped"
    assert spec["cap_drop"] == ["ALL"]
    assert spec["security_opt"] == ["no-new-privileges:true"]
    assert spec["read_only"] is True
    assert not {"privileged", "ipc", "pid", "user", "cap_add"} & set(spec)
    assert {"test", "interval", "timeout", "retries", "start_period"} <= set(spec["healthcheck"])
    assert seconds(spec["healthcheck"]["interval"]) > seconds(spec["healthcheck"]["timeout"])


@pytest.mark.parametrize("name", [name for name in SERVICES if name != "mps"])
def test_probes_ask_the_port_that_the_command_names(name: str) -> None:
    spec = SERVICES[name]
    python, option, module, address, *_ = spec.probe
    assert (python, option, module) == ("python", "-m", "outrider.healthcheck")
    flag = "--health-check-port" if name == "gateway" else "--port"
    port = spec.command[spec.command.index(flag) + 1]
    assert address.removeprefix("http://").removesuffix("/readiness") == f"127.0.0.1:{port}"


def test_the_gateway_waits_for_verifiers_and_nothing_waits_for_drafters() -> None:
    depends = SERVICES["gateway"].values["depends_on"]
    assert set(depends) == set(VERIFIERS)
    assert all(entry["condition"] == "service_healthy" for entry in depends.values())
    for spec in SERVICES.values():
        for name, entry in spec.values.get("depends_on", {}).items():
            assert name not in DRAFTERS
            # It may be of a profile that is off.
            assert entry["required"] is False


def test_gpus() -> None:
    def devices(name: str) -> list[str]:
        (device,) = SERVICES[name].values["deploy"]["resources"]["reservations"]["devices"]
        assert (device["driver"], device["capabilities"]) == ("nvidia", ["gpu"])
        return device["device_ids"]

    assert devices("verifier") == devices("drafter") == devices("mps") == ["0"]
    assert devices("drafter-gpu1") == ["1"]
    assert all("deploy" not in started_by("cpu")[name].values for name in started_by("cpu"))


@pytest.mark.parametrize("profile", PROFILES)
def test_services_of_one_host_share_memory_and_sockets(profile: str) -> None:
    for name, spec in started_by(profile).items():
        shared = {"shm:/dev/shm"} if name == "mps" else {"shm:/dev/shm", "sockets:/run/outrider"}
        assert (name == "gateway") or shared <= set(spec.values["volumes"])


def test_volumes_and_build_stages_exist() -> None:
    stages = read_dockerfile()
    for name, spec in SERVICES.items():
        assert spec.values["build"]["target"] in stages
        assert (ROOT / spec.values["build"]["dockerfile"]).is_file()
        for volume in spec.values.get("volumes", ()):
            source, target, *mode = volume.split(":")
            assert source in RAW["volumes"] or (ROOT / source).is_dir(), f"{name}: {volume}"
            assert mode == (["ro"] if target == "/models" else [])


def test_the_key_and_the_certificate_are_secrets_that_no_command_line_holds() -> None:
    secure = read_compose({}, SECURE_FILE)["gateway"]
    files = yaml.safe_load(SECURE_FILE.read_text())["secrets"]
    assert set(secure.values["secrets"]) == set(files)
    python, option, module, *arguments = secure.command
    assert (python, option, module) == ("python", "-m", "outrider.gateway")
    paths = [argument.partition("=")[2] for argument in arguments if "/run/secrets/" in argument]
    assert sorted(paths) == sorted(f"/run/secrets/{name}" for name in files)
    assert arguments[len(paths) :] == words(SERVICES["gateway"].values["command"])


def parsed(spec: ServiceSpec, command: str) -> VerifierConfig | DrafterConfig:
    """The configuration that the service's own parser makes of its command."""
    program, *arguments = spec.command
    assert (program, arguments[0]) == ("outrider", command)
    # The engine on a GPU is not there yet: until then its flag is the only one that is refused.
    arguments = ["cpu" if argument == "cuda" else argument for argument in arguments]
    args: argparse.Namespace = build_parser().parse_args(arguments)
    from common.logging import get_logger

    model = VerifierConfig if command == "verifier" else DrafterConfig
    return resolve_options(model, args, {}, get_logger(__name__))


def test_words_are_split_as_a_shell_does() -> None:
    assert words("a 'b c'  d") == ["a", "b c", "d"]
