"""Drafters as real processes whose frames go through shared memory: the same tokens, and nothing is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from common.draft_exchange import ModelIdentity, VerifierHello
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
    tokens,
    wait_until_idle,
)
from tests.service_process import ROOT
from tests.tiny_models import make_model, make_tokenizer
from verifier_svc.drafts.grpc_transport import GrpcTransport
from verifier_svc.drafts.shared_memory import SharedMemoryOptions
from verifier_svc.messages import DrafterCounts

HELLO = VerifierHello("test", ModelIdentity(vocab_size=VOCAB_SIZE), MAX_MODEL_LEN, 4, 4, 2 * (K + 1))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tiny")
    make_model(directory, max_position_embeddings=MAX_MODEL_LEN)
    make_tokenizer(directory)
    return directory


@pytest.fixture(scope="module")
def expected(model: Path) -> list[list[int]]:
    with LLM(str(model), drafter="none", **OPTIONS) as llm:
        return tokens(llm, MIXED)


@pytest.fixture(scope="module")
def expected_long(model: Path) -> list[int]:
    with LLM(str(model), drafter="none", **OPTIONS) as llm:
        (output,) = llm.generate(PROMPTS[5], LONG, use_tqdm=False)
    return output.outputs[0].token_ids


@pytest.fixture(scope="module")
def shm_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a volume is that both services have."""
    return tmp_path_factory.mktemp("shm")


@pytest.fixture(scope="module")
def drafter(shm_dir: Path) -> Iterator[DrafterProcess]:
    """One that is not hurt by any test. What a dead one has left does not hold it up."""
    for name in ("outrider-0123456789abcdef-1", "outrider-0123456789abcdef-1.up", "outrider-0123456789abcdef-2.down"):
        (shm_dir / name).write_bytes(b"left behind")
    with running_drafter("--shm-dir", str(shm_dir)) as process:
        assert files(shm_dir) == []
        yield process


def counts_of(llm: LLM) -> DrafterCounts:
    (counts,) = drafts_of(llm).counts().drafters
    return counts


def files(directory: Path) -> list[str]:
    return [path.name for path in directory.iterdir()]


@pytest.mark.parametrize("transport", ["auto", "shm"])
def test_same_tokens(
    model: Path, drafter: DrafterProcess, shm_dir: Path, expected: list[list[int]], transport: str
) -> None:
    with connected(model, drafter.address, transport=transport, draft_shm_dir=str(shm_dir)) as llm:
        assert counts_of(llm).kind == "shared-memory"
        assert files(shm_dir) == [], "once both have them open, the names are gone"
        assert tokens(llm, MIXED) == expected
        counts = counts_of(llm)
        assert counts.num_accepted_tokens > 50
        assert counts.num_deadline_misses == counts.num_row_errors == counts.num_late_replies == 0
    wait_until_idle(drafter.address)


def test_another_directory_means_grpc_and_the_log_says_why(
    model: Path,
    drafter: DrafterProcess,
    shm_dir: Path,
    tmp_path: Path,
    expected: list[list[int]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    with connected(model, drafter.address, transport="auto", draft_shm_dir=str(tmp_path)) as llm:
        assert counts_of(llm).kind == "grpc"
        assert tokens(llm, MIXED) == expected
        assert counts_of(llm).num_accepted_tokens > 50
    assert "no shared memory with a drafter, using gRPC" in caplog.text
    assert "No such file or directory" in caplog.text
    wait_until(lambda: files(shm_dir) == [], "the files that nobody has opened are gone")


def test_shared_memory_or_nothing(drafter: DrafterProcess, tmp_path: Path) -> None:
    transport = GrpcTransport(drafter.address, HELLO, SharedMemoryOptions(tmp_path, is_required=True))
    try:
        wait_until(lambda: "shared memory is wanted" in transport.last_error, "refused")
        assert transport.session is None
        assert transport.kind == "grpc"
    finally:
        transport.close()


@pytest.mark.parametrize("is_seen_by_drafter", [True, False])
def test_damaged_memory_ends_that_session_and_no_other(
    model: Path, drafter: DrafterProcess, shm_dir: Path, expected_long: list[int], is_seen_by_drafter: bool
) -> None:
    options = {"transport": "shm", "draft_shm_dir": str(shm_dir)}
    with connected(model, drafter.address, **options) as llm, connected(model, drafter.address, **options) as other:
        stream, beside = Stream(llm), Stream(other)
        stream.run_until_drafts()
        beside.run_until_drafts()
        transport = drafts_of(llm).links[0].transport
        assert isinstance(transport, GrpcTransport)
        assert transport._shared_memory is not None
        channel = transport._shared_memory._channel
        # Until the damage has been seen nobody runs who would write the counter anew.
        if is_seen_by_drafter:
            channel._writer._counters[0] = (1 << 63) + 5
            channel._other_bell.ring()
            wait_until(lambda: transport._num_sessions == 2, "the drafter has ended the session")
            stream.run(20)
        else:
            os.killpg(drafter.process.pid, signal.SIGSTOP)
            try:
                channel._reader._counters[0] = (1 << 63) + 5
                stream.run(20)
            finally:
                os.killpg(drafter.process.pid, signal.SIGCONT)
            assert transport.num_malformed_frames == 1
        wait_until(lambda: counts_of(llm).is_up and transport._num_sessions == 2, "there is another session")
        stream.run_until_drafts()
        assert counts_of(llm).kind == "shared-memory"
        assert stream.finish() == expected_long
        assert beside.finish() == expected_long
        assert counts_of(other).num_sessions == 1
        assert files(shm_dir) == []
    wait_until_idle(drafter.address)


def test_kill_and_restart(model: Path, tmp_path: Path, expected_long: list[int]) -> None:
    options = {"transport": "shm", "draft_shm_dir": str(tmp_path)}
    with running_drafter("--shm-dir", str(tmp_path)) as first, connected(model, first.address, **options) as llm:
        stream = Stream(llm)
        stream.run_until_drafts()
        first.process.kill_group()
        assert stream.run(60) < 5.0
        wait_until(lambda: not counts_of(llm).is_up, "the loss is noticed")
        assert files(tmp_path) == []
        with running_drafter("--shm-dir", str(tmp_path), "--port", first.address.rpartition(":")[2]) as second:
            wait_until(lambda: counts_of(llm).is_up, "the drafter is back")
            stream.run_until_drafts()
            assert counts_of(llm).kind == "shared-memory"
            assert stream.finish() == expected_long
            wait_until_idle(second.address, num_streams=1)
            second.process.terminate()
            assert second.process.wait(10) == 0
        assert files(tmp_path) == []


def test_stop_and_continue(model: Path, tmp_path: Path, expected_long: list[int]) -> None:
    options = {"transport": "shm", "draft_shm_dir": str(tmp_path), "draft_deadline": 10.0}
    with running_drafter("--shm-dir", str(tmp_path)) as hung, connected(model, hung.address, **options) as llm:
        stream = Stream(llm)
        stream.run_until_drafts()
        before = counts_of(llm)
        os.killpg(hung.process.pid, signal.SIGSTOP)
        try:
            stream.run(40)
            counts = counts_of(llm)
            assert counts.num_hangs == 1
            assert counts.wait_s - before.wait_s < 0.1 + 2 * 0.01 + 0.05
            stream.run(40)
            assert counts_of(llm).wait_s == counts.wait_s
        finally:
            os.killpg(hung.process.pid, signal.SIGCONT)
        time.sleep(0.1)
        stream.run_until_drafts()
        assert counts_of(llm).num_sessions == 1
        assert stream.finish() == expected_long
        wait_until_idle(hung.address, num_streams=1)


VERIFIER = """
import sys, time
from pathlib import Path
from common.draft_exchange import ModelIdentity, RowOpened, SessionUpdate, VerifierHello
from verifier_svc.drafts.grpc_transport import GrpcTransport
from verifier_svc.drafts.shared_memory import SharedMemoryOptions

address, directory = sys.argv[1:]
hello = VerifierHello("killed", ModelIdentity(vocab_size=320), 1024, 4, 4, 8)
transport = GrpcTransport(address, hello, SharedMemoryOptions(Path(directory), is_required=True))
while transport.session is None:
    time.sleep(0.01)
opened = [RowOpened(row, 1, "", [1, 2, 3, 1, 2, 3], 6, 100, 3, 0, 0.0, 1.0, 0, 0.0) for row in range(3)]
transport.send(SessionUpdate(opened=opened))
arrivals = transport.poll(20.0)
print(transport.kind, len(arrivals[0].reply.branches), "torch" in sys.modules, flush=True)
time.sleep(60)
"""


def test_a_verifier_is_killed(drafter: DrafterProcess, shm_dir: Path) -> None:
    command = [sys.executable, "-c", VERIFIER, drafter.address, str(shm_dir)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "shared-memory 3 False\n"
        finally:
            process.kill()
    wait_until_idle(drafter.address)
    assert files(shm_dir) == []
