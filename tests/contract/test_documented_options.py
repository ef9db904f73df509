"""The tables of options in the documentation: names that exist, and the defaults that they have."""

from __future__ import annotations

import re
from pathlib import Path

from common.config import EngineConfig
from outrider.local import CUDA_PREFILL_BESIDE_DECODE

ROOT = Path(__file__).parents[2]


def documented(file: str, heading: str) -> dict[str, str]:
    """Option -> default as it is written, from the table that begins with `heading`."""
    _, _, rest = (ROOT / file).read_text().partition(f"\n{heading} | default | |\n|---|---|---|\n")
    found: dict[str, str] = {}
    for line in rest.partition("\n\n")[0].splitlines():
        _, names, defaults, _ = line.split("|", maxsplit=3)
        options = [name.removeprefix("--").replace("-", "_") for name in re.findall(r"`(.+?)`", names)]
        values = [value.strip(' `"') for value in defaults.split(", ")]
        found.update(zip(options, values, strict=True))
    return found


def check(options: dict[str, str]) -> None:
    defaults = EngineConfig(model="m")
    for name, text in options.items():
        default = getattr(defaults, name)
        if name == "max_prefill_beside_decode":
            assert default is None
            assert int(text.removesuffix(" on a GPU")) == CUDA_PREFILL_BESIDE_DECODE
        elif default is None:
            assert text.endswith("'s"), f"{name}: None is whatever somebody else says, and the table says {text}"
        else:
            assert getattr(EngineConfig(model="m", **{name: text}), name) == default, f"{name} = {text}"


def test_the_readme_lists_every_option() -> None:
    options = documented("README.md", "| option of `LLM`")
    assert options.keys() == EngineConfig.model_fields.keys() - {"model"}
    check(options)


def test_options_of_a_verifier_on_a_gpu() -> None:
    options = documented("docs/deployment.md", "| option")
    assert options.keys() > {"cuda_graphs", "max_prefill_beside_decode", "debug_step_path"}
    check(options)
