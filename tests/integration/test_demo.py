"""`outrider demo`: what it shows is measured, and its exit status is the comparison."""

from __future__ import annotations

from pathlib import Path

import pytest

from outrider.cli import main
from outrider.commands import demo


@pytest.fixture(autouse=True)
def logging_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.cli.configure_logging", lambda level: None)


def arguments(directory: Path, *more: str) -> list[str]:
    return ["demo", "--model", str(directory), "--prompt", "abababababab", "--max-tokens", "24", *more]


def test_equal_outputs(capsys: pytest.CaptureFixture[str]) -> None:
    prompt = "x = [1, 2, 3, 1, 2, 3, 1, 2,"
    assert main(["demo", "--prompt", prompt, "--max-tokens", "24"]) == 0
    shown = capsys.readouterr().out
    assert shown.index(prompt) < shown.index("tokens/s") < shown.index("The outputs are identical: 24 tokens")
    for row in ("steps", "tokens a step", "acceptance length", "draft position 1 accepted"):
        assert row in shown


def test_outputs_that_differ_end_with_status_1(
    tiny_llama: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run_pass = demo._run_pass

    def spoilt(*args: object) -> demo.Pass:
        result = run_pass(*args)  # type: ignore[arg-type]
        if args[-1] is None:  # the pass without speculation, which is not shown
            result.token_ids[-1][-1] ^= 1
        return result

    monkeypatch.setattr(demo, "_run_pass", spoilt)
    assert main(arguments(tiny_llama)) == 1
    assert "The outputs differ between speculation on and off." in capsys.readouterr().out


def test_bad_arguments_are_one_line(tiny_llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments(tiny_llama, "--num-speculative-tokens", "99")) == 2
    assert capsys.readouterr().err == ("outrider: num_speculative_tokens = 99: expected less than or equal to 16\n")
