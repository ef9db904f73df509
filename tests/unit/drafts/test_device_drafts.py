"""The host's share of drafting for a device, step by step: what it waits for, what it stages, and whom it credits."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from common.sampling_params import SamplingParams
from common.types import Request
from model_executor.landing_tensors import (
    BASE_LEN,
    FROM_BRANCH,
    FROM_NGRAM,
    GENERATION,
    LENGTH,
    NO_DRAFT,
    make_landing_tensors,
)
from tests.staged_writes import FakeStagedWrites
from tests.unit.drafts.test_exchange import DEADLINE_S, VOCAB_SIZE, Clock, K, ScriptedTransport, counting
from verifier_svc.drafts.device_drafts import DeviceOnlyDrafts, RemoteDeviceDrafts
from verifier_svc.drafts.device_landing import DeviceLanding
from verifier_svc.drafts.exchange import DraftExchange
from verifier_svc.orchestrator.step import NewRow, PlannedRow, RowOutcome, StepOutcome, StepPlan

NUM_ROWS, MAX_LEN, GENERATION_OF_ROW = 4, 64, 5


class Loop:
    """Steps of row 0 that a test hands over, and whose outcomes it tells when it likes."""

    def __init__(self, *transports: ScriptedTransport, branch_len: int = 8) -> None:
        self.clock = transports[0].clock
        self.tensors = make_landing_tensors(NUM_ROWS, 2, branch_len, torch.device("cpu"))
        self.writes = FakeStagedWrites()
        landing = DeviceLanding(self.tensors, self.writes)
        exchange = DraftExchange(transports, landing, NUM_ROWS, VOCAB_SIZE, DEADLINE_S, self.clock)
        self.drafts = RemoteDeviceDrafts(exchange, landing)
        self._plans: list[StepPlan] = []
        self._num_steps = 0

    def prefill(self, tokens: list[int]) -> None:
        """A request that has `tokens` when its prefill ends; the last of them is drawn."""
        prompt = tokens[:-1]
        request = Request("r", prompt, SamplingParams(), 0, MAX_LEN, num_speculative_tokens=K)
        self._hand_over([NewRow(0, request, prompt, 0, None)], len(prompt), 0)
        self.tell(tokens[-1:], NO_DRAFT, 0)

    def hand_over(self, max_draft_tokens: int = K) -> float:
        """The next decode step; returns how long that took."""
        return self._hand_over([], 1, max_draft_tokens)

    def tell(self, tokens: list[int], source: int, num_draft: int = K) -> None:
        """The outcome of the oldest step."""
        plan = self._plans.pop(0)
        result = RowOutcome(0, GENERATION_OF_ROW, tokens, num_draft, max(0, len(tokens) - 1))
        self.drafts.after_step(plan, StepOutcome(plan.step_id, [result]), [source])

    def on_device(self) -> list[tuple[int, int, int]]:
        """The row's branches there: base_len, length, generation."""
        records: list[list[int]] = self.tensors.records[0].tolist()
        return [(r[BASE_LEN], r[LENGTH], r[GENERATION]) for r in records if r[LENGTH]]

    def _hand_over(self, new_rows: list[NewRow], num_tokens: int, max_draft_tokens: int) -> float:
        planned = PlannedRow(0, GENERATION_OF_ROW, num_tokens, max_draft_tokens, max_draft_tokens + 1)
        plan = StepPlan(self._num_steps, [], new_rows, [], [planned])
        self._num_steps += 1
        self._plans.append(plan)
        before_s = self.clock.now
        self.drafts.before_step(plan)
        self.writes.hand_over()
        self.writes.apply()
        return self.clock.now - before_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_branches_are_on_the_device_when_the_step_begins(clock: Clock) -> None:
    loop = Loop(ScriptedTransport("a", clock, counting))
    loop.prefill([1, 2])
    assert loop.on_device() == []
    loop.hand_over()
    assert loop.on_device() == [(1, 8, GENERATION_OF_ROW), (2, 8, GENERATION_OF_ROW)]
    assert loop.drafts.landing is loop.tensors


def test_a_step_waits_for_an_answer_and_no_longer(clock: Clock) -> None:
    loop = Loop(ScriptedTransport("a", clock, counting, latency_s=0.004))
    loop.prefill([1, 2])
    assert loop.hand_over() == pytest.approx(0.004)
    assert loop.on_device() == [(1, 8, GENERATION_OF_ROW), (2, 8, GENERATION_OF_ROW)]


def test_the_wait_ends_at_the_deadline(clock: Clock) -> None:
    loop = Loop(ScriptedTransport("a", clock, counting, latency_s=None))
    loop.prefill([1, 2])
    assert loop.hand_over() == pytest.approx(DEADLINE_S)
    assert loop.drafts.stats.drafters[0].num_deadline_misses == 1


def test_nothing_is_waited_for_where_a_branch_goes_on_beyond_the_steps_in_flight(clock: Clock) -> None:
    transport = ScriptedTransport("a", clock, counting)
    loop = Loop(transport)  # branches of 8 tokens; a step commits 4 at most
    loop.prefill([1, 2])
    loop.hand_over()
    transport.latency_s = 0.004
    loop.tell([3], FROM_BRANCH)
    loop.hand_over()  # an answer is owed, and 7 tokens are left: none of them is sure to be spent
    assert loop.drafts.stats.num_waits == 0
    # Seven are left for a step in flight and this one: 4 may be spent, 3 remain.
    assert loop.hand_over() == 0
    # And 8 may be spent now.
    assert loop.hand_over() == pytest.approx(0.004)


def test_nothing_is_waited_for_where_the_steps_in_flight_may_end_the_request(clock: Clock) -> None:
    transport = ScriptedTransport("a", clock, latency_s=None)
    loop = Loop(transport)
    loop.prefill(list(range(MAX_LEN - K - 2)))
    assert loop.hand_over() == pytest.approx(DEADLINE_S)
    assert loop.hand_over() == 0


def test_a_row_whose_first_step_is_in_flight_is_not_waited_for(clock: Clock) -> None:
    loop = Loop(ScriptedTransport("a", clock, counting, latency_s=0.004))
    prompt = [1, 2]
    request = Request("r", prompt, SamplingParams(), 0, MAX_LEN, num_speculative_tokens=K)
    loop._hand_over([NewRow(0, request, prompt, 0, None)], 2, 0)
    assert loop.hand_over() == 0
    loop.tell([3], NO_DRAFT, 0)
    loop.tell([4], FROM_NGRAM, 2)
    assert loop.drafts.stats.num_fallbacks == loop.drafts.stats.num_fallback_drafts == 1


def test_sources_are_counted(clock: Clock) -> None:
    loop = Loop(ScriptedTransport("a", clock, counting))
    loop.prefill([1, 2])
    for tokens, source, num_draft in (([3, 4], FROM_BRANCH, 3), ([5], FROM_NGRAM, 2), ([6], NO_DRAFT, 0)):
        loop.hand_over()
        loop.tell(tokens, source, num_draft)
    loop.hand_over(max_draft_tokens=0)  # a row that may not draft
    loop.tell([7], NO_DRAFT, 0)
    loop.hand_over()  # a row that had finished by then
    loop.tell([], NO_DRAFT, 0)
    stats = loop.drafts.stats
    assert (stats.num_branches_used, stats.num_fallbacks, stats.num_fallback_drafts) == (1, 2, 1)
    drafter = stats.drafters[0]
    assert (drafter.num_drafts, drafter.num_draft_tokens, drafter.num_accepted_tokens) == (1, 3, 1)
    assert loop.drafts.counts().num_fallbacks == 2


def test_the_drafter_whose_branches_a_step_had_is_credited(clock: Clock) -> None:
    one, two = ScriptedTransport("one", clock, counting), ScriptedTransport("two", clock, counting)
    loop = Loop(one, two)
    loop.prefill([1, 2])
    loop.hand_over()
    one.stop()
    loop.hand_over()  # the row moves while the first step is in flight
    assert loop.drafts.links[1].rows == {0}
    loop.tell([3, 4], FROM_BRANCH)
    loop.tell([5], FROM_BRANCH)
    assert [drafter.num_drafts for drafter in loop.drafts.stats.drafters] == [1, 1]
    assert [drafter.num_accepted_tokens for drafter in loop.drafts.stats.drafters] == [1, 0]


def test_branches_of_a_drafter_that_is_gone_leave_the_device(clock: Clock) -> None:
    transport = ScriptedTransport("a", clock, counting)
    loop = Loop(transport)
    loop.prefill([1, 2])
    loop.hand_over()
    transport.stop()
    loop.hand_over()
    assert loop.on_device() == []


def test_whatever_lands_in_a_step_is_written_once(clock: Clock) -> None:
    transport = ScriptedTransport("a", clock, counting)
    loop = Loop(transport)
    loop.prefill([1, 2])
    for _ in range(50):
        branches, errors = counting(transport.updates[-1])
        transport.say(branches, errors)
    sizes: list[int] = []
    write = loop.writes.write

    def count(tensor: torch.Tensor, index: int, values: np.ndarray) -> None:
        sizes.append(len(values))
        write(tensor, index, values)

    loop.writes.write = count
    loop.hand_over()
    assert sizes == [loop.tensors.records[0].numel()]


def test_without_drafters_the_host_has_no_part_in_it() -> None:
    drafts = DeviceOnlyDrafts()
    assert drafts.landing is None
    plan = StepPlan(0, [], [], [], [])
    drafts.before_step(plan)
    drafts.after_step(plan, StepOutcome(0, []), [])
    drafts.close()


def test_close_closes_the_transports(clock: Clock) -> None:
    transport = ScriptedTransport("a", clock, counting)
    loop = Loop(transport)
    loop.drafts.close()
    assert transport.closed
