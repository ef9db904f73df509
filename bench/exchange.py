"""`python -m bench exchange`: what the draft exchange costs over gRPC and shared memory, on one host, with 64 rows.

A drafter runs as its own processes, as `outrider drafter` does. Measured are the round trip of a batch, with a method
that costs next to nothing and with the n-gram method, and the host time of the codec on each side.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import multiprocessing
import random
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from bench.records import Check, Sample, make_record, write_record
from common.draft_codec import decode_drafter_frame, decode_verifier_frame, encode_reply, encode_update
from common.draft_exchange import (
    Branch,
    BranchBatch,
    DrafterLoad,
    DraftReply,
    ModelIdentity,
    RowCommitted,
    RowOpened,
    SessionUpdate,
    VerifierHello,
)
from common.logging import configure_logging
from drafter_svc.config import DrafterConfig
from drafter_svc.server import serve_drafter
from drafter_svc.worker import run_worker
from model_executor.row_state import RowState
from verifier_svc.drafts.grpc_transport import GrpcTransport
from verifier_svc.drafts.landing import LandingBuffer
from verifier_svc.drafts.shared_memory import SharedMemoryOptions

MAX_ROUND_TRIP_US = 400.0
MAX_CODEC_US = 30.0
BRANCH_LEN = 8
PROMPT_LEN = 256
SHM_DIR = "/dev/shm"
VOCAB_SIZE = 6144
_MAX_TOKENS = 1 << 20
_SPAWN = multiprocessing.get_context("spawn")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rows", type=int, default=64, help="rows of a batch")
    parser.add_argument("--round-trips", type=int, default=2000, help="of each kind, in 5 runs")


def run(args: argparse.Namespace) -> int:
    """Measure, print a table, write a record. Exit status 1 if a bound is missed."""
    torch.set_num_threads(1)
    console = Console()
    samples: dict[str, Sample] = measure_codec(args.rows)
    samples |= measure_landing(args.rows)
    per_run = args.round_trips // 5
    with running_drafter(run_repeating_worker) as address:
        samples["round trip"] = measure_round_trips(address, args.rows, per_run)
        samples["round trip, shared memory"] = measure_round_trips(address, args.rows, per_run, is_shared=True)
    with running_drafter(run_worker) as address:
        samples["round trip with n-gram"] = measure_round_trips(address, args.rows, per_run)
        samples["the same, shared memory"] = measure_round_trips(address, args.rows, per_run, is_shared=True)
        samples["health check"] = measure_health(address, 100)
        with busy_verifier(address, args.rows):
            samples["health check beside a busy n-gram"] = measure_health(address, 100)
    table = Table(title=f"{args.rows} rows, loopback, us")
    for column in ("", "p50", "p99"):
        table.add_column(column, justify="left" if not column else "right")
    for name, sample in samples.items():
        table.add_row(name, f"{sample.median:.1f}", f"{sample.p99:.1f}")
    console.print(table)
    verifier = samples["encode update"].median + samples["decode branches"].median
    drafter = samples["decode update"].median + samples["encode branches"].median
    checks = [
        Check("round trip, p50, us", samples["round trip"].median, MAX_ROUND_TRIP_US, at_least=False),
        Check("encode + decode in the verifier, us", verifier, MAX_CODEC_US, at_least=False),
        Check("encode + decode in the drafter, us", drafter, MAX_CODEC_US, at_least=False),
    ]
    for check in checks:
        console.print(str(check))
    config: dict[str, Any] = {"rows": args.rows, "branch_len": BRANCH_LEN, "prompt_len": PROMPT_LEN}
    results = {"us": {name: asdict(sample) for name, sample in samples.items()}}
    console.print(f"record: {write_record(make_record('exchange', config, results, checks), args.output)}")
    return 0 if all(check.holds for check in checks) else 1


def measure_codec(num_rows: int) -> dict[str, Sample]:
    """Host time of each direction on each side."""
    rng = random.Random(0)
    update = SessionUpdate(committed=[RowCommitted(row, 9, 700, _tokens(rng, 1 + row % 4)) for row in range(num_rows)])
    branches = BranchBatch.of([Branch(row, 9, 704, _tokens(rng, BRANCH_LEN)) for row in range(num_rows)])
    reply = DraftReply(7, branches, [])
    load = DrafterLoad(num_rows, 256, 1, 0)
    (update_frame,) = encode_update(update, 7, _MAX_TOKENS)
    reply_frame = encode_reply(reply, load)
    return {
        "encode update": _time(lambda: encode_update(update, 7, _MAX_TOKENS)),
        "decode update": _time(lambda: decode_verifier_frame(update_frame, _MAX_TOKENS)),
        "encode branches": _time(lambda: encode_reply(reply, load)),
        "decode branches": _time(lambda: decode_drafter_frame(reply_frame, _MAX_TOKENS)),
    }


def measure_landing(num_rows: int) -> dict[str, Sample]:
    """Host time of landing and matching a batch of branches."""
    rng = random.Random(0)
    rows = RowState(num_rows, 1024, 16, torch.device("cpu"))
    for row in range(num_rows):
        rows.set_row(row, _tokens(rng, PROMPT_LEN), PROMPT_LEN, 0, 1024)
    landing = LandingBuffer(num_rows, 4, BRANCH_LEN, 3, torch.device("cpu"))
    branches = BranchBatch.of([Branch(row, 0, PROMPT_LEN, _tokens(rng, BRANCH_LEN)) for row in range(num_rows)])
    idx_mapping, limit = torch.arange(num_rows), torch.full((num_rows,), 3)
    return {
        "land branches": _time(lambda: landing.put(branches)),
        "match branches": _time(lambda: landing.match(rows, idx_mapping, limit)),
    }


def measure_round_trips(address: str, num_rows: int, per_run: int, is_shared: bool = False) -> Sample:
    """From handing over an update to having the reply, us."""
    verifier = _Verifier(address, num_rows, SharedMemoryOptions(Path(SHM_DIR), is_required=True) if is_shared else None)
    try:
        times: list[float] = []
        for run_index in range(6):
            found = [verifier.round_trip() for _ in range(per_run)]
            if run_index > 0:  # the first run warms up
                times += found
        return Sample.of(times)
    finally:
        verifier.close()


def measure_health(address: str, count: int) -> Sample:
    """How long a health check takes, us."""
    import grpc
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    with grpc.insecure_channel(address) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        times: list[float] = []
        for _ in range(count):
            start = time.perf_counter()
            stub.Check(health_pb2.HealthCheckRequest(), timeout=10)
            times.append((time.perf_counter() - start) * 1e6)
            time.sleep(0.005)
        return Sample.of(times[5:])


class _Verifier:
    """Rows that grow by two tokens a step."""

    def __init__(self, address: str, num_rows: int, shared_memory: SharedMemoryOptions | None = None) -> None:
        hello = VerifierHello("bench", ModelIdentity(vocab_size=VOCAB_SIZE), 1 << 14, max(1, num_rows), 1, BRANCH_LEN)
        self._transport = GrpcTransport(address, hello, shared_memory)
        end = time.monotonic() + 10
        while self._transport.session is None:
            if time.monotonic() > end:
                raise TimeoutError(f"no drafter at {address}")
            time.sleep(0.01)
        self._rng = random.Random(num_rows)
        self._num_rows = num_rows
        self._text = _tokens(self._rng, PROMPT_LEN)
        self._generation = 0
        self._open()

    def round_trip(self) -> float:
        """One step, us."""
        if self._length > 2 * PROMPT_LEN:
            self._open()
        tokens = [self._text[self._length % PROMPT_LEN], self._text[(self._length + 1) % PROMPT_LEN]]
        update = SessionUpdate(
            committed=[RowCommitted(row, self._generation, self._length, tokens) for row in range(self._num_rows)]
        )
        self._length += 2
        return self._exchange(update)

    def close(self) -> None:
        self._transport.close()

    def _open(self) -> None:
        self._generation += 1
        self._length = PROMPT_LEN
        rows = range(self._num_rows)
        self._exchange(
            SessionUpdate(
                opened=[
                    RowOpened(row, self._generation, "", self._text, PROMPT_LEN, 1 << 14, 3, 0, 0.0, 1.0, 0, 0.0)
                    for row in rows
                ]
            )
        )

    def _exchange(self, update: SessionUpdate) -> float:
        start = time.perf_counter()
        sequence = self._transport.send(update)
        if sequence is None:
            raise ConnectionError("the drafter is gone")
        while not any(a.reply.answered_sequence >= sequence for a in self._transport.poll(10.0)):
            pass
        return (time.perf_counter() - start) * 1e6


@contextlib.contextmanager
def busy_verifier(address: str, num_rows: int) -> Iterator[None]:
    """Another process that keeps the draft method busy."""
    process = _SPAWN.Process(target=_keep_busy, args=(address, num_rows), daemon=True)
    process.start()
    time.sleep(4.0)  # torch has to be imported
    try:
        yield
    finally:
        process.kill()
        process.join()


def _keep_busy(address: str, num_rows: int) -> None:
    torch.set_num_threads(1)
    verifier = _Verifier(address, num_rows)
    while True:
        verifier.round_trip()


@contextlib.contextmanager
def running_drafter(worker: Callable[..., None]) -> Iterator[str]:
    """A drafter with this worker on a free port, in processes of its own."""
    ours, theirs = _SPAWN.Pipe()
    process = _SPAWN.Process(target=_serve, args=(theirs, worker))
    process.start()
    try:
        if not ours.poll(60):
            raise TimeoutError("the drafter did not start")
        yield ours.recv()
    finally:
        process.terminate()
        process.join()


def _serve(conn: Connection, worker: Callable[..., None]) -> None:
    configure_logging("error")
    asyncio.run(serve_drafter(DrafterConfig(port=0), "error", conn.send, worker))


def run_repeating_worker(sock: socket.socket, config: DrafterConfig, log_level: str) -> None:
    run_worker(sock, config, log_level, _Repeat())


class _Repeat:
    """Claims that the last token goes on for ever: a method that costs next to nothing."""

    def propose(self, rows: RowState, idx_mapping: Tensor, max_draft_tokens: Tensor) -> Tensor:
        columns = rows.committed_len[idx_mapping][:, None] + torch.arange(BRANCH_LEN)  # [num_reqs, BRANCH_LEN]
        last = rows.token_ids[idx_mapping, columns[:, 0] - 1]
        rows.token_ids[idx_mapping[:, None], columns] = last[:, None].expand(-1, BRANCH_LEN)
        return max_draft_tokens

    def observe(self, update: SessionUpdate) -> None:
        pass

    def close(self) -> None:
        pass


def _tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(VOCAB_SIZE) for _ in range(count)]


def _time(call: Callable[[], object], repeats: int = 50, inner: int = 100) -> Sample:
    """us of one call; each value is the mean of a hundred."""
    call()
    times: list[float] = []
    for _ in range(repeats):
        start = time.perf_counter()
        for _ in range(inner):
            call()
        times.append((time.perf_counter() - start) / inner * 1e6)
    return Sample.of(times)
