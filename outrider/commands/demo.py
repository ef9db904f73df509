"""`outrider demo`: a real model writes code with speculation, and the same once more without."""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from common.errors import ModelLoadError
from common.sampling_params import SamplingParams
from common.types import DraftStats

if TYPE_CHECKING:  # torch is imported when the command runs, not when its help is shown
    from outrider.llm import LLM

DEMO_MODEL = Path(__file__).parents[2] / "models" / "demo-target"

PROMPTS = (
    '''class Vector:
    """A vector in three dimensions."""

    def __init__(self, x, y, z):
        self.x = x
        self.y = y
        self.z = z

    def __add__(self, other):
        return Vector(self.x + other.x, self.y + other.y, self.z + other.z)

    def __sub__(self, other):
        return''',
    """class Shape(object):
    def __init__(self, width, height):
        self.width = width
        self.height = height

    def area(self):
        return self.width * self.height


class Circle(Shape):
    def""",
    '''def load_config(path):
    """Read a configuration file."""
    with open(path) as f:
        config = json.load(f)
    return config


def save_config(path, config):
    """Write a''',
)

_ACCEPTED = "bold green"
_PROMPT = "dim"


@dataclass(slots=True)
class Pass:
    """All prompts once, at batch 1."""

    token_ids: list[list[int]] = field(default_factory=list[list[int]])
    num_steps: int = 0
    seconds: float = 0.0
    stats: DraftStats = field(default_factory=DraftStats)

    @property
    def num_tokens(self) -> int:
        return sum(len(ids) for ids in self.token_ids)

    @property
    def tokens_per_second(self) -> float:
        return self.num_tokens / self.seconds


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", metavar="DIR", help="model directory; default: the demo model of the repository")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="default: %(default)s")
    parser.add_argument("--prompt", help="what the model continues; default: a few of ours")
    parser.add_argument("--num-speculative-tokens", type=int, default=3, metavar="K", help="default: %(default)s")
    parser.add_argument("--max-tokens", type=int, default=160, help="per prompt; default: %(default)s")
    parser.add_argument("--temperature", type=float, default=0.6, help="0 is greedy; default: %(default)s")
    parser.add_argument("--seed", type=int, default=2, help="of the noise; default: %(default)s")


def run(args: argparse.Namespace) -> int:
    """Print the text, a table and whether both outputs are equal. Returns 0 if they are, else 1."""
    from outrider.llm import LLM

    model = args.model or str(DEMO_MODEL)
    if args.model is None and not DEMO_MODEL.is_dir():
        raise ModelLoadError(f"the demo model is not at {DEMO_MODEL}: expected a checkout; name another with --model")
    prompts = PROMPTS if args.prompt is None else (args.prompt,)
    params = SamplingParams(temperature=args.temperature, seed=args.seed, max_tokens=args.max_tokens)
    console = Console(highlight=False)
    passes: dict[str, Pass] = {}
    console.print(Text.assemble("Accepted draft tokens are ", ("green", _ACCEPTED), "; the others cost a step each.\n"))
    for name, drafter in (("on (n-gram)", "ngram"), ("off", "none")):
        options = {"device": args.device, "dtype": "float32", "max_num_seqs": 1}  # float32: see ARCHITECTURE.md
        with LLM(model, drafter=drafter, num_speculative_tokens=args.num_speculative_tokens, **options) as llm:
            llm.generate(prompts[0], SamplingParams(max_tokens=8), use_tqdm=False)  # warm up
            passes[name] = _run_pass(llm, prompts, params, console if drafter == "ngram" else None)
    on, off = passes["on (n-gram)"], passes["off"]
    console.print(_table(passes))
    identical = on.token_ids == off.token_ids
    ratio = on.tokens_per_second / off.tokens_per_second
    console.print(f"Speculation made it {ratio:.2f} times as fast at batch 1.")
    if identical:
        console.print(f"The outputs are identical: {on.num_tokens} tokens with speculation on and off.")
    else:
        console.print("[bold red]The outputs differ between speculation on and off.[/]")
    return 0 if identical else 1


def _run_pass(llm: LLM, prompts: tuple[str, ...], params: SamplingParams, console: Console | None) -> Pass:
    """Generate for each prompt in turn; `console` shows the text while it grows."""
    result = Pass()
    for prompt in prompts:
        if console is not None:
            console.print(Text(prompt, style=_PROMPT), end="", soft_wrap=True)
        token_ids: list[int] = []
        start = time.perf_counter()
        for delta in llm.stream(prompt, params):
            token_ids += delta.token_ids
            result.num_steps += bool(delta.token_ids)
            result.stats.add(delta.num_draft_tokens, delta.num_accepted_tokens)
            if console is not None:
                accepted, rest = delta.text[: delta.num_accepted_chars], delta.text[delta.num_accepted_chars :]
                console.print(Text.assemble((accepted, _ACCEPTED), rest), end="", soft_wrap=True)
        result.seconds += time.perf_counter() - start
        result.token_ids.append(token_ids)
        if console is not None:
            console.print("\n")
    return result


def _table(passes: dict[str, Pass]) -> Table:
    num_positions = max(len(result.stats.num_accepted_tokens_per_pos) for result in passes.values())
    table = Table(title="Speculation", title_justify="left")
    table.add_column("")
    for name in passes:
        table.add_column(name, justify="right")
    rows: list[tuple[str, list[str]]] = [
        ("tokens/s", [f"{result.tokens_per_second:.0f}" for result in passes.values()]),
        ("tokens", [str(result.num_tokens) for result in passes.values()]),
        ("steps", [str(result.num_steps) for result in passes.values()]),
        ("tokens a step", [f"{result.num_tokens / result.num_steps:.2f}" for result in passes.values()]),
        ("acceptance length", [_acceptance_length(result.stats) for result in passes.values()]),
    ]
    for position in range(num_positions):
        cells = [_acceptance_at(result.stats, position) for result in passes.values()]
        rows.append((f"  draft position {position + 1} accepted", cells))
    for title, cells in rows:
        table.add_row(title, *cells)
    return table


def _acceptance_length(stats: DraftStats) -> str:
    return f"{stats.acceptance_length:.2f}" if stats.num_drafts else "-"


def _acceptance_at(stats: DraftStats, position: int) -> str:
    """Share of all drafts whose token at this position was accepted."""
    per_pos = stats.num_accepted_tokens_per_pos
    return f"{per_pos[position] / stats.num_drafts:.0%}" if position < len(per_pos) else "-"
