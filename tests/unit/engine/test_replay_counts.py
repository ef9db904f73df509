"""Counts of captured steps, from the executor to the front."""

from __future__ import annotations

import socket
import threading
import time
from dataclasses import dataclass, field

import msgspec

from common.sampling_params import SamplingParams
from common.types import Request
from tests.fake_engine import build
from verifier_svc.engine import process
from verifier_svc.engine.executor import StepExecutor
from verifier_svc.engine.link import EngineLink
from verifier_svc.engine.process import EngineProcess
from verifier_svc.engine.replay_counts import read_replays, replay_counter
from verifier_svc.engine.step_shape import StepShape
from verifier_svc.messages import AddRequest, FrameReader, FromEngine, GraphReplays, ReplayCounts, Report, Stop, frame
from verifier_svc.orchestrator.step import StepOutcome, StepPlan


@dataclass
class Stats:
    num_replays: dict[StepShape, int] = field(default_factory=dict)
    num_eager_steps: int = 0


USED, UNUSED = StepShape(2, 3, None, True), StepShape(1, 0, None, True)


class CountingExecutor:
    """Has two graphs, and counts every step as a run of the first."""

    def __init__(self, executor: StepExecutor) -> None:
        self._executor = executor
        self.stats = Stats({USED: 0, UNUSED: 0})

    def submit(self, plan: StepPlan) -> None:
        self.stats.num_replays[USED] += 1
        self._executor.submit(plan)

    def result(self) -> StepOutcome:
        return self._executor.result()

    def close(self) -> None:
        self._executor.close()


def num_replays(report: Report) -> int:
    """Of the graph for 2 requests; -1: the report does not say."""
    return -1 if report.replays is None else report.replays.graphs[1].num_replays


def test_every_graph_has_a_count_of_its_own() -> None:
    decode, mixed = StepShape(8, 3, None, True), StepShape(8, 3, 32, True)
    processed, smaller = StepShape(8, 3, None, False), StepShape(4, 3, None, True)
    larger, without = StepShape(8, 3, 512, True), StepShape(8, 0, None, True)
    counts = read_replays(Stats({decode: 5, mixed: 4, processed: 3, without: 0, smaller: 1, larger: 2}, 9))
    expected = [(8, 0, 8, False, True, 0), (4, 3, 16, False, True, 1), (8, 3, 32, False, True, 5)]
    expected += [(8, 3, 32, True, True, 4), (8, 3, 32, False, False, 3), (8, 3, 512, True, True, 2)]
    assert counts == ReplayCounts([GraphReplays(*values) for values in expected], 9)


def test_an_executor_without_graphs_has_no_counts() -> None:
    engine = build({"model": "none"}).engine
    assert replay_counter(engine.executor) is None
    assert replay_counter(CountingExecutor(engine.executor)) is not None


def test_the_front_hears_of_all_graphs_before_the_first_step_and_of_every_step_at_the_end() -> None:
    engine = build({"model": "none", "max_num_seqs": 2}).engine
    executor = CountingExecutor(engine.executor)
    engine._executor = executor
    ours, front = socket.socketpair()
    front.settimeout(10)
    link = EngineLink(ours)
    loop = EngineProcess(engine, link, replay_counts=replay_counter(executor))
    thread = threading.Thread(target=loop.run, daemon=True)
    thread.start()
    reader, decoder = FrameReader(), msgspec.msgpack.Decoder(FromEngine)

    def take() -> list[Report]:
        reports = [decoder.decode(payload) for payload in reader.feed(front.recv(1 << 20))]
        assert all(isinstance(report, Report) for report in reports)
        return [report for report in reports if isinstance(report, Report)]

    first = take()[0]
    assert first.replays == ReplayCounts(
        [GraphReplays(1, 0, 1, False, True, 0), GraphReplays(2, 3, 8, False, True, 0)], 0
    )
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    start = time.monotonic()
    request = Request("r", [1, 2], params, 0, 42)
    front.sendall(frame(msgspec.msgpack.encode([AddRequest.of(1, request)])))
    reports: list[Report] = []
    while not any(update.finish_reason for report in reports for update in report.updates):
        reports += take()
    while num_replays(reports[-1]) != executor.stats.num_replays[USED]:  # a step without rows may follow
        reports += take()
    seconds = time.monotonic() - start
    front.sendall(frame(msgspec.msgpack.encode([Stop()])))
    thread.join(10)
    assert not thread.is_alive()
    assert num_replays(reports[-1]) == executor.stats.num_replays[USED] >= 40
    # Not with every step: they are many, and a scrape comes every few seconds.
    assert len([r for r in reports if r.replays is not None]) <= 3 + seconds / process._REPLAYS_INTERVAL_S
    assert len(reports) > 20
    front.close()
    link.close()
