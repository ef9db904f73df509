"""An `LLM` with remote drafters, for tests: what it is asked, and how to see what becomes of its drafts."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc

from common.protos.outrider.v1 import drafter_pb2 as pb
from common.sampling_params import SamplingParams
from outrider.llm import LLM
from tests.drafter_process import wait_until
from verifier_svc.drafts.device_drafts import RemoteDeviceDrafts
from verifier_svc.drafts.remote_drafts import RemoteDrafts
from verifier_svc.engine.executor import InlineExecutor

VOCAB_SIZE, MAX_MODEL_LEN, K = 320, 1024, 3
LONG_TOKENS = 800
FEW_TOKENS = dict.fromkeys((40, 41, 42, 43), 60.0)
PROMPTS = [([40, 41, 42, 43, 41] * 20)[: 7 + 9 * index] for index in range(6)]
GREEDY = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
RANDOM = SamplingParams(temperature=1.0, max_tokens=60, seed=5, logit_bias=FEW_TOKENS, ignore_eos=True)
LONG = RANDOM.model_copy(update={"max_tokens": LONG_TOKENS})
MIXED = [GREEDY, RANDOM, GREEDY, RANDOM, RANDOM, GREEDY]
OPTIONS: dict[str, Any] = {
    "max_model_len": MAX_MODEL_LEN,
    "max_num_seqs": 4,
    "kv_cache_memory": "8M",
    "num_speculative_tokens": K,
}


def tokens(llm: LLM, params: list[SamplingParams]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, params, use_tqdm=False)]


def drafts_of(llm: LLM) -> RemoteDrafts | RemoteDeviceDrafts:
    """Of steps on a CPU, or of those that choose their drafts on a GPU."""
    executor = llm._engine.executor
    drafts = executor._runner._draft_method if isinstance(executor, InlineExecutor) else executor._drafts  # type: ignore[attr-defined]
    assert isinstance(drafts, RemoteDrafts | RemoteDeviceDrafts)
    return drafts


@contextlib.contextmanager
def connected(model: Path, *addresses: str, transport: str = "grpc", **options: Any) -> Iterator[LLM]:
    """An LLM whose drafters are there, and which has all rows and blocks back at the end."""
    drafter = ",".join(f"grpc://{address}" for address in addresses)
    ours = {"draft_deadline": 100.0, "draft_fallback": "none", "draft_transport": transport}
    values = OPTIONS | ours | options
    with LLM(str(model), drafter=drafter, **values) as llm:
        wait_until(lambda: all(is_up(llm)), "drafters are there")
        yield llm
        check_returned(llm)


def check_returned(llm: LLM) -> None:
    """No row is taken, no block is used but as a cache, and no drafter has a row of this engine on its list."""
    orchestrator = llm._engine.orchestrator
    assert (orchestrator.num_running, orchestrator.num_waiting) == (0, 0)
    assert orchestrator.pool.num_free == orchestrator.pool.num_blocks - 1
    assert [len(link.rows) for link in drafts_of(llm).links] == [0] * len(drafts_of(llm).links)


def is_up(llm: LLM) -> list[bool]:
    return [link.transport.session is not None for link in drafts_of(llm).links]


def info(address: str) -> pb.InfoResponse:
    with grpc.insecure_channel(address) as channel:
        call: Any = channel.unary_unary("/outrider.v1.Drafter/Info")
        return pb.InfoResponse.FromString(call(b"", timeout=10))


def wait_until_idle(address: str, num_streams: int = 0) -> None:
    """No row is taken, and no verifier connected but these."""

    def is_idle() -> bool:
        load = info(address).load
        return (load.num_rows, load.num_streams) == (0, num_streams)

    wait_until(is_idle, "the drafter has all rows back")


class Stream:
    """One request whose steps run when the test asks for them."""

    def __init__(self, llm: LLM, params: SamplingParams = LONG) -> None:
        self._deltas = llm.stream(PROMPTS[5], params)
        self._drafts = drafts_of(llm)
        self.tokens: list[int] = []

    def run(self, num_tokens: int) -> float:
        """Generate at least this many; returns the seconds that it took."""
        start = time.monotonic()
        goal = len(self.tokens) + num_tokens
        for delta in self._deltas:
            self.tokens += delta.token_ids
            if len(self.tokens) >= goal:
                break
        return time.monotonic() - start

    def run_until_drafts(self, index: int = 0) -> None:
        """Generate until drafts of that drafter have been verified."""
        stats = self._drafts.stats.drafters[index]
        goal = stats.num_drafts + 3
        for step in range(80):
            self.run(1)
            if stats.num_drafts >= goal:
                return
            time.sleep(2e-3 * step)  # on a busy machine 80 steps pass before the drafter has had a turn
        raise AssertionError(f"no drafts of {stats}")

    def finish(self) -> list[int]:
        self.run(LONG_TOKENS)
        return self.tokens
