"""A short soak on the CPU; tests/gpu/test_soak.py is the long one."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.config import BLOCK_SIZE, EngineConfig
from outrider.local import build_local_engine
from tests.soak import MAX_MODEL_LEN, MODEL_OPTIONS, check_soaked, run_alone, soak, with_few_blocks
from tests.tiny_models import make_model


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_random_requests_leave_nothing_behind_and_get_what_they_get_alone(
    tmp_path: Path, async_scheduling: bool
) -> None:
    make_model(tmp_path, **MODEL_OPTIONS)
    config = EngineConfig(
        model=str(tmp_path),
        max_num_seqs=8,
        max_num_batched_tokens=256,
        kv_cache_memory="16M",
        async_scheduling=async_scheduling,
        skip_tokenizer_init=True,
    )
    engine = with_few_blocks(build_local_engine(config, progress=False).engine, config, MAX_MODEL_LEN // BLOCK_SIZE + 9)
    alone = build_local_engine(config.model_copy(update={"drafter": "none"}), progress=False).engine
    try:
        done = soak(engine, 4000, seed=5, num_samples=12)
        check_soaked(engine, done)
        assert done.num_output_tokens >= 4000
        assert len(done.sample) == 12
        for request, tokens in done.sample:
            assert tokens == run_alone(alone, request), request.request_id
    finally:
        engine.close()
        alone.close()
