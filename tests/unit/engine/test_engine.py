"""The engine's loop over fakes of the device: depth, failure, close."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from common.errors import EngineClosedError, ResourceExhaustedError
from common.sampling_params import SamplingParams
from common.types import FinishReason, Request
from tests.simulated_device import SimulatedDevice, true_stream
from verifier_svc.engine.engine import Engine
from verifier_svc.engine.executor import InlineExecutor
from verifier_svc.orchestrator.block_pool import BlockPool
from verifier_svc.orchestrator.orchestrator import Orchestrator
from verifier_svc.orchestrator.step import StepOutcome, StepPlan

BLOCK_SIZE = 4


class FakeRunner:
    """The simulated device as a runner that can be told to fail."""

    def __init__(self) -> None:
        self.device = SimulatedDevice(random.Random(0), BLOCK_SIZE, accept=0.7, stop_rate=0.0)
        self.num_steps = 0
        self.fails_at = -1
        self.is_closed = False

    def run(self, plan: StepPlan) -> StepOutcome:
        self.num_steps += 1
        if self.num_steps == self.fails_at:
            raise RuntimeError("the device is gone")
        return self.device.run(plan)

    def close(self) -> None:
        self.is_closed = True


def make_engine(runner: FakeRunner, depth: int) -> Engine:
    pool = BlockPool(33, BLOCK_SIZE)
    orchestrator = Orchestrator(pool, max_num_seqs=2, max_num_batched_tokens=16, max_num_waiting=2)
    return Engine(orchestrator, InlineExecutor(runner), depth)


def make_request(name: str, max_len: int = 20) -> Request:
    return Request(name, [1, 2, 3], SamplingParams(), seed=0, max_len=max_len, num_speculative_tokens=3)


def run_to_the_end(engine: Engine) -> None:
    while engine.has_work:
        engine.step()


@pytest.fixture
def runner() -> FakeRunner:
    return FakeRunner()


@pytest.fixture(params=[1, 2])
def engine(request: pytest.FixtureRequest, runner: FakeRunner) -> Iterator[Engine]:
    engine = make_engine(runner, request.param)
    yield engine
    engine.close()


def test_requests_in_events_out(engine: Engine) -> None:
    requests = [make_request("a"), make_request("b", max_len=9)]
    for request in requests:
        engine.add(request)
    outputs: dict[str, list[int]] = {"a": [], "b": []}
    reasons: dict[str, FinishReason] = {}
    while len(reasons) < 2:
        for event in engine.step():
            outputs[event.request_id] += event.tokens
            if event.finish_reason is not None:
                reasons[event.request_id] = event.finish_reason
    for request in requests:
        expected = true_stream(request, 0.0)
        assert (outputs[request.request_id], reasons[request.request_id]) == expected


def test_without_work_a_step_says_nothing(engine: Engine, runner: FakeRunner) -> None:
    assert engine.step() == []
    assert engine.drain() == []
    assert runner.num_steps == 0
    assert not engine.has_work


def test_no_more_steps_in_flight_than_the_depth(runner: FakeRunner) -> None:
    engine = make_engine(runner, 2)
    engine.add(make_request("a"))
    for _ in range(4):
        engine.step()
        assert engine.orchestrator.num_in_flight <= 1  # one of two has just been applied
    engine.close()


def test_drain_takes_what_is_in_flight_and_says_what_was_released(engine: Engine, runner: FakeRunner) -> None:
    engine.add(make_request("a"))
    engine.step()
    engine.abort("a")
    num_steps = runner.num_steps
    assert engine.drain() == []
    assert engine.orchestrator.num_in_flight == 0
    assert runner.num_steps <= num_steps + 2  # the one in flight, and one that says that the row was released
    pool = engine.orchestrator.pool
    assert pool.num_free == pool.num_blocks - 1


def test_a_full_queue_refuses_and_goes_on(engine: Engine) -> None:
    for name in "ab":
        engine.add(make_request(name))
    with pytest.raises(ResourceExhaustedError):
        engine.add(make_request("c"))
    assert engine.step()
    engine.add(make_request("c"))


def test_a_failed_step_ends_the_engine_with_its_cause(engine: Engine, runner: FakeRunner) -> None:
    runner.fails_at = 3
    engine.add(make_request("a", max_len=60))
    with pytest.raises(EngineClosedError, match=r"a step failed.*the device is gone") as caught:
        run_to_the_end(engine)
    assert isinstance(caught.value.__cause__, RuntimeError)
    for call in (engine.step, lambda: engine.add(make_request("b"))):
        with pytest.raises(EngineClosedError, match="after a step failed") as later:
            call()
        assert isinstance(later.value.__cause__, RuntimeError)
    assert engine.abort("a")
    assert engine.drain() == []
    engine.close()
    assert runner.num_steps == 3


def test_a_step_that_fails_in_a_drain_is_reported_by_the_next_call(runner: FakeRunner) -> None:
    engine = make_engine(runner, 2)
    engine.add(make_request("a"))
    runner.fails_at = 2
    engine.step()
    engine._submit()
    assert engine.orchestrator.num_in_flight > 0
    assert engine.drain() == []
    with pytest.raises(EngineClosedError, match="the device is gone"):
        engine.step()
    engine.close()


def test_a_closed_engine_serves_nothing(engine: Engine, runner: FakeRunner) -> None:
    engine.add(make_request("a"))
    engine.step()
    engine.close()
    engine.close()
    assert runner.is_closed
    for call in (engine.step, lambda: engine.add(make_request("b"))):
        with pytest.raises(EngineClosedError, match="closed"):
            call()
    assert engine.drain() == []


class FailingExecutor(InlineExecutor):
    """Cannot hand over a plan."""

    def __init__(self, runner: FakeRunner, error: BaseException, fails_at: int) -> None:
        super().__init__(runner)
        self._error = error
        self._num_left = fails_at

    def submit(self, plan: StepPlan) -> None:
        self._num_left -= 1
        if self._num_left <= 0:
            raise self._error
        super().submit(plan)


def make_failing(runner: FakeRunner, depth: int, error: BaseException) -> Engine:
    pool = BlockPool(33, BLOCK_SIZE)
    orchestrator = Orchestrator(pool, max_num_seqs=2, max_num_batched_tokens=16, max_num_waiting=2)
    return Engine(orchestrator, FailingExecutor(runner, error, fails_at=3), depth)


@pytest.mark.parametrize("depth", [1, 2])
def test_a_plan_that_cannot_be_handed_over_ends_the_engine_with_its_cause(runner: FakeRunner, depth: int) -> None:
    engine = make_failing(runner, depth, RuntimeError("the step path waited"))
    engine.add(make_request("a", max_len=60))
    with pytest.raises(EngineClosedError, match=r"a step failed.*the step path waited") as caught:
        run_to_the_end(engine)
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert engine.abort("a")
    assert engine.drain() == []
    with pytest.raises(EngineClosedError, match="the step path waited"):
        engine.step()
    engine.close()
    assert runner.is_closed


@pytest.mark.parametrize("depth", [1, 2])
def test_an_interrupt_while_a_plan_is_handed_over_is_not_hidden(runner: FakeRunner, depth: int) -> None:
    """The orchestrator counts that plan as in flight, and the device may not have it."""
    engine = make_failing(runner, depth, KeyboardInterrupt())
    engine.add(make_request("a", max_len=60))
    with pytest.raises(KeyboardInterrupt):
        run_to_the_end(engine)
    with pytest.raises(EngineClosedError, match="KeyboardInterrupt"):
        engine.step()
    assert engine.drain() == []
    engine.close()


def test_an_interrupt_of_a_step_is_not_hidden_by_what_comes_after(runner: FakeRunner) -> None:
    """Ctrl-C in the synchronous loop leaves the device in the middle of a step: no later call may go on with it."""

    def interrupted(plan: StepPlan) -> StepOutcome:
        raise KeyboardInterrupt

    runner.run = interrupted  # type: ignore[method-assign]
    engine = make_engine(runner, 1)
    engine.add(make_request("a"))
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    assert engine.drain() == []
    with pytest.raises(EngineClosedError):
        engine.step()
    engine.close()
