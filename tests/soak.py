"""A long run of random requests that arrive in bursts, are aborted, and take each other's KV blocks."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from common.config import BLOCK_SIZE, EngineConfig
from common.sampling_params import SamplingParams
from common.types import Request
from tests.tiny_models import EOS_TOKEN_ID
from verifier_svc.engine.engine import Engine
from verifier_svc.orchestrator.block_pool import BlockPool
from verifier_svc.orchestrator.orchestrator import Orchestrator

MAX_PROMPT_LEN = 600
MAX_NEW_TOKENS = 200
MAX_MODEL_LEN = MAX_PROMPT_LEN + MAX_NEW_TOKENS
MAX_DRAFT = 3
MODEL_OPTIONS: dict[str, Any] = {
    "head_dim": 32,  # the least that the kernels take
    "max_position_embeddings": MAX_MODEL_LEN,
    "initializer_range": 0.08,  # outputs repeat themselves more than with wide weights: one token in six is a draft
}
_NUM_BYTES = 256


@dataclass(slots=True)
class Soaked:
    """What came of all requests."""

    num_requests: int = 0
    num_finished: int = 0
    num_aborted: int = 0
    num_output_tokens: int = 0
    num_accepted_tokens: int = 0
    sample: list[tuple[Request, list[int]]] = field(default_factory=list[tuple[Request, list[int]]])
    """Some of the finished ones, and their output."""


def with_few_blocks(engine: Engine, config: EngineConfig, num_blocks: int) -> Engine:
    """The device side of `engine` behind an orchestrator that hands out fewer KV blocks than there are.

    Args:
        engine: idle; not to be used any more.
        config: what it was built from.
        num_blocks: the dummy block included; enough for one request of the longest kind.
    """
    assert num_blocks <= engine.orchestrator.pool.num_blocks
    orchestrator = Orchestrator(
        BlockPool(num_blocks, BLOCK_SIZE, config.enable_prefix_caching),
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_num_waiting=config.max_num_waiting,
        max_prefill_beside_decode=engine.orchestrator._max_prefill_beside_decode,
    )
    return Engine(orchestrator, engine._executor, engine._depth)


def soak(engine: Engine, num_output_tokens: int, seed: int, num_samples: int) -> Soaked:
    """Serve random requests until they have got `num_output_tokens`, and those that are left to their end.

    Args:
        engine: idle.
        num_output_tokens: at least; of aborted requests those that came before the end.
        seed: of the requests, their arrivals and their ends.
        num_samples: requests to keep for a comparison, from all of the run.
    """
    rng = random.Random(seed)
    texts = [[rng.randrange(_NUM_BYTES) for _ in range(MAX_PROMPT_LEN)] for _ in range(4)]
    done = Soaked()
    requests: dict[str, Request] = {}
    outputs: dict[str, list[int]] = {}
    orchestrator = engine.orchestrator
    while done.num_output_tokens < num_output_tokens or engine.has_work:
        is_over = done.num_output_tokens >= num_output_tokens
        if not is_over and orchestrator.num_waiting < 4 and rng.random() < 0.2:
            for _ in range(rng.randint(1, 6)):
                request = draw_request(rng, f"s{done.num_requests}", texts)
                done.num_requests += 1
                requests[request.request_id], outputs[request.request_id] = request, []
                engine.add(request)
        if requests and rng.random() < 0.01:
            name = rng.choice(list(requests))
            assert engine.abort(name)
            del requests[name], outputs[name]
            done.num_aborted += 1
        for event in engine.step():
            tokens = outputs[event.request_id]
            tokens += event.tokens
            done.num_output_tokens += len(event.tokens)
            done.num_accepted_tokens += event.num_accepted_tokens
            if event.finish_reason is None:
                continue
            request = requests.pop(event.request_id)
            _keep(done, request, outputs.pop(event.request_id), num_samples, rng)
    return done


def _keep(done: Soaked, request: Request, tokens: list[int], num_samples: int, rng: random.Random) -> None:
    """Take a finished request into the sample with the chance that all others had or will have."""
    done.num_finished += 1
    if len(done.sample) < num_samples:
        done.sample.append((request, tokens))
    elif (index := rng.randrange(done.num_finished)) < num_samples:
        done.sample[index] = (request, tokens)


def draw_request(rng: random.Random, name: str, texts: Sequence[Sequence[int]]) -> Request:
    """Greedy or random, of any length, with 0 to 3 draft tokens; half of the prompts begin like others, and many repeat
    themselves, so that prefixes are cached and drafts accepted."""
    length = rng.choice((rng.randint(1, 40), rng.randint(1, MAX_PROMPT_LEN)))
    prompt = list(rng.choice(texts)[: rng.randint(0, length)]) if rng.random() < 0.5 else []
    piece = [rng.randrange(_NUM_BYTES) for _ in range(rng.choice((3, 20, MAX_PROMPT_LEN)))]
    prompt = (prompt + piece * length)[:length]
    options: dict[str, Any] = {"temperature": rng.choice((0.0, 0.0, 0.6, 1.0))}
    if rng.random() < 0.25:
        options |= {"top_p": 0.9, "top_k": 20, "min_p": 0.01, "repetition_penalty": 1.1, "presence_penalty": 0.2}
    new_tokens = rng.randint(1, MAX_NEW_TOKENS)
    params = SamplingParams(max_tokens=new_tokens, **options)
    return Request(
        name,
        prompt,
        params,
        seed=rng.getrandbits(64),
        max_len=length + new_tokens,
        stop_token_ids=(EOS_TOKEN_ID,) if rng.random() < 0.5 else (),
        num_speculative_tokens=rng.randint(0, MAX_DRAFT),
    )


def run_alone(engine: Engine, request: Request) -> list[int]:
    """Output of a request that has an engine to itself, and no drafts."""
    engine.add(replace(request, num_speculative_tokens=0))
    tokens: list[int] = []
    while engine.has_work:
        for event in engine.step():
            tokens += event.tokens
    return tokens


def check_soaked(engine: Engine, done: Soaked) -> None:
    """Everything came back, and everything that could happen did."""
    orchestrator = engine.orchestrator
    pool = orchestrator.pool
    assert pool.num_free == pool.num_blocks - 1, "blocks were lost"
    assert orchestrator._rows.num_free == len(orchestrator._rows._rows), "rows were lost"
    assert orchestrator.num_running == orchestrator.num_waiting == orchestrator.num_in_flight == 0
    assert done.num_finished + done.num_aborted == done.num_requests
    assert done.num_aborted > 0
    assert done.num_accepted_tokens > 0
    assert orchestrator.stats.num_preemptions > 0
    assert orchestrator.stats.num_prefix_hits > 0
