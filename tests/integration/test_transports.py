"""The same seeds, however drafts travel: one engine for each way, all in one test, so that none can drift apart."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest
import torch

from common.config import EngineConfig
from common.draft_exchange import ModelIdentity
from drafter_svc.builder import build_core
from drafter_svc.config import DrafterConfig
from drafter_svc.core import LocalDrafter
from model_executor.drafting import NoDraft
from outrider.llm import LLM
from tests.drafter_process import running_drafter
from tests.engine_calls import connected as connected_to_verifier
from tests.engine_calls import generate, make_request, wait_idle
from tests.remote_llm import (
    GREEDY,
    MAX_MODEL_LEN,
    OPTIONS,
    PROMPTS,
    RANDOM,
    VOCAB_SIZE,
    K,
    check_returned,
    connected,
    drafts_of,
    tokens,
    wait_until_idle,
)
from tests.service_process import OUTRIDER, running
from tests.tiny_models import make_model, make_tokenizer
from verifier_svc.drafts.builder import build_remote_drafts, build_verifier_hello
from verifier_svc.drafts.in_process import InProcessTransport

EITHER = {"temperature 0": [GREEDY] * len(PROMPTS), "temperature 1": [RANDOM] * len(PROMPTS)}
Outputs = dict[str, list[list[int]]]


def outputs_of(llm: LLM) -> Outputs:
    return {name: tokens(llm, params) for name, params in EITHER.items()}


@contextmanager
def in_process(model: Path) -> Iterator[LLM]:
    config = EngineConfig(model=str(model), **OPTIONS)
    hello = build_verifier_hello(config, ModelIdentity(), VOCAB_SIZE, MAX_MODEL_LEN)
    transport = InProcessTransport(LocalDrafter(build_core(DrafterConfig(max_model_len=MAX_MODEL_LEN)), hello))
    drafts = build_remote_drafts([transport], hello, K, NoDraft(), 0.0, torch.device("cpu"))
    with LLM.with_draft_method(str(model), drafts, **OPTIONS) as llm:
        yield llm
        check_returned(llm)


def behind_a_verifier(model: Path, drafter: str) -> Outputs:
    """What a client of VllmEngine gets, from a verifier with a drafter."""
    flags = [f"--max-model-len={MAX_MODEL_LEN}", "--max-num-seqs=4", "--kv-cache-memory=8M", f"--drafter={drafter}"]
    flags += [f"--num-speculative-tokens={K}", "--draft-fallback=none", "--num-threads=1", "--port=0"]
    outputs: Outputs = {}
    command = [*OUTRIDER, "verifier", str(model), *flags]
    with running(command) as process, connected_to_verifier(process.wait_ready()) as stub:
        for name, (params, *_) in EITHER.items():
            values = {
                "temperature": params.temperature,
                "max_tokens": params.max_tokens,
                "ignore_eos": True,
                "seed": params.seed,
                "logit_bias": params.logit_bias,
            }
            outputs[name] = [generate(stub, make_request(prompt, **values))[0].token_ids for prompt in PROMPTS]
        wait_idle(stub)
    return outputs


def test_same_tokens_however_drafts_travel(tmp_path_factory: pytest.TempPathFactory, tmp_path: Path) -> None:
    model = make_model(tmp_path_factory.mktemp("tiny"), max_position_embeddings=MAX_MODEL_LEN)
    make_tokenizer(model)
    with LLM(str(model), drafter="none", **OPTIONS) as llm:
        expected = outputs_of(llm)
    with LLM(str(model), drafter="ngram", **OPTIONS) as llm:
        assert outputs_of(llm) == expected, "n-gram drafts of the engine's own"
    with running_drafter("--model", str(model), "--shm-dir", str(tmp_path)) as drafter:
        ways: dict[str, Callable[[], AbstractContextManager[LLM]]] = {
            "in process": lambda: in_process(model),
            "shared memory": lambda: connected(
                model, drafter.address, transport="shm", draft_shm_dir=str(tmp_path), draft_deadline=100.0
            ),
            "gRPC": lambda: connected(model, drafter.address, transport="grpc"),
        }
        for name, way in ways.items():
            with way() as llm:
                assert outputs_of(llm) == expected, name
                (stats,) = drafts_of(llm).stats.drafters
                assert stats.num_accepted_tokens > 100, name
        assert behind_a_verifier(model, f"grpc://{drafter.address}") == expected, "VllmEngine"
        wait_until_idle(drafter.address)
        assert list(tmp_path.iterdir()) == []
