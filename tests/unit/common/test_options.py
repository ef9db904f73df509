"""Flags, file and environment: precedence, names, and errors that say where a value came from."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any, Literal

import pytest
from pydantic import BaseModel, ConfigDict, Field, SecretStr, ValidationError

from common.config import EngineConfig
from common.errors import InvalidArgumentError, UnknownOptionError
from common.logging import configure_logging, get_logger
from common.options import OptionParser, add_options, log_options, resolve_options
from common.validation import to_outrider_error
from outrider.local import CUDA_PREFILL_BESIDE_DECODE


class Options(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    model: str
    """What to serve, 100% of it."""
    max_rows: int = Field(default=4, ge=1)
    """Rows of a batch."""
    rate: float | None = None
    """Of something."""
    fast: bool = True
    """Skip the slow part."""
    kind: Literal["a", "b"] = "a"
    path: Path | None = None
    password: SecretStr = SecretStr("")

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise to_outrider_error(error, type(self), values) from None


def resolve(*argv: str, environment: dict[str, str] | None = None) -> Options:
    parser = OptionParser(prog="test")
    add_options(parser, Options, positional=("model",))
    return resolve_options(Options, parser.parse_args(argv), environment or {}, get_logger("test"))


def test_defaults_and_types() -> None:
    options = resolve("m", "--max-rows", "7", "--rate", "0.5", "--no-fast", "--kind", "b", "--path", "/x")
    assert (options.model, options.max_rows, options.rate, options.fast) == ("m", 7, 0.5, False)
    assert (options.kind, options.path) == ("b", Path("/x"))
    assert resolve("m") == Options(model="m")


def test_flag_before_file_before_environment(tmp_path: Path) -> None:
    file = tmp_path / "options.toml"
    file.write_text('model = "file"\nmax-rows = 2\nfast = false\n')
    environment = {
        "OUTRIDER_MODEL": "environment",
        "OUTRIDER_MAX_ROWS": "3",
        "OUTRIDER_RATE": "1.5",
        "OTHER_FAST": "1",
    }
    options = resolve("--config", str(file), "--max-rows", "1", environment=environment)
    assert (options.max_rows, options.model, options.rate, options.fast) == (1, "file", 1.5, False)
    assert resolve(environment=environment).model == "environment"


@pytest.mark.parametrize(
    ("argv", "content", "environment", "message"),
    [
        (["m", "--max-rows", "0"], "", {}, r"--max-rows = '0': expected greater than or equal to 1"),
        (["m"], "max_rows = 0", {}, r"options.toml: max_rows = 0: expected"),
        (["m"], "", {"OUTRIDER_MAX_ROWS": "many"}, r"OUTRIDER_MAX_ROWS = 'many': expected a valid integer"),
        ([], "", {}, r"--model = None: expected a value"),
        (["m"], "max_rows = ", {}, r"--config = '.*': expected a TOML file"),
    ],
)
def test_an_error_names_the_place(
    tmp_path: Path, argv: list[str], content: str, environment: dict[str, str], message: str
) -> None:
    file = tmp_path / "options.toml"
    file.write_text(content)
    with pytest.raises(InvalidArgumentError, match=message):
        resolve(*argv, "--config", str(file), environment=environment)


def test_unknown_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "options.toml"
    file.write_text("max_row = 2")
    with pytest.raises(UnknownOptionError, match="'max_row'; did you mean 'max_rows'"):
        resolve("m", "--config", str(file))
    with pytest.raises(SystemExit):
        resolve("m", "--max-row", "2")  # no abbreviation either
    assert "did you mean --max-rows?" in capsys.readouterr().err
    with pytest.raises(InvalidArgumentError, match="No such file"):
        resolve("m", "--config", str(tmp_path / "none.toml"))


def test_a_variable_of_no_option_is_logged_and_left_alone() -> None:
    stream = io.StringIO()
    configure_logging("warning", "json", stream)
    options = resolve("m", environment={"OUTRIDER_SERVICE_HOST": "10.0.0.1", "OUTRIDER_MAX_ROW": "3"})
    assert options.max_rows == 4
    records = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert [(record["variable"], record["nearest"]) for record in records] == [
        ("OUTRIDER_SERVICE_HOST", None),
        ("OUTRIDER_MAX_ROW", "OUTRIDER_MAX_ROWS"),
    ]


def test_help_comes_from_the_fields(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        resolve("--help")
    text = " ".join(capsys.readouterr().out.split())
    assert "What to serve, 100% of it" in text
    assert "Rows of a batch; default: 4" in text
    assert "Skip the slow part; default: on" in text
    assert "--fast, --no-fast" in text


def test_the_log_masks_secrets() -> None:
    stream = io.StringIO()
    configure_logging("info", "json", stream)
    log_options(get_logger("test"), Options(model="m", password=SecretStr("hunter2")))
    record = json.loads(stream.getvalue())
    assert record["max_rows"] == 4
    assert set(record["password"]) == {"*"}


def test_every_field_of_the_engine_has_help() -> None:
    assert [name for name, field in EngineConfig.model_fields.items() if not field.description] == []


def test_help_of_the_steps_on_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    parser = OptionParser(prog="test")
    add_options(parser, EngineConfig, positional=("model",))
    with pytest.raises(SystemExit):
        parser.parse_args(["--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert "--cuda-graphs {full,piecewise,none}" in text
    assert "steps with prompts are one between attentions; none: no graphs; default: full" in text
    assert "--max-prefill-beside-decode" in text
    assert f"None: {CUDA_PREFILL_BESIDE_DECODE} on a GPU, and no bound of its own on a CPU" in text
    assert "--debug-step-path, --no-debug-step-path" in text


def test_options_of_the_steps_on_a_gpu_reach_the_engine() -> None:
    parser = OptionParser(prog="test")
    add_options(parser, EngineConfig, positional=("model",))
    argv = ["m", "--cuda-graphs", "piecewise", "--max-prefill-beside-decode", "16", "--debug-step-path"]
    config = resolve_options(EngineConfig, parser.parse_args(argv), {}, get_logger("test"))
    assert (config.cuda_graphs, config.max_prefill_beside_decode, config.debug_step_path) == ("piecewise", 16, True)
