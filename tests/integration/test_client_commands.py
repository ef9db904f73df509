"""`outrider client` and `outrider top` against a scripted server."""

from __future__ import annotations

import io
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from common.errors import InvalidArgumentError
from common.sampling_params import SamplingParams
from outrider.cli import main
from outrider.client.info import Load, ServerInfo
from outrider.client.metrics_page import parse_page
from outrider.client.monitor import Snapshot
from outrider.commands.top import metrics_addresses, render
from tests.fake_engine_server import FakeServer, Fault, expected_outputs, start_server

ROOT = Path(__file__).resolve().parents[2]
PROMPT = "once upon"
PARAMS = SamplingParams(seed=3, max_tokens=40)
(EXPECTED,) = expected_outputs(list(PROMPT.encode()), PARAMS)


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with start_server() as server:
        yield server


def run_client(*arguments: str) -> int:
    return main(["client", "--seed", "3", "--max-tokens", "40", *arguments])


def test_text_goes_to_standard_output_and_statistics_do_not(
    server: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_client("--address", server.address, "--prompt", PROMPT) == 0
    captured = capsys.readouterr()
    assert captured.out == EXPECTED.text + "\n"
    stats = EXPECTED.draft_stats
    assert f"{len(EXPECTED.token_ids)} tokens in" in captured.err
    assert f"{stats.num_accepted_tokens} of {stats.num_draft_tokens} draft tokens accepted" in captured.err
    assert f"ended by {EXPECTED.finish_reason}" in captured.err


def test_the_prompt_may_come_from_standard_input(
    server: FakeServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(PROMPT))
    assert run_client("--address", server.address, "--no-stats") == 0
    assert capsys.readouterr() == (EXPECTED.text + "\n", "")


def test_accepted_tokens_are_coloured(server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_client("--address", server.address, "--prompt", PROMPT, "--color", "always") == 0
    pieces = capsys.readouterr().out.split("\x1b[1;32m")[1:]
    coloured = sum(len(piece.split("\x1b[0m")[0]) for piece in pieces)
    assert coloured == EXPECTED.draft_stats.num_accepted_tokens  # a token is one letter


def test_a_failure_in_mid_stream_does_not_show(server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    server.engine.faults.append(Fault("UNAVAILABLE", 5))
    with start_server() as other:
        assert run_client("--address", f"{server.address},{other.address}", "--prompt", PROMPT) == 0
    assert capsys.readouterr().out == EXPECTED.text + "\n"


def test_what_goes_wrong_is_one_line(server: FakeServer, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    address = server.address
    empty = tmp_path / "key"
    empty.write_text("# no key\n")
    assert run_client("--address", address, "--prompt", "") == 2
    assert run_client("--address", address, "--prompt", PROMPT, "--api-key-file", str(empty)) == 2
    assert run_client("--address", "nowhere", "--prompt", PROMPT) == 2
    assert run_client("--address", address, "--prompt", PROMPT, "--temperature", "-1") == 2
    server.stop()
    assert run_client("--address", address, "--prompt", PROMPT, "--timeout", "1") == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 5
    assert all(line.startswith("outrider: ") for line in lines)


def test_a_reader_that_has_seen_enough_is_no_error(server: FakeServer) -> None:
    server.engine.delay_s = 0.01
    code = "import sys; from outrider.cli import main; sys.exit(main())"
    command = [sys.executable, "-c", code, "client", "--address", server.address, "--prompt", PROMPT, "--no-stats"]
    with subprocess.Popen(
        [*command, "--seed", "3"], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.read(1)
        process.stdout.close()
        try:
            assert process.wait(20) == 0
            assert process.stderr.read() == b""
        finally:
            process.kill()


def test_the_key_is_sent(server: FakeServer, tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_text("# the key\nsecret\n")
    assert run_client("--address", server.address, "--prompt", PROMPT, "--api-key-file", str(path)) == 0
    assert server.engine.metadata[0]["authorization"] == "Bearer secret"


# -- top ---------------------------------------------------------------------------------------------------------------


def test_top_shows_what_is_up_and_what_is_down(server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", server.address, "--once"]) == 0
    out = capsys.readouterr().out
    for text in (server.address, "fake", "3/64", "25%", "123"):
        assert text in out
    with start_server() as gone:
        pass
    assert main(["top", server.address, gone.address, "--once", "--metrics", str(gone.port)]) == 1
    captured = capsys.readouterr()
    assert "down" in captured.out
    assert "Traceback" not in captured.out + captured.err


def test_top_shows_acceptance_drafters_and_transport() -> None:
    text = """
vllm:generation_tokens_total 500.0
vllm:spec_decode_num_drafts_total 100.0
vllm:spec_decode_num_draft_tokens_total 300.0
vllm:spec_decode_num_accepted_tokens_total 120.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{position="0"} 80.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{position="1"} 40.0
outrider_drafter_up{drafter="d1:1"} 1.0
outrider_drafter_up{drafter="d2:1"} 0.0
outrider_drafter_draft_tokens_total{drafter="d1:1"} 200.0
outrider_drafter_accepted_tokens_total{drafter="d1:1"} 100.0
outrider_draft_transport_in_use{drafter="d1:1",transport="grpc"} 1.0
"""
    info = ServerInfo(1, False, 3725.0, "x", "float32", 16, 8)
    load = Load(1, 0, 8, 0.5, 50, 100, 7.0, 0.25)
    now = Snapshot("v:1", None, "[model]", info, (load,), parse_page(text), 12.0)
    earlier = Snapshot("v:1", None, "m", info, (load,), parse_page("vllm:generation_tokens_total 300.0"), 10.0)
    shown = shown_text([now], [earlier])
    for part in ("1/8", "50%", "1:02:05", "[model]", "2.20", "40%", "80% 40%", "d1:1 50%", "in-process 20%", "grpc"):
        assert part in shown
    assert "1/2 (d2:1 down)" in shown
    assert " 100 " in shown  # tokens/s, from the two counters
    assert " 7 " in shown_text([now], [])  # without a counter before: the service's own figure


def test_top_without_metrics_shows_dashes() -> None:
    info = ServerInfo(0, True, 1.0, "x", "float32", 16, 8)
    shown = shown_text([Snapshot("v:1", None, "m", info), Snapshot("v:2", "no answer")], [])
    assert "paused" in shown
    assert "v:2: no answer" in shown
    assert shown.count(" - ") > 10


def shown_text(snapshots: list[Snapshot], earlier: list[Snapshot]) -> str:
    console = Console(file=io.StringIO(), width=200)
    with console.capture() as capture:
        console.print(render(snapshots, earlier))
    return capture.get()


def test_addresses_of_metrics() -> None:
    targets = ["a:1", "unix:/b"]
    assert metrics_addresses("", targets) == {}
    assert metrics_addresses("9000", targets) == {"a:1": "a:9000", "unix:/b": "127.0.0.1:9000"}
    assert metrics_addresses("x:1,2", targets) == {"a:1": "x:1", "unix:/b": "127.0.0.1:2"}
    for text in ("x", "1,2,3", "x:0"):
        with pytest.raises(InvalidArgumentError, match="--metrics"):
            metrics_addresses(text, targets)
