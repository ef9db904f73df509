"""Entry point of the engine process: `python -m outrider.engine_main FD FRONT_PID`. The front starts it."""

from __future__ import annotations

import socket
import sys
from typing import Any

from verifier_svc.engine.process import BuiltEngine, run_engine_process
from verifier_svc.messages import ServedFacts


def build(options: dict[str, Any]) -> BuiltEngine:
    """Load the model and wire an engine around it, from the fields of `EngineConfig`."""
    from common.config import BLOCK_SIZE, EngineConfig
    from outrider.local import build_local_engine
    from verifier_svc.engine.memory_report import show_memory
    from verifier_svc.engine.replay_counts import replay_counter

    config = EngineConfig(**options)
    local = build_local_engine(config)
    pool = local.engine.orchestrator.pool
    served = local.served
    if local.memory is not None:
        show_memory(local.memory)
    return BuiltEngine(
        local.engine,
        ServedFacts(
            vocab_size=served.vocab_size,
            max_model_len=served.max_model_len,
            eos_token_ids=served.eos_token_ids,
            num_speculative_tokens=served.num_speculative_tokens,
            dtype=local.dtype,
            num_kv_cache_tokens=(pool.num_blocks - 1) * BLOCK_SIZE,
            block_size=BLOCK_SIZE,
            max_num_seqs=config.max_num_seqs,
            tokenizer_json=None if served.tokenizer is None else served.tokenizer.to_str(),
        ),
        exchange_counts=local.exchange_counts,
        replay_counts=replay_counter(local.engine.executor),
    )


if __name__ == "__main__":
    fd, front_pid = int(sys.argv[1]), int(sys.argv[2])
    sys.exit(run_engine_process(socket.socket(fileno=fd), front_pid, build))
