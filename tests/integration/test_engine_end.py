"""How an engine ends: closed, or by a step that raises. Never in a hang."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from common.errors import EngineClosedError
from model_executor.models.decoder import Decoder
from outrider import LLM, SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
PROMPT = [72, 101, 108, 108, 111]


def load(directory: Path, **options: Any) -> LLM:
    return LLM(str(directory), max_model_len=64, kv_cache_memory="1M", max_num_seqs=4, **options)


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_step_that_raises_ends_the_engine_and_not_in_a_hang(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch, asynchronous: bool
) -> None:
    forward = Decoder.forward
    num_steps = 0

    def failing(*args: Any, **kwargs: Any) -> Any:
        nonlocal num_steps
        num_steps += 1
        if num_steps == 4:
            raise RuntimeError("no memory left")
        return forward(*args, **kwargs)

    with load(tiny_llama, async_scheduling=asynchronous) as llm:
        other = llm.stream(PROMPT, GREEDY)
        next(other)
        monkeypatch.setattr(Decoder, "forward", failing)
        with pytest.raises(EngineClosedError, match="no memory left") as caught:
            llm.generate([PROMPT] * 3, GREEDY, use_tqdm=False)
        assert isinstance(caught.value.__cause__, RuntimeError)
        monkeypatch.setattr(Decoder, "forward", forward)
        with pytest.raises(EngineClosedError, match="no memory left"):
            list(other)
        with pytest.raises(EngineClosedError, match="no memory left"):
            llm.generate(PROMPT, GREEDY, use_tqdm=False)


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_closed_engine(tiny_llama: Path, asynchronous: bool) -> None:
    llm = load(tiny_llama, async_scheduling=asynchronous)
    stream = llm.stream(PROMPT, GREEDY)
    next(stream)
    llm.close()
    llm.close()
    with pytest.raises(EngineClosedError, match="closed"):
        next(stream)
    with pytest.raises(EngineClosedError, match="closed"):
        llm.generate(PROMPT, GREEDY, use_tqdm=False)
