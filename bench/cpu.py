"""`python -m bench cpu`: the demo target on this CPU, batch 1, against transformers, with and without speculation.

All ratios come from runs that alternate in one process, so that a busy machine slows every side alike.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from bench.orchestrator import measure_host_time
from bench.records import Check, Sample, make_record, write_record
from common.sampling_params import SamplingParams
from outrider.llm import LLM

REPOSITORY = Path(__file__).parent.parent
MAX_HOST_TIME_US = 300.0
MIN_RATIO_OFF = 1.0
MIN_RATIO_NGRAM = 1.5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default=str(REPOSITORY / "models" / "demo-target"), help="model directory")
    parser.add_argument("--runs", type=int, default=7, help="alternating runs of each side")
    parser.add_argument("--new-tokens", type=int, default=192, help="tokens generated a run")
    parser.add_argument("--threads", type=int, default=2, help="torch threads of every side")


def run(args: argparse.Namespace) -> int:
    """Measure, print a table, write a record. Exit status 1 if a bound is missed."""
    torch.set_num_threads(args.threads)
    console = Console()
    sides: dict[str, LLM | _Transformers] = {
        "transformers": _Transformers(args.model),
        "speculation off": LLM(args.model, drafter="none", enable_prefix_caching=False),
        "n-gram, K=3": LLM(args.model, enable_prefix_caching=False),
    }
    prompt = copy_heavy_prompt(args.model)
    times: dict[str, list[float]] = {name: [] for name in sides}
    outputs: dict[str, list[int]] = {}
    for run_index in range(args.runs + 1):
        for name, side in sides.items():
            start = time.perf_counter()
            outputs[name] = _generate(side, prompt, args.new_tokens)
            if run_index > 0:  # the first run warms up
                times[name].append(time.perf_counter() - start)
    host = measure_host_time(64)
    samples = {name: Sample.of(values) for name, values in times.items()}
    ratios = {name: samples["transformers"].median / samples[name].median for name in sides}
    checks = [
        Check("speculation off / transformers, tokens/s", ratios["speculation off"], MIN_RATIO_OFF, at_least=True),
        Check(
            "n-gram / speculation off, tokens/s",
            samples["speculation off"].median / samples["n-gram, K=3"].median,
            MIN_RATIO_NGRAM,
            at_least=True,
        ),
        Check("plan + apply of 64 rows, us a step", host.median_us, MAX_HOST_TIME_US, at_least=False),
    ]
    table = Table(title=f"batch 1, {len(prompt)} prompt tokens, {args.new_tokens} new tokens, float32")
    for column in ("", "tokens/s", "ms/token p50", "of transformers", "same tokens as off"):
        table.add_column(column, justify="left" if not column else "right")
    for name, sample in samples.items():
        table.add_row(
            name,
            f"{args.new_tokens / sample.median:.0f}",
            f"{sample.median / args.new_tokens * 1e3:.2f}",
            f"{ratios[name]:.2f}",
            "yes" if outputs[name] == outputs["speculation off"] else "no",
        )
    console.print(table)
    for check in checks:
        console.print(str(check))
    results = {
        "seconds": {name: asdict(sample) for name, sample in samples.items()},
        "ratio_to_transformers": ratios,
        "same_tokens_as_off": {name: ids == outputs["speculation off"] for name, ids in outputs.items()},
        "host_time": asdict(host),
    }
    config: dict[str, Any] = {"prompt_tokens": len(prompt), "new_tokens": args.new_tokens, "dtype": "float32"}
    console.print(f"record: {write_record(make_record('cpu', config, results, checks), args.output)}")
    return 0 if all(check.holds for check in checks) else 1


def copy_heavy_prompt(model: str) -> list[int]:
    """A held-out file, and its beginning once more: the natural continuation is to copy the rest."""
    from outrider.local import load_tokenizer

    tokenizer = load_tokenizer(model)
    files = sorted((REPOSITORY / "models" / "heldout").rglob("*.py.txt"))
    texts = [tokenizer.encode(path.read_text(encoding="utf-8")).ids for path in files]
    text = next(ids for ids in texts if len(ids) >= 400)[:400]
    return [*text, *text[:100]]


class _Transformers:
    """transformers' generate on the same weights: greedy, float32, its default cache."""

    def __init__(self, model: str) -> None:
        from transformers import AutoModelForCausalLM

        self._model: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()

    @torch.inference_mode()
    def generate(self, prompt: list[int], new_tokens: int) -> list[int]:
        ids = torch.tensor([prompt])
        generated = self._model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            min_new_tokens=new_tokens,
            max_new_tokens=new_tokens,
            eos_token_id=None,
            pad_token_id=0,
        )
        return generated[0, len(prompt) :].tolist()


def _generate(side: LLM | _Transformers, prompt: list[int], new_tokens: int) -> list[int]:
    if isinstance(side, _Transformers):
        return side.generate(prompt, new_tokens)
    params = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True)
    return side.generate(prompt, params, use_tqdm=False)[0].outputs[0].token_ids
