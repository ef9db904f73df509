"""Drafters as real processes: the same tokens as without drafts, whatever happens to the drafter."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from common.config import EngineConfig
from common.draft_codec import encode_update, encode_verifier_hello
from common.draft_exchange import ModelIdentity, RowOpened, SessionUpdate, VerifierHello
from common.protos.outrider.v1 import drafter_pb2 as pb
from drafter_svc.builder import build_core
from drafter_svc.config import DrafterConfig
from drafter_svc.core import LocalDrafter
from model_executor.drafting import NoDraft
from outrider.llm import LLM
from tests.drafter_process import DrafterProcess, running_drafter, wait_until
from tests.remote_llm import (
    LONG,
    MAX_MODEL_LEN,
    MIXED,
    OPTIONS,
    PROMPTS,
    VOCAB_SIZE,
    K,
    Stream,
    connected,
    drafts_of,
    info,
    is_up,
    tokens,
    wait_until_idle,
)
from tests.service_process import OUTRIDER, ROOT, wait_gone
from tests.tiny_models import make_model, make_tokenizer
from verifier_svc.drafts.builder import build_remote_drafts, build_verifier_hello
from verifier_svc.drafts.in_process import InProcessTransport


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tiny")
    make_model(directory, max_position_embeddings=MAX_MODEL_LEN)
    make_tokenizer(directory)
    return directory


@pytest.fixture(scope="module")
def drafter(model: Path) -> Iterator[DrafterProcess]:
    """One that is not hurt by any test."""
    with running_drafter("--model", str(model)) as process:
        yield process


@pytest.fixture(scope="module")
def expected(model: Path) -> list[list[int]]:
    with LLM(str(model), drafter="none", **OPTIONS) as llm:
        return tokens(llm, MIXED)


@pytest.mark.parametrize(
    "options", [{}, {"async_scheduling": False}, {"draft_deadline": 0.0, "draft_fallback": "ngram"}]
)
def test_same_tokens_over_grpc(
    model: Path, drafter: DrafterProcess, expected: list[list[int]], options: dict[str, Any]
) -> None:
    with connected(model, drafter.address, **options) as llm:
        assert tokens(llm, MIXED) == expected
        (stats,) = drafts_of(llm).stats.drafters
        assert stats.num_row_errors == 0
        if options.get("draft_deadline") != 0:
            assert stats.num_accepted_tokens > 50
        wait_until_idle(drafter.address, num_streams=1)
    wait_until_idle(drafter.address)


@pytest.mark.parametrize("asynchronous", [True, False])
def test_same_tokens_in_process(model: Path, expected: list[list[int]], asynchronous: bool) -> None:
    config = EngineConfig(model=str(model), **OPTIONS)
    hello = build_verifier_hello(config, ModelIdentity(), VOCAB_SIZE, MAX_MODEL_LEN)
    core = build_core(DrafterConfig(max_model_len=MAX_MODEL_LEN))
    transport = InProcessTransport(LocalDrafter(core, hello))
    drafts = build_remote_drafts([transport], hello, K, NoDraft(), 0.0, torch.device("cpu"))
    with LLM.with_draft_method(str(model), drafts, async_scheduling=asynchronous, **OPTIONS) as llm:
        assert tokens(llm, MIXED) == expected
        (stats,) = drafts.stats.drafters
        assert (stats.num_stale_branches, stats.num_invalid_branches, stats.num_row_errors) == (0, 0, 0)
        assert stats.num_accepted_tokens > 50
        assert core.load().num_rows == 0
    assert core.load().num_streams == 0


def test_no_drafter_at_the_address(model: Path, expected: list[list[int]]) -> None:
    with LLM(str(model), drafter="grpc://127.0.0.1:1", **OPTIONS) as llm:
        assert tokens(llm, MIXED) == expected
        assert drafts_of(llm).stats.num_fallback_drafts > 0
        assert drafts_of(llm).stats.num_waits == 0


@pytest.fixture(scope="module")
def expected_long(model: Path) -> list[int]:
    with LLM(str(model), drafter="none", **OPTIONS) as llm:
        (output,) = llm.generate(PROMPTS[5], LONG, use_tqdm=False)
    return output.outputs[0].token_ids


def test_kill_and_restart(model: Path, expected_long: list[int]) -> None:
    with running_drafter() as first, connected(model, first.address) as llm:
        stream = Stream(llm)
        stream.run_until_drafts()
        first.process.kill_group()
        seconds = stream.run(60)
        assert seconds < 5.0
        wait_until(lambda: not any(is_up(llm)), "the loss is noticed")
        stats = drafts_of(llm).stats
        num_waits = stats.num_waits
        stream.run(20)
        assert stats.num_waits == num_waits, "nobody to wait for"
        with running_drafter("--port", first.address.rpartition(":")[2]) as second:
            wait_until(lambda: all(is_up(llm)), "the drafter is back")
            stream.run_until_drafts()
            assert stats.drafters[0].num_sessions == 2
            assert stats.drafters[0].num_resyncs >= 1
            assert stream.finish() == expected_long
            wait_until_idle(second.address, num_streams=1)


def test_stop_and_continue(model: Path, expected_long: list[int]) -> None:
    with running_drafter() as drafter, connected(model, drafter.address, draft_deadline=10.0) as llm:
        stats = drafts_of(llm).stats.drafters[0]
        stream = Stream(llm)
        stream.run_until_drafts()
        waited_s = stats.wait_s
        os.killpg(drafter.process.pid, signal.SIGSTOP)
        try:
            stream.run(40)
            assert stats.num_hangs == 1
            assert stats.wait_s - waited_s < 0.1 + 2 * 0.01 + 0.05
            stream.run(40)
        finally:
            os.killpg(drafter.process.pid, signal.SIGCONT)
        wait_until(lambda: info(drafter.address).load.num_waiting_frames == 0, "it answers again")
        stream.run_until_drafts()
        assert stream.finish() == expected_long
        wait_until_idle(drafter.address, num_streams=1)


def test_rows_of_a_drafter_that_dies_move_to_the_other(
    model: Path, drafter: DrafterProcess, expected: list[list[int]], expected_long: list[int]
) -> None:
    with running_drafter() as other, connected(model, other.address, drafter.address) as llm:
        stream = Stream(llm)
        stream.run_until_drafts(index=0)
        other.process.kill_group()
        stream.run_until_drafts(index=1)
        assert drafts_of(llm).stats.num_rows_moved == 1
        assert stream.finish() == expected_long
        assert tokens(llm, MIXED) == expected
        wait_until_idle(drafter.address, num_streams=1)


def test_the_worker_dies(model: Path, expected_long: list[int]) -> None:
    """The process that drafts: the one that speaks gRPC says so, and ends."""
    with running_drafter() as drafter, connected(model, drafter.address) as llm:
        stream = Stream(llm)
        stream.run_until_drafts()
        for child in drafter.process.children():
            os.kill(child, signal.SIGKILL)
        assert drafter.process.wait(10) == 1
        assert stream.finish() == expected_long


def test_the_rpc_process_dies(model: Path) -> None:
    """The worker does not outlive it."""
    with running_drafter() as drafter:
        children = drafter.process.children()
        assert children
        os.kill(drafter.process.pid, signal.SIGKILL)
        for child in children:
            wait_gone(child, 5.0)


def test_a_verifier_dies(model: Path, drafter: DrafterProcess) -> None:
    """Its rows come back with the end of its stream."""
    with RawVerifier(drafter.address) as verifier:
        verifier.open_rows(3)
        wait_until(lambda: info(drafter.address).load.num_rows == 3, "rows are open")
    wait_until_idle(drafter.address)


def test_another_vocabulary_is_refused_with_both_values(
    model: Path, drafter: DrafterProcess, tmp_path: Path, expected: list[list[int]]
) -> None:
    make_model(tmp_path, vocab_size=330)
    make_tokenizer(tmp_path, vocab_size=330)
    with RawVerifier(drafter.address, vocab_size=330) as verifier:
        assert verifier.status() == (
            grpc.StatusCode.FAILED_PRECONDITION,
            "vocab_size: the drafter has 320, the verifier 330",
        )
    # The verifier goes on without it, and says why.
    with running_drafter("--model", str(tmp_path)) as wrong:
        with LLM(str(model), drafter=f"grpc://{wrong.address}", **OPTIONS) as llm:
            assert tokens(llm, MIXED) == expected
            transport = drafts_of(llm).links[0].transport
            wait_until(lambda: "vocab" in transport.last_error, "it is refused")  # type: ignore[attr-defined]
            assert "the drafter has 330, the verifier 320" in transport.last_error  # type: ignore[attr-defined]
        wait_until_idle(wrong.address)


@pytest.mark.parametrize(
    "frame",
    [
        b"\xff" * 40,
        b"",
        pb.VerifierFrame(sequence=1, committed=pb.CommitBatch(row=b"abc")).SerializeToString(),
        pb.VerifierFrame(sequence=1, opened=pb.OpenBatch(token_ids=b"\0" * (3 << 20))).SerializeToString(),
        b"\0" * (1 << 23),
    ],
    ids=["garbage", "empty", "columns", "too many tokens", "oversized"],
)
def test_a_hostile_stream_ends_and_the_others_go_on(model: Path, drafter: DrafterProcess, frame: bytes) -> None:
    with RawVerifier(drafter.address) as good, RawVerifier(drafter.address) as bad:
        good.open_rows(2)
        bad.send(frame)
        code, _ = bad.status() if frame else (grpc.StatusCode.INVALID_ARGUMENT, "")
        assert code in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.RESOURCE_EXHAUSTED)
        good.open_rows(1, sequence=2, first_row=2)
        wait_until(lambda: info(drafter.address).load.num_rows == 3, "the other stream works")
    wait_until_idle(drafter.address)


def test_health_reflection_and_info(drafter: DrafterProcess) -> None:
    with grpc.insecure_channel(drafter.address) as channel:
        health: Any = health_pb2_grpc.HealthStub(channel)
        for service in ("", "outrider.v1.Drafter"):
            response = health.Check(health_pb2.HealthCheckRequest(service=service), timeout=10)
            assert response.status == health_pb2.HealthCheckResponse.SERVING
        stub: Any = reflection_pb2_grpc.ServerReflectionStub(channel)
        request = reflection_pb2.ServerReflectionRequest(list_services="")
        (answer,) = stub.ServerReflectionInfo(iter([request]), timeout=10)
        assert "outrider.v1.Drafter" in {service.name for service in answer.list_services_response.service}
    answer = info(drafter.address)
    assert (answer.method, answer.model.vocab_size) == ("ngram", VOCAB_SIZE)
    assert len(answer.model.vocabulary_fingerprint) == 64


def test_sigterm_ends_it_under_a_verifier_that_works(model: Path, expected_long: list[int]) -> None:
    with running_drafter() as drafter, connected(model, drafter.address) as llm:
        stream = Stream(llm)
        stream.run_until_drafts()
        children = drafter.process.children()
        drafter.process.terminate()
        assert stream.finish() == expected_long
        assert drafter.process.wait(10) == 0
        for child in children:
            wait_gone(child, 5.0)


@pytest.mark.parametrize("wrong", ["port", "method"])
def test_wrong_options_are_one_line(drafter: DrafterProcess, wrong: str) -> None:
    arguments, message = {
        "port": (["--port", drafter.address.rpartition(":")[2]], "address that can be bound"),
        "method": (["--port", "0", "--method", "ngrm"], "did you mean 'ngram'?"),
    }[wrong]
    result = subprocess.run([*OUTRIDER, "drafter", *arguments], capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert result.returncode == 2
    assert message in result.stderr
    assert "Traceback" not in result.stderr


class RawVerifier:
    """A peer that sends the frames that a test gives it."""

    def __init__(self, address: str, vocab_size: int = VOCAB_SIZE) -> None:
        self._channel = grpc.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)])
        self._frames: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        call: Any = self._channel.stream_stream("/outrider.v1.Drafter/Session")
        self._call = call(iter(self._frames.get, None), timeout=30)
        self.send(encode_verifier_hello(VerifierHello("raw", ModelIdentity(vocab_size=vocab_size), 512, 8, 1, 8)))

    def __enter__(self) -> RawVerifier:
        return self

    def __exit__(self, *_: object) -> None:
        self._call.cancel()
        self._frames.put(None)
        self._channel.close()

    def send(self, frame: bytes) -> None:
        self._frames.put(frame)

    def open_rows(self, count: int, sequence: int = 1, first_row: int = 0) -> None:
        text = [1, 2, 3, 1, 2, 3]
        rows = range(first_row, first_row + count)
        opened = [RowOpened(row, 1, f"raw-{row}", text, 6, 100, 3, 0, 0.0, 1.0, 0, 0.0) for row in rows]
        (frame,) = encode_update(SessionUpdate(opened=opened), sequence, 1000)
        self.send(frame)

    def status(self) -> tuple[grpc.StatusCode, str]:
        """How the stream ended."""
        with contextlib.suppress(grpc.RpcError):
            for _ in self._call:
                pass
        return self._call.code(), self._call.details()
