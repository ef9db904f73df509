"""Workloads of `python -m bench serving`: what a seed decides."""

from __future__ import annotations

import statistics
from dataclasses import replace

from bench.workload import WorkloadShape, draw_workload, fingerprint

TEXTS = [list(range(100)), list(range(1000, 1400))]
SHAPE = WorkloadShape(400, 8.0, 10, 150, 5, 20, 0.7, seed=3)


def test_the_same_seed_gives_the_same_workload_and_another_another() -> None:
    first, again = draw_workload(SHAPE, TEXTS), draw_workload(SHAPE, TEXTS)
    assert first == again
    other = draw_workload(replace(SHAPE, seed=4), TEXTS)
    assert fingerprint(first) == fingerprint(again) != fingerprint(other)


def test_prompts_are_pieces_of_the_texts_with_lengths_in_their_bounds() -> None:
    for request in draw_workload(SHAPE, TEXTS):
        prompt = request.prompt_token_ids
        assert 10 <= len(prompt) <= 150
        text = TEXTS[prompt[0] >= 1000]
        start = text.index(prompt[0])
        assert text[start : start + len(prompt)] == prompt
        assert 5 <= request.max_tokens <= 20
        assert request.temperature == 0.7


def test_arrivals_are_a_poisson_process_of_the_rate() -> None:
    times = [request.at_s for request in draw_workload(replace(SHAPE, num_requests=4000), TEXTS)]
    gaps = [later - earlier for earlier, later in zip([0.0, *times], times, strict=False)]
    mean = statistics.mean(gaps)
    assert abs(mean - 1 / 8) < 0.01
    assert 0.9 < statistics.stdev(gaps) / mean < 1.1  # of an exponential distribution both are equal
