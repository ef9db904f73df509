"""What a serving benchmark asks for, and when: all of it follows from a seed, so that a run can be repeated exactly."""

from __future__ import annotations

import hashlib
import json
import random
from dataclasses import asdict, dataclass
from pathlib import Path

HELDOUT = Path(__file__).parent.parent / "models" / "heldout"


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """One request of a workload."""

    at_s: float
    """When it is sent, counted from the start of the run."""
    prompt_token_ids: list[int]
    max_tokens: int
    temperature: float
    seed: int


@dataclass(frozen=True, slots=True)
class WorkloadShape:
    """What a workload is drawn from. Lengths are drawn evenly between their two bounds."""

    num_requests: int
    rate: float
    """Requests a second on average; arrivals are a Poisson process."""
    min_prompt_tokens: int
    max_prompt_tokens: int
    min_new_tokens: int
    max_new_tokens: int
    temperature: float
    seed: int


def load_heldout(model: str) -> list[list[int]]:
    """Token ids of the files that the demo models have not seen, by the tokenizer of `model`."""
    from outrider.local import load_tokenizer

    tokenizer = load_tokenizer(model)
    return [tokenizer.encode(path.read_text(encoding="utf-8")).ids for path in sorted(HELDOUT.rglob("*.py.txt"))]


def draw_workload(shape: WorkloadShape, texts: list[list[int]]) -> list[PlannedRequest]:
    """The requests of a run, in the order of their arrival. Prompts are pieces of `texts`."""
    rng = random.Random(shape.seed)
    planned: list[PlannedRequest] = []
    at_s = 0.0
    for _ in range(shape.num_requests):
        at_s += rng.expovariate(shape.rate)
        text = rng.choice(texts)
        length = min(rng.randint(shape.min_prompt_tokens, shape.max_prompt_tokens), len(text))
        start = rng.randint(0, len(text) - length)
        num_new = rng.randint(shape.min_new_tokens, shape.max_new_tokens)
        prompt = text[start : start + length]
        planned.append(PlannedRequest(at_s, prompt, num_new, shape.temperature, rng.getrandbits(31)))
    return planned


def fingerprint(planned: list[PlannedRequest]) -> str:
    """The same for the same workload, and for no other."""
    return hashlib.sha256(json.dumps([asdict(request) for request in planned]).encode()).hexdigest()[:16]
