"""The exchange against drafters that are scripted: who gets which row, how long a step waits, what is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest
import torch

from common.draft_exchange import (
    Branch,
    BranchBatch,
    DrafterHello,
    DrafterLimits,
    DraftReply,
    ModelIdentity,
    RowClosed,
    RowCommitted,
    RowError,
    RowOpened,
    SessionUpdate,
)
from model_executor.drafting import NoDraft
from model_executor.row_state import RowState
from verifier_svc.drafts.drafter_link import HANG_S, WATCHED_DRAFTS
from verifier_svc.drafts.exchange import MAX_REOPENS, DraftExchange
from verifier_svc.drafts.landing import LandingBuffer
from verifier_svc.drafts.remote_drafts import RemoteDrafts
from verifier_svc.drafts.transport import Arrival, TransportSession

NUM_ROWS, MAX_LEN, K, VOCAB_SIZE = 4, 64, 3, 100
DEADLINE_S = 0.01
LIMITS = DrafterLimits(NUM_ROWS, MAX_LEN, 1000, 16)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@dataclass
class ScriptedTransport:
    """A drafter that answers what the test says, after as long as the test says."""

    address: str
    clock: Clock
    answer: Callable[[SessionUpdate], tuple[list[Branch], list[RowError]]] = lambda update: ([], [])
    latency_s: float | None = 0.0  # None: never
    kind: str = "fake"
    session: TransportSession | None = None
    updates: list[SessionUpdate] = field(default_factory=list)
    closed: bool = False
    _sequence: int = 0
    _replies: list[tuple[float, Arrival]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.start("one")

    def start(self, incarnation: str) -> None:
        number = 1 if self.session is None else self.session.number + 1
        self.session = TransportSession(number, DrafterHello(incarnation, ModelIdentity(), "fake", LIMITS))

    def stop(self) -> None:
        self.session = None
        self._replies.clear()

    def send(self, update: SessionUpdate) -> int | None:
        if self.session is None:
            return None
        self._sequence += 1
        self.updates.append(update)
        if self.latency_s is not None:
            branches, errors = self.answer(update)
            self.say(branches, errors, self.latency_s)
        return self._sequence

    def say(self, branches: list[Branch], errors: list[RowError] | None = None, latency_s: float = 0.0) -> None:
        assert self.session is not None
        due = self.clock.now + latency_s
        reply = DraftReply(self._sequence, BranchBatch.of(branches), errors or [])
        self._replies.append((due, Arrival(self.session.number, due, reply)))

    def poll(self, timeout_s: float) -> list[Arrival]:
        if timeout_s > 0:
            first = min((due for due, _ in self._replies), default=self.clock.now + timeout_s)
            self.clock.now = max(self.clock.now, min(first, self.clock.now + timeout_s))
        arrived = [arrival for due, arrival in self._replies if due <= self.clock.now]
        self._replies = [entry for entry in self._replies if entry[0] > self.clock.now]
        return arrived

    def close(self) -> None:
        self.closed = True

    @property
    def opened(self) -> list[RowOpened]:
        return [entry for update in self.updates for entry in update.opened]


class Verifier:
    """Rows that a test opens, proposes for and commits to, as the model runner does."""

    def __init__(self, *transports: ScriptedTransport) -> None:
        self.clock = transports[0].clock
        self.rows = RowState(NUM_ROWS, MAX_LEN, 16, torch.device("cpu"))
        landing = LandingBuffer(NUM_ROWS, 4, 8, K, torch.device("cpu"))
        exchange = DraftExchange(transports, landing, NUM_ROWS, VOCAB_SIZE, DEADLINE_S, self.clock)
        self.drafts = RemoteDrafts(exchange, landing, NoDraft())
        self.texts: dict[int, list[int]] = {}

    def open(self, row: int, tokens: list[int], generation: int = 0) -> None:
        self.rows.set_row(row, tokens, len(tokens), 0, MAX_LEN, generation)
        self.texts[row] = list(tokens)
        opened = RowOpened(row, generation, f"r{row}", tokens, len(tokens), MAX_LEN, K, 0, 0.0, 1.0, 0, 0.0)
        self.drafts.observe(SessionUpdate(opened=[opened]))

    def step(self, row: int, tokens: list[int], generation: int = 0) -> list[int]:
        """Propose for a row, then commit `tokens`; returns the draft."""
        idx_mapping = torch.tensor([row])
        (length,) = self.drafts.propose(self.rows, idx_mapping, torch.tensor([K])).tolist()
        start = len(self.texts[row])
        draft = self.rows.token_ids[row, start : start + length].tolist()
        self.texts[row] += tokens
        self.rows.set_row(row, self.texts[row], 1, 0, MAX_LEN, generation)
        self.drafts.observe(SessionUpdate(committed=[RowCommitted(row, generation, start, tokens)]))
        return draft


def counting(update: SessionUpdate) -> tuple[list[Branch], list[RowError]]:
    """Claims that every row counts on: n is followed by n + 1."""
    branches = [
        _count_on(entry.row, entry.generation, len(entry.token_ids), entry.token_ids[-1]) for entry in update.opened
    ]
    for change in update.committed:
        end = change.base_len + len(change.token_ids)
        branches.append(_count_on(change.row, change.generation, end, change.token_ids[-1]))
    return branches, []


def _count_on(row: int, generation: int, base_len: int, last: int) -> Branch:
    return Branch(row, generation, base_len, [(last + i) % VOCAB_SIZE for i in range(1, 9)])


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_drafts_come_from_branches(clock: Clock) -> None:
    transport = ScriptedTransport("a", clock, counting)
    verifier = Verifier(transport)
    verifier.open(0, [1, 2])
    assert verifier.step(0, [3, 4]) == [3, 4, 5]
    assert verifier.step(0, [5]) == [5, 6, 7]
    stats = verifier.drafts.stats.drafters[0]
    assert (stats.num_drafts, stats.num_draft_tokens, stats.num_accepted_tokens) == (2, 6, 1)
    verifier.drafts.close()
    assert transport.closed


def test_a_step_waits_for_an_answer_and_no_longer(clock: Clock) -> None:
    verifier = Verifier(ScriptedTransport("a", clock, counting, latency_s=0.004))
    verifier.open(0, [1])
    start = clock.now
    assert verifier.step(0, [2]) == [2, 3, 4]
    assert clock.now == pytest.approx(start + 0.004)


def test_an_answer_without_a_branch_ends_the_wait(clock: Clock) -> None:
    verifier = Verifier(ScriptedTransport("a", clock, latency_s=0.003))
    verifier.open(0, [1])
    start = clock.now
    assert verifier.step(0, [2]) == []
    assert clock.now == pytest.approx(start + 0.003)
    assert verifier.drafts.stats.num_fallbacks == 1


def test_a_late_branch_is_used_if_it_is_still_right(clock: Clock) -> None:
    transport = ScriptedTransport("a", clock, counting, latency_s=0.015)
    verifier = Verifier(transport)
    verifier.open(0, [1])
    start = clock.now
    assert verifier.step(0, [2]) == []  # the deadline
    assert clock.now == pytest.approx(start + DEADLINE_S)
    assert verifier.step(0, [3, 4]) == [3, 4, 5]  # from the answer to the first update
    assert clock.now == pytest.approx(start + 0.015)
    assert verifier.drafts.stats.drafters[0].num_late_replies == 1


def test_a_hung_drafter_costs_100_ms_in_all(clock: Clock) -> None:
    transport = ScriptedTransport("a", clock, counting, latency_s=None)
    verifier = Verifier(transport)
    verifier.open(0, [1])
    start = clock.now
    for _ in range(40):
        assert verifier.step(0, [2]) == []
    assert clock.now - start == pytest.approx(HANG_S, abs=DEADLINE_S)
    stats = verifier.drafts.stats.drafters[0]
    assert stats.is_hung
    assert stats.num_hangs == 1
    # It answers again, in time: its rows come back, and steps wait for it again.
    transport.latency_s = 0.0
    transport.say([])
    verifier.step(0, [2])
    assert not stats.is_hung
    assert verifier.step(0, [3]) == [3, 4, 5]


def test_a_drafter_that_is_always_late_is_not_waited_for(clock: Clock) -> None:
    transport = ScriptedTransport("a", clock, counting, latency_s=0.05)
    verifier = Verifier(transport)
    verifier.open(0, [1])
    start = clock.now
    for _ in range(60):
        verifier.step(0, [7])
    assert clock.now - start <= HANG_S + 2 * DEADLINE_S


def test_rows_are_spread_and_stay(clock: Clock) -> None:
    one, two = ScriptedTransport("one", clock, counting), ScriptedTransport("two", clock, counting)
    verifier = Verifier(one, two)
    for row in range(4):
        verifier.open(row, [row])
    assert [entry.row for entry in one.opened] == [0, 2]
    assert [entry.row for entry in two.opened] == [1, 3]
    for row in range(4):
        assert verifier.step(row, [row + 1]) == [row + 1, row + 2, row + 3]
    assert {change.row for update in one.updates for change in update.committed} == {0, 2}


def test_rows_of_a_dead_drafter_move(clock: Clock) -> None:
    one, two = ScriptedTransport("one", clock, counting), ScriptedTransport("two", clock, counting)
    verifier = Verifier(one, two)
    verifier.open(0, [1])
    verifier.step(0, [2])
    one.stop()
    assert verifier.step(0, [3]) == [3, 4, 5]
    (moved,) = two.opened
    assert (moved.row, moved.token_ids) == (0, [1, 2])
    assert verifier.drafts.stats.num_rows_moved == 1
    assert verifier.drafts.stats.drafters[0].num_downs == 1
    # It stays there when the first one is back.
    one.start("two")
    assert verifier.step(0, [4]) == [4, 5, 6]
    assert len(one.opened) == 1


def test_without_a_drafter_rows_wait_for_the_next(clock: Clock) -> None:
    transport = ScriptedTransport("a", clock, counting)
    verifier = Verifier(transport)
    verifier.open(0, [1])
    verifier.step(0, [2])
    transport.stop()
    start = clock.now
    verifier.open(1, [7], generation=3)
    assert verifier.step(0, [9]) == []
    assert clock.now == start, "nobody to wait for"
    transport.start("another")
    assert verifier.step(0, [10]) == [10, 11, 12]
    assert {entry.row: entry.token_ids for entry in transport.opened[1:]} == {0: [1, 2, 9], 1: [7]}


def test_branches_of_a_drafter_that_is_gone_are_refused(clock: Clock) -> None:
    transport = ScriptedTransport("a", clock)
    verifier = Verifier(transport)
    verifier.open(0, [1])
    verifier.step(0, [2])
    generation = transport.opened[-1].generation
    assert transport.session is not None
    old = Arrival(
        transport.session.number, clock.now, DraftReply(9, BranchBatch.of([Branch(0, generation, 2, [3])]), [])
    )
    transport.stop()
    verifier.step(0, [2])
    transport.start("two")
    transport._replies.append((clock.now, replace_session(old, 1)))
    assert verifier.step(0, [2]) == []
    stats = verifier.drafts.stats.drafters[0]
    assert stats.num_stale_branches == 1
    # And one that the new process sends for the old opening of the row.
    transport.say([Branch(0, generation, 4, [3])])
    assert verifier.step(0, [2]) == []
    assert stats.num_stale_branches == 2


def replace_session(arrival: Arrival, session: int) -> Arrival:
    return arrival._replace(session=session)


@pytest.mark.parametrize(
    ("branch", "field"),
    [
        (Branch(-1, 1, 1, [2]), "num_invalid_branches"),
        (Branch(NUM_ROWS, 1, 1, [2]), "num_invalid_branches"),
        (Branch(0, 1, -1, [2]), "num_invalid_branches"),
        (Branch(0, 1, 1, [2, VOCAB_SIZE]), "num_invalid_branches"),
        (Branch(0, 1, 1, [-1]), "num_invalid_branches"),
        (Branch(0, 0, 1, [2]), "num_stale_branches"),
        (Branch(0, 2, 1, [2]), "num_stale_branches"),
        (Branch(3, 1, 1, [2]), "num_stale_branches"),
    ],
)
def test_a_branch_that_cannot_be_is_dropped_and_the_others_are_used(clock: Clock, branch: Branch, field: str) -> None:
    transport = ScriptedTransport("a", clock)
    verifier = Verifier(transport)
    verifier.open(0, [1])
    (opened,) = transport.opened
    assert opened.generation == 1
    transport.say([branch, Branch(0, 1, 1, [2, 3]), branch])
    assert verifier.step(0, [2]) == [2, 3]
    assert getattr(verifier.drafts.stats.drafters[0], field) == 2


def test_a_row_error_opens_the_row_again_with_an_end_to_it(clock: Clock) -> None:
    def refuse(update: SessionUpdate) -> tuple[list[Branch], list[RowError]]:
        return [], [RowError(entry.row, entry.generation, "no") for entry in update.opened]

    transport = ScriptedTransport("a", clock, refuse)
    verifier = Verifier(transport)
    verifier.open(0, [1])
    for token in range(2, 20):
        verifier.step(0, [token])
    assert len(transport.opened) == 1 + MAX_REOPENS
    assert verifier.drafts.stats.drafters[0].num_row_errors == 1 + MAX_REOPENS
    transport.answer = counting
    verifier.open(0, [50], generation=1)  # another request, another chance
    assert verifier.step(0, [51], generation=1) == [51, 52, 53]


def test_a_row_error_of_another_generation_changes_nothing(clock: Clock) -> None:
    transport = ScriptedTransport("a", clock, counting)
    verifier = Verifier(transport)
    verifier.open(0, [1])
    transport.say([], [RowError(0, 77, "no"), RowError(99, 1, "no"), RowError(-1, 1, "no")])
    assert verifier.step(0, [2]) == [2, 3, 4]
    assert len(transport.opened) == 1


def test_closed_rows_are_told_to_their_drafter(clock: Clock) -> None:
    transport = ScriptedTransport("a", clock, counting)
    verifier = Verifier(transport)
    verifier.open(0, [1], generation=4)
    verifier.drafts.observe(SessionUpdate(closed=[RowClosed(0, 3)]))
    assert verifier.drafts.stats.drafters[0].num_rows == 1
    verifier.drafts.observe(SessionUpdate(closed=[RowClosed(0, 4)]))
    assert verifier.drafts.stats.drafters[0].num_rows == 0
    (opened,) = transport.opened
    assert transport.updates[-1].closed == [RowClosed(0, opened.generation)]


def test_a_drafter_whose_drafts_are_never_right_is_no_longer_used(clock: Clock) -> None:
    def wrong(update: SessionUpdate) -> tuple[list[Branch], list[RowError]]:
        branches, errors = counting(update)
        return [branch._replace(token_ids=[99]) for branch in branches], errors

    good, bad = ScriptedTransport("good", clock, counting), ScriptedTransport("bad", clock, wrong)
    good.stop()
    verifier = Verifier(good, bad)
    generation = 0
    for generation in range(2 * WATCHED_DRAFTS // 40 + 3):
        verifier.open(0, [1], generation)
        for _ in range(40):
            verifier.step(0, [1], generation)
    stats = verifier.drafts.stats.drafters[1]
    assert stats.is_distrusted
    assert stats.num_resyncs == 1
    assert WATCHED_DRAFTS * 2 <= stats.num_drafts <= WATCHED_DRAFTS * 2 + 2
    good.start("one")
    verifier.step(0, [1], generation)
    assert verifier.step(0, [2], generation) == [2, 3, 4]
    # Another process at the same address is another drafter.
    bad.answer = counting
    bad.start("two")
    good.stop()
    verifier.step(0, [3], generation)
    assert not stats.is_distrusted
    assert verifier.step(0, [4], generation) == [4, 5, 6]


def test_a_row_that_wants_no_drafts_is_not_sent(clock: Clock) -> None:
    transport = ScriptedTransport("a", clock, counting)
    verifier = Verifier(transport)
    opened = RowOpened(0, 0, "r", [1], 1, MAX_LEN, 0, 0, 0.0, 1.0, 0, 0.0)
    verifier.drafts.observe(SessionUpdate(opened=[opened]))
    verifier.drafts.observe(SessionUpdate(committed=[RowCommitted(0, 0, 1, [2])]))
    assert transport.updates == []


def test_a_row_longer_than_the_drafter_holds_is_not_sent(clock: Clock) -> None:
    transport = ScriptedTransport("a", clock, counting)
    assert transport.session is not None
    drafter = transport.session.drafter
    transport.session = TransportSession(2, replace(drafter, limits=replace(LIMITS, max_model_len=3)))
    verifier = Verifier(transport)
    verifier.open(0, [1, 2, 3])
    assert transport.updates == []
    verifier.open(1, [1, 2])
    assert [entry.row for entry in transport.opened] == [1]


def test_a_row_that_one_drafter_refuses_goes_to_another(clock: Clock) -> None:
    def refuse(update: SessionUpdate) -> tuple[list[Branch], list[RowError]]:
        return [], [RowError(entry.row, entry.generation, "no free row") for entry in update.opened]

    full, free = ScriptedTransport("full", clock, refuse), ScriptedTransport("free", clock, counting)
    verifier = Verifier(full, free)
    verifier.open(0, [1])
    assert verifier.step(0, [2]) == [2, 3, 4]
    assert (len(full.opened), len(free.opened)) == (1, 1)
