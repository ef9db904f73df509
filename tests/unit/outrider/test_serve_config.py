"""Which processes `outrider serve` starts, and what it refuses before it starts any."""

from __future__ import annotations

import asyncio
import importlib.util
import socket
import sys
from pathlib import Path
from typing import Any

import pytest

from common.errors import InvalidArgumentError, UnavailableError
from common.logging import get_logger
from common.options import resolve_options
from outrider.cli import build_parser
from outrider.gateway import RECOVERY_FLAGS, main, read_api_key
from outrider.serve import gateway_command, serve, verifier_command
from outrider.serve_config import ServeConfig
from verifier_svc.front.config import VerifierConfig


def verifier_config(config: ServeConfig) -> VerifierConfig:
    """What the verifier makes of the command that it is started with."""
    command = verifier_command(config, "info")
    args = build_parser().parse_args(command[command.index("--log-level") :])
    assert (args.command, args.log_level) == ("verifier", "info")
    return resolve_options(VerifierConfig, args, {}, get_logger(__name__))


def test_the_verifier_is_local_and_has_the_options_that_were_given() -> None:
    given: dict[str, Any] = {
        "num_speculative_tokens": 5,
        "enable_prefix_caching": False,
        "async_scheduling": True,
        "kv_cache_memory": "64M",
        "served_model_name": "-odd name",
        "shutdown_timeout": 1.5,
        "max_model_len": None,
    }
    config = verifier_config(ServeConfig(model="some/model", host="0.0.0.0", port=9000, **given))
    assert (config.model, config.host, config.port) == ("some/model", "127.0.0.1", 0)
    assert (config.num_speculative_tokens, config.served_model_name) == (5, "-odd name")
    assert (config.enable_prefix_caching, config.async_scheduling) == (False, True)
    assert (config.kv_cache_memory, config.shutdown_timeout, config.max_model_len) == (64 << 20, 1.5, None)


def test_keys_and_certificates_are_the_gateways_alone() -> None:
    files: dict[str, Any] = {"tls_cert": Path("c"), "tls_key": Path("k"), "api_key_file": Path("a")}
    config = ServeConfig(model="m", **files)
    assert config.scheme == "https"
    verifier = verifier_config(config)
    assert (verifier.tls_cert, verifier.tls_key, verifier.api_key_file) == (None, None, None)
    command = gateway_command(config, "info", "127.0.0.1:1", 2, 3)
    for flag, value in (("--tls-cert-path", "c"), ("--tls-key-path", "k"), ("--api-key-file", "a")):
        assert command[command.index(flag) + 1] == value


def test_the_gateway_takes_its_arguments() -> None:
    launch_router = pytest.importorskip("smg.launch_router")
    config = ServeConfig(model="m", host="::1", port=8123, shutdown_timeout=0, request_timeout=0.5)
    command = gateway_command(config, "warning", "127.0.0.1:7", 8, 9)
    assert command[1:3] == ["-m", "outrider.gateway"]
    args = launch_router.parse_router_args(command[3:])
    assert (args.host, args.port, args.worker_urls) == ("::1", 8123, ["grpc://127.0.0.1:7"])
    assert (args.health_check_port, args.prometheus_host, args.prometheus_port) == (8, "127.0.0.1", 9)
    assert (args.request_timeout_secs, args.shutdown_grace_period_secs, args.log_level) == (1, 1, "warn")
    assert all(flag in command for flag in RECOVERY_FLAGS)


def test_options_that_only_a_verifier_has_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        build_parser().parse_args(["serve", "m", "--uds", "x"])
    assert "--uds" in capsys.readouterr().err


def test_a_port_in_use_is_said_before_a_model_is_loaded() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        config = ServeConfig(model="m", port=taken.getsockname()[1])
        with pytest.raises(InvalidArgumentError, match="in use"):
            asyncio.run(serve(config, "warning", print))


def test_without_smg_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UnavailableError, match=r"pip install 'outrider\[serve\]'"):
        asyncio.run(serve(ServeConfig(model="m"), "warning", print))
    monkeypatch.setitem(sys.modules, "smg", None)
    assert main(["--worker-urls", "grpc://x:1"]) == 2
    assert "outrider[serve]" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["", "# no key\n", "one\ntwo\n"])
def test_the_router_has_one_key(tmp_path: Path, text: str) -> None:
    (tmp_path / "key").write_text(text)
    with pytest.raises(InvalidArgumentError, match="a file with one key"):
        read_api_key(tmp_path / "key")


def test_a_key_is_read_without_what_surrounds_it(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("# a comment\n\n  secret \n")
    assert read_api_key(tmp_path / "key") == "secret"


def test_a_key_file_that_is_missing_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("smg")
    assert main(["--api-key-file", str(tmp_path / "none")]) == 2
    assert capsys.readouterr().err.count("\n") == 1
