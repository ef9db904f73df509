"""An engine process without a model, for tests of the front: the real loop, orchestrator and link, a device made up.

`python -m tests.fake_engine --step-ms MS [--fail-at N] FD FRONT_PID`. The token of a request at a position is a letter
that depends on the seed and the position alone, so the right output is known beforehand.
"""

from __future__ import annotations

import argparse
import socket
import sys
import time
from dataclasses import dataclass
from typing import Any

from common.config import BLOCK_SIZE, EngineConfig
from common.types import FinishReason, Request, TokenLogprobs
from tests.byte_tokenizer import VOCAB_SIZE, byte_tokenizer
from verifier_svc.engine.engine import Engine
from verifier_svc.engine.executor import InlineExecutor
from verifier_svc.engine.process import BuiltEngine, run_engine_process
from verifier_svc.messages import ServedFacts
from verifier_svc.orchestrator.block_pool import BlockPool
from verifier_svc.orchestrator.orchestrator import Orchestrator
from verifier_svc.orchestrator.step import PlannedRow, RowOutcome, StepOutcome, StepPlan

MAX_MODEL_LEN = 4096


def fake_token(seed: int, position: int) -> int:
    """A letter."""
    return ord("a") + (seed * 7919 + position * position * 31 + position * 17) % 26


def fake_output(prompt: str | list[int], max_tokens: int, seed: int = 0) -> list[int]:
    """Output tokens of a request."""
    start = len(prompt.encode()) if isinstance(prompt, str) else len(prompt)
    return [fake_token(seed, position) for position in range(start, start + max_tokens)]


@dataclass
class _Row:
    request: Request
    length: int
    num_computed: int


class FakeRunner:
    """Commits what `fake_token` says: one token a row and step, and every second step one accepted draft token."""

    def __init__(self, step_s: float, fail_at: int | None = None) -> None:
        self._step_s = step_s
        self._fail_at = fail_at
        self._num_steps = 0
        self._rows: dict[int, _Row] = {}

    def run(self, plan: StepPlan) -> StepOutcome:
        self._num_steps += 1
        if self._num_steps == self._fail_at:
            raise RuntimeError("the device is gone")
        time.sleep(self._step_s)
        for new in plan.new_rows:
            self._rows[new.row] = _Row(new.request, len(new.tokens), new.num_computed_tokens)
        return StepOutcome(plan.step_id, [self._settle(planned) for planned in plan.rows])

    def close(self) -> None:
        pass

    def _settle(self, planned: PlannedRow) -> RowOutcome:
        row = self._rows[planned.row]
        request = row.request
        end = row.num_computed + planned.num_tokens
        prompt_logprobs = None
        if request.params.prompt_logprobs is not None and row.num_computed < len(request.prompt_token_ids):
            last = min(end, len(request.prompt_token_ids) - 1)
            prompt_logprobs = [_logprobs(request.prompt_token_ids[p + 1]) for p in range(row.num_computed, last)]
        if row.length >= request.max_len:
            return RowOutcome(planned.row, planned.generation, [], 0, 0)
        if end < row.length:
            row.num_computed = end
            return RowOutcome(planned.row, planned.generation, [], 0, 0, None, None, prompt_logprobs)
        num_draft = min(planned.max_draft_tokens, request.max_len - row.length - 1)
        num_accepted = min(num_draft, self._num_steps % 2)
        tokens = [fake_token(request.seed, row.length + index) for index in range(num_accepted + 1)]
        row.length += len(tokens)
        row.num_computed = row.length - 1
        reason = FinishReason.LENGTH if row.length == request.max_len else None
        logprobs = None if request.params.logprobs is None else [_logprobs(token) for token in tokens]
        return RowOutcome(
            planned.row, planned.generation, tokens, num_draft, num_accepted, reason, logprobs, prompt_logprobs
        )


def _logprobs(token: int) -> TokenLogprobs:
    return TokenLogprobs([token, token, 0], [-token / 100, -token / 100, -9.0], 1)


def build(options: dict[str, Any], step_s: float = 0.0, fail_at: int | None = None) -> BuiltEngine:
    config = EngineConfig(**options)
    max_model_len = config.max_model_len or MAX_MODEL_LEN
    pool = BlockPool(max(config.max_num_seqs, 4) * -(-max_model_len // BLOCK_SIZE) + 1, BLOCK_SIZE)
    orchestrator = Orchestrator(
        pool,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_num_waiting=config.max_num_waiting,
    )
    engine = Engine(orchestrator, InlineExecutor(FakeRunner(step_s, fail_at)), 2)
    served = ServedFacts(
        vocab_size=VOCAB_SIZE,
        max_model_len=max_model_len,
        eos_token_ids=(256,),
        num_speculative_tokens=config.num_speculative_tokens,
        dtype="float32",
        num_kv_cache_tokens=(pool.num_blocks - 1) * BLOCK_SIZE,
        block_size=BLOCK_SIZE,
        max_num_seqs=config.max_num_seqs,
        tokenizer_json=byte_tokenizer().to_str(),
    )
    return BuiltEngine(engine, served)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--step-ms", type=float, default=0.0)
    parser.add_argument("--fail-at", type=int)
    parser.add_argument("--load-s", type=float, default=0.0)
    parser.add_argument("fd", type=int)
    parser.add_argument("front_pid", type=int)
    args = parser.parse_args()

    def build_slowly(options: dict[str, Any]) -> BuiltEngine:
        time.sleep(args.load_s)
        return build(options, args.step_ms / 1000, args.fail_at)

    return run_engine_process(socket.socket(fileno=args.fd), args.front_pid, build_slowly)


if __name__ == "__main__":
    sys.exit(main())
