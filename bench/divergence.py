"""`python -m bench divergence`: how often, and where, bfloat16 outputs differ with and without speculation.

A step that verifies drafts computes K + 1 tokens a row where one without computes 1, and bfloat16 rounds differently
then. Where two tokens are nearly as likely, the other one may win. That is all that may happen: at each first
difference between the two outputs the gap between the two tokens has to be within twice the rounding, epsilon.

Epsilon is measured in the same run, from log probabilities at positions where the prefix is the same: with 1 token and
with K + 1 tokens a step, and in one prefill of prompt and output. The positions of the differences are left out, or
the bound would hold whatever happens there. Weights are random: gaps are smaller than those of a trained model, and
differences more frequent.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from rich.console import Console

from bench.random_engine import make_engine, repetitive_request
from bench.random_model import SHAPES, make_random_model
from bench.records import Check, make_record, write_record
from common.sampling_params import MAX_LOGPROBS
from common.types import Request, TokenLogprobs
from verifier_svc.engine.engine import Engine

PROMPT_LEN = 160  # longer than the segment that repeats: an n-gram matches from the start
VOCAB_SIZE = 512


@dataclass(slots=True)
class Output:
    """One greedy output."""

    tokens: list[int] = field(default_factory=list[int])
    logprobs: list[TokenLogprobs] = field(default_factory=list[TokenLogprobs])
    """Of each token, if the request asked for them."""
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list[TokenLogprobs])
    """Of each prompt token but the first."""
    num_draft_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first token that differs between two outputs of a prompt."""

    prompt: int
    index: int
    """In the output."""
    gap: float
    """Between the log probabilities of the two tokens, given the same prefix."""


@dataclass(frozen=True, slots=True)
class DivergenceReport:
    num_tokens: int
    """Compared: up to the first difference of each prompt, that included."""
    divergences: list[Divergence]
    epsilon: float
    """Largest difference of a token's log probability that rounding made."""
    num_positions: int
    """That epsilon was measured at."""
    num_draft_tokens: int
    """Verified in the run with speculation."""

    @property
    def per_1000_tokens(self) -> float:
        return 1000 * len(self.divergences) / self.num_tokens

    @property
    def largest_gap(self) -> float:
        return max((divergence.gap for divergence in self.divergences), default=0.0)

    @property
    def holds(self) -> bool:
        """Every difference is a near tie."""
        return self.largest_gap <= 2 * self.epsilon


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shape", default="1b", choices=sorted(SHAPES), help="default: %(default)s")
    parser.add_argument("--layers", type=int, default=4, help="of the shape; default: %(default)s")
    parser.add_argument("--prompts", type=int, default=64, help="default: %(default)s")
    parser.add_argument("--new-tokens", type=int, default=128, help="default: %(default)s")
    parser.add_argument("--num-speculative-tokens", type=int, default=3, metavar="K", help="default: %(default)s")


def run(args: argparse.Namespace) -> int:
    """Measure, print, write a record. Exit status 1 if a difference is more than rounding."""
    console = Console()
    if not torch.cuda.is_available():
        console.print("divergence: needs a CUDA device")
        return 2
    report = measure_random_model(
        args.shape, args.layers, args.prompts, args.new_tokens, args.num_speculative_tokens, torch.device("cuda")
    )
    console.print(
        f"{len(report.divergences)} of {args.prompts} outputs differ: {report.per_1000_tokens:.2f} per 1000 tokens; "
        f"largest gap {report.largest_gap:.4f}, epsilon {report.epsilon:.4f} over {report.num_positions} positions",
        highlight=False,
    )
    ratio = report.largest_gap / report.epsilon
    checks = [Check("largest gap of a difference / epsilon", ratio, 2.0, at_least=False)]
    console.print(str(checks[0]), highlight=False)
    config = {name: vars(args)[name] for name in ("shape", "layers", "prompts", "new_tokens", "num_speculative_tokens")}
    results = asdict(report) | {"per_1000_tokens": report.per_1000_tokens, "largest_gap": report.largest_gap}
    console.print(f"record: {write_record(make_record('divergence', config, results, checks), args.output)}")
    return 0 if report.holds else 1


def measure_random_model(
    shape: str, num_layers: int, num_prompts: int, new_tokens: int, num_draft: int, device: torch.device
) -> DivergenceReport:
    """`measure_divergence` for random weights of a known shape with fewer layers, in bfloat16 on a GPU."""
    # Random weights write random text: with few tokens and matches of one, an n-gram still drafts at every step.
    config = replace(SHAPES[shape], num_layers=num_layers, vocab_size=VOCAB_SIZE)
    loaded = make_random_model(config, PROMPT_LEN + new_tokens + 1, device)
    requests = [
        repetitive_request(f"d{index}", PROMPT_LEN, new_tokens, config.vocab_size, num_draft, seed=index)
        for index in range(num_prompts)
    ]
    options: dict[str, Any] = {"max_num_seqs": 16, "max_num_batched_tokens": 1024, "prompt_lookup_min": 1}
    off = make_engine(shape, loaded, 0, **options)
    speculative = make_engine(shape, loaded, num_draft, **options)
    try:
        return measure_divergence(off, speculative, requests)
    finally:
        off.close()
        speculative.close()


def measure_divergence(off: Engine, speculative: Engine, requests: Sequence[Request]) -> DivergenceReport:
    """Greedy outputs of two engines over the same weights.

    Args:
        off: drafts nothing.
        speculative: drafts what `requests` allow.
        requests: greedy; each is served by both, as it is and asking for log probabilities.
    """
    plain, with_logprobs = list(requests), [_with(request, logprobs=MAX_LOGPROBS) for request in requests]
    off_outputs, draft_outputs = serve(off, plain), serve(speculative, plain)
    off_steps, draft_steps = serve(off, with_logprobs), serve(speculative, with_logprobs)
    # One prefill over each prompt and its output: logits of every position, given the output that came without drafts.
    whole = [_teacher_forced(request, off_outputs[request.request_id].tokens) for request in requests]
    prefills = serve(off, whole)
    spread = _Spread()
    divergences: list[Divergence] = []
    num_tokens = 0
    for number, request in enumerate(requests):
        name, prompt_len = request.request_id, request.prompt_len
        reference = off_outputs[name].tokens
        forced = prefills[name].prompt_logprobs[prompt_len - 1 :]  # [new_tokens], of the tokens of `reference`
        index = first_difference(reference, draft_outputs[name].tokens)
        num_tokens += min(index + 1, len(reference))
        if index < len(reference):
            pair = reference[index], draft_outputs[name].tokens[index]
            divergences.append(Divergence(number, index, gap_between(forced[index], *pair)))
        # Where two runs have drawn the same tokens before a position and at it, they computed the same thing.
        for output in (off_steps[name], draft_steps[name]):
            for entry, other in _agreeing(output, reference, forced, index):
                spread.add(entry, other)
        both = first_difference(off_steps[name].tokens, draft_steps[name].tokens)
        for entry, other in zip(off_steps[name].logprobs[:both], draft_steps[name].logprobs[:both], strict=True):
            spread.add(entry, other)
    num_draft_tokens = sum(output.num_draft_tokens for output in draft_outputs.values())
    return DivergenceReport(num_tokens, divergences, spread.largest, spread.num_positions, num_draft_tokens)


def serve(engine: Engine, requests: Sequence[Request]) -> dict[str, Output]:
    """Serve requests to their end."""
    outputs = {request.request_id: Output() for request in requests}
    for request in requests:
        engine.add(request)
    while engine.has_work:
        for event in engine.step():
            output = outputs[event.request_id]
            output.tokens += event.tokens
            output.logprobs += event.logprobs or []
            output.prompt_logprobs += event.prompt_logprobs or []
            output.num_draft_tokens += event.num_draft_tokens
    return outputs


def first_difference(tokens: Sequence[int], others: Sequence[int]) -> int:
    """Index of the first token that differs; their length if none does."""
    if len(tokens) != len(others):
        raise ValueError(f"outputs of {len(tokens)} and {len(others)} tokens: expected the same length")
    return next((i for i, (token, other) in enumerate(zip(tokens, others, strict=True)) if token != other), len(tokens))


def gap_between(entry: TokenLogprobs, token: int, other: int) -> float:
    """Difference of two tokens' log probabilities; at least that, if one is not among the best."""
    known: Mapping[int, float] = dict(zip(entry.token_ids, entry.logprobs, strict=True))
    lowest = min(entry.logprobs)
    return abs(known.get(token, lowest) - known.get(other, lowest))


def _agreeing(
    output: Output, reference: Sequence[int], forced: Sequence[TokenLogprobs], limit: int
) -> list[tuple[TokenLogprobs, TokenLogprobs]]:
    """Entries of a run and of the prefill for the same prefix, up to a first difference of any two runs."""
    end = min(first_difference(output.tokens, reference), limit)
    return list(zip(output.logprobs[:end], forced[:end], strict=True))


class _Spread:
    """Largest difference between two computations of the same log probabilities."""

    def __init__(self) -> None:
        self.largest = 0.0
        self.num_positions = 0

    def add(self, entry: TokenLogprobs, other: TokenLogprobs) -> None:
        known = dict(zip(other.token_ids, other.logprobs, strict=True))
        self.num_positions += 1
        for token, logprob in zip(entry.token_ids, entry.logprobs, strict=True):
            if token in known:
                self.largest = max(self.largest, abs(logprob - known[token]))


def _with(request: Request, **params: int) -> Request:
    return replace(request, params=request.params.model_copy(update=params))


def _teacher_forced(request: Request, tokens: Sequence[int]) -> Request:
    """A prompt that is prompt and output, for the log probabilities of all of its tokens."""
    prompt = [*request.prompt_token_ids, *tokens]
    whole = _with(request, prompt_logprobs=MAX_LOGPROBS, max_tokens=1)
    return replace(whole, prompt_token_ids=prompt, max_len=len(prompt) + 1, num_speculative_tokens=0)
