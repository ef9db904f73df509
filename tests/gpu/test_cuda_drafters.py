"""A verifier on a GPU with drafters as real processes: the tokens of no drafts, from graphs, whatever happens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from outrider.llm import LLM
from tests.cuda_llm import MODEL_OPTIONS, step_counts
from tests.drafter_process import running_drafter, wait_until
from tests.remote_llm import (
    LONG,
    MAX_MODEL_LEN,
    MIXED,
    OPTIONS,
    PROMPTS,
    K,
    Stream,
    connected,
    drafts_of,
    is_up,
    tokens,
    wait_until_idle,
)
from tests.tiny_models import make_model, make_tokenizer

pytestmark = pytest.mark.gpu

CUDA: dict[str, Any] = {
    "device": "cuda",
    "dtype": "float32",
    "gpu_memory_utilization": 0.1,
    "max_num_batched_tokens": 128,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tiny")
    make_model(directory, max_position_embeddings=MAX_MODEL_LEN, **MODEL_OPTIONS)
    return make_tokenizer(directory)


@pytest.fixture(scope="module")
def expected(model: Path) -> tuple[list[list[int]], list[int]]:
    """Without drafts: of the short requests, and of the long one."""
    with LLM(str(model), drafter="none", **(OPTIONS | CUDA)) as llm:
        (long_output,) = llm.generate(PROMPTS[5], LONG, use_tqdm=False)
        return tokens(llm, MIXED), long_output.outputs[0].token_ids


def check_steps_are_graphs(llm: LLM) -> None:
    replays, num_eager = step_counts(llm)
    assert num_eager == 0
    assert sum(count for (_, num_draft, _), count in replays.items() if num_draft == K) > 20


@pytest.mark.parametrize(
    "options",
    [
        {"debug_step_path": True},
        {"async_scheduling": False},
        {"transport": "shm"},
        {"draft_deadline": 0.0, "draft_fallback": "ngram"},
    ],
    ids=["async", "sync", "shared memory", "without waiting"],
)
def test_same_tokens(model: Path, expected: tuple[list[list[int]], list[int]], options: dict[str, Any]) -> None:
    with running_drafter("--model", str(model)) as drafter:
        with connected(model, drafter.address, **(CUDA | options)) as llm:
            for _ in range(2):
                assert tokens(llm, MIXED) == expected[0]
            stats = drafts_of(llm).stats
            assert stats.drafters[0].num_row_errors == 0
            if options.get("draft_deadline") != 0.0:
                assert stats.num_branches_used > 0
                assert stats.drafters[0].num_accepted_tokens > 10
            check_steps_are_graphs(llm)
            wait_until_idle(drafter.address, num_streams=1)
        wait_until_idle(drafter.address)


def test_kill_and_restart(model: Path, expected: tuple[list[list[int]], list[int]]) -> None:
    with running_drafter() as first, connected(model, first.address, **CUDA) as llm:
        stream = Stream(llm)
        stream.run_until_drafts()
        first.process.kill_group()
        assert stream.run(60) < 5.0
        wait_until(lambda: not any(is_up(llm)), "the loss is noticed")
        stats = drafts_of(llm).stats
        num_waits = stats.num_waits
        stream.run(20)
        assert stats.num_waits == num_waits, "nobody to wait for"
        with running_drafter("--port", first.address.rpartition(":")[2]):
            wait_until(lambda: all(is_up(llm)), "the drafter is back")
            stream.run_until_drafts()
            assert stats.drafters[0].num_sessions == 2
            assert stream.finish() == expected[1]
        assert stats.num_branches_used > 0
        check_steps_are_graphs(llm)


def test_killed_for_good(model: Path, expected: tuple[list[list[int]], list[int]]) -> None:
    """The rest of the output has drafts of the fallback, and later requests too."""
    with running_drafter() as drafter, connected(model, drafter.address, **CUDA, draft_fallback="ngram") as llm:
        stream = Stream(llm)
        stream.run(12)  # the fallback drafts as well: whose drafts these are does not matter
        drafter.process.kill_group()
        assert stream.finish() == expected[1]
        assert drafts_of(llm).stats.num_fallback_drafts > 0
        assert tokens(llm, MIXED) == expected[0]
        check_steps_are_graphs(llm)
