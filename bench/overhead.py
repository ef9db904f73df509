"""What the front and its clients cost the engine: streams through gRPC against the same prompts offline, in turn.

The offline side makes text of its tokens and the engine process does not, so a ratio above 1 is possible.
"""

from __future__ import annotations

import asyncio
import gc
import time
from dataclasses import asdict, dataclass
from typing import Any

from bench.load_client import finish, send_all
from bench.records import Sample
from bench.service import RunningVerifier, machine_cpu_time, running_verifier
from bench.workload import PlannedRequest
from common.sampling_params import SamplingParams

NUM_STREAMS = 64
PROMPT_TOKENS = 128


@dataclass(frozen=True, slots=True)
class Round:
    """All streams once, from the first request to the last token."""

    seconds: float
    num_steps: float
    engine_cpu_s: float
    """Of the process with the engine; offline that is all there is."""
    front_cpu_s: float = 0.0
    client_cpu_s: float = 0.0
    other_cpu_s: float = 0.0
    """Of everything else on the machine: the round is worth the less the more of it there is."""
    num_messages: int = 0

    @property
    def steps_per_s(self) -> float:
        return self.num_steps / self.seconds


def measure_overhead(
    model: str, texts: list[list[int]], *, num_runs: int, new_tokens: int, num_threads: int, drafter: str
) -> dict[str, Any]:
    """Step rates of both sides in alternating runs.

    Args:
        model: directory.
        texts: prompts are pieces of these.
        num_runs: of each side, one more to warm up.
        new_tokens: of each stream.
        num_threads: of the forward pass, on both sides.
        drafter: of both sides.

    Returns:
        Rounds and medians; `step_rate_ratio` is through the front / offline.
    """
    from outrider.llm import LLM

    planned = [
        PlannedRequest(0.0, texts[index % len(texts)][17 * (index // len(texts)) :][:PROMPT_TOKENS], new_tokens, 0.0, 0)
        for index in range(NUM_STREAMS)
    ]
    options = {"drafter": drafter, "num_threads": num_threads, "enable_prefix_caching": False}
    flags = ["--drafter", drafter, "--num-threads", str(num_threads), "--no-enable-prefix-caching"]
    offline: list[Round] = []
    through_front: list[Round] = []
    same_tokens = True
    with running_verifier(model, flags) as verifier, LLM(model, **options) as llm:
        for run in range(num_runs + 1):
            expected, offline_round = _run_offline(llm, planned)
            received, front_round = _run_front(verifier, planned, run)
            same_tokens &= expected == received
            if run:  # the first warms up
                offline.append(offline_round)
                through_front.append(front_round)
    ratios = [front.steps_per_s / off.steps_per_s for off, front in zip(offline, through_front, strict=True)]
    cpu_ratios = [
        (front.engine_cpu_s / front.num_steps) / (off.engine_cpu_s / off.num_steps)
        for off, front in zip(offline, through_front, strict=True)
    ]
    return {
        "num_streams": NUM_STREAMS,
        "num_threads": num_threads,
        "drafter": drafter,
        "same_tokens": same_tokens,
        "offline": [asdict(entry) for entry in offline],
        "through_front": [asdict(entry) for entry in through_front],
        "offline_steps_per_s": asdict(Sample.of([entry.steps_per_s for entry in offline])),
        "front_steps_per_s": asdict(Sample.of([entry.steps_per_s for entry in through_front])),
        "offline_other_cpu_share": asdict(Sample.of([entry.other_cpu_s / entry.seconds for entry in offline])),
        "front_other_cpu_share": asdict(Sample.of([entry.other_cpu_s / entry.seconds for entry in through_front])),
        "step_rate_ratio": asdict(Sample.of(ratios)),
        "engine_cpu_per_step_ratio": asdict(Sample.of(cpu_ratios)),
        "front_cpu_us_per_message": asdict(Sample.of([1e6 * r.front_cpu_s / r.num_messages for r in through_front])),
        "client_cpu_us_per_message": asdict(Sample.of([1e6 * r.client_cpu_s / r.num_messages for r in through_front])),
    }


def _run_offline(llm: Any, planned: list[PlannedRequest]) -> tuple[list[list[int]], Round]:
    orchestrator = llm._engine.orchestrator
    prompts = [request.prompt_token_ids for request in planned]
    params = SamplingParams(temperature=0, max_tokens=planned[0].max_tokens, ignore_eos=True)
    gc.collect()
    machine = machine_cpu_time()
    steps, cpu, start = orchestrator.num_planned, time.process_time(), time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - start
    cpu_s = time.process_time() - cpu
    other_cpu_s = max(0.0, machine_cpu_time() - machine - cpu_s)
    entry = Round(seconds, orchestrator.num_planned - steps, cpu_s, other_cpu_s=other_cpu_s)
    return [output.outputs[0].token_ids for output in outputs], entry


def _run_front(verifier: RunningVerifier, planned: list[PlannedRequest], run: int) -> tuple[list[list[int]], Round]:
    steps = verifier.metric("outrider_engine_steps_total")
    gc.collect()
    machine = machine_cpu_time()
    before, client_before, start = verifier.cpu_time(), time.process_time(), time.perf_counter()
    sent = asyncio.run(send_all(verifier.address, planned, 600.0, f"overhead-{run}", with_step_counts=False))
    seconds = max(entry.received_s[-1] for entry in sent if entry.received_s)
    client_cpu_s, after = time.process_time() - client_before, verifier.cpu_time()
    engine_cpu_s, front_cpu_s = after.engine_s - before.engine_s, after.front_s - before.front_s
    other_cpu_s = max(0.0, machine_cpu_time() - machine - client_cpu_s - engine_cpu_s - front_cpu_s)
    assert time.perf_counter() - start >= seconds
    outputs = [finish(entry) for entry in sent]
    if None in outputs:
        raise RuntimeError(f"streams failed: {sorted({entry.error or '' for entry in sent})}")
    entry = Round(
        seconds,
        verifier.metric("outrider_engine_steps_total") - steps,
        engine_cpu_s,
        front_cpu_s,
        client_cpu_s,
        other_cpu_s,
        sum(len(request.messages) for request in sent),
    )
    return [output.token_ids for output in outputs if output is not None], entry
