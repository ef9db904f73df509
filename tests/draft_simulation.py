"""A verifier without a model, and its drafters at the end of a bad network: one random schedule of everything.

Real are the orchestrator, the row state, the exchange, the landing buffer, the codec, the drafter's sessions and its
core. Made up are the target (the token at a position is known beforehand), the wires and the clock.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from common.draft_exchange import BranchBatch, DrafterLimits, ModelIdentity, VerifierHello
from drafter_svc.core import DrafterCore
from drafter_svc.sessions import RowPool
from model_executor.drafting import NoDraft
from model_executor.row_state import RowState
from tests.draft_methods import NoisyOracle
from tests.fake_transport import FakeDrafter, FakeTransport, Faults, Network
from tests.simulated_device import DeviceRow, SimulatedDevice, text_token, true_token
from tests.simulated_run import BLOCK_SIZE, SimulatedRun
from verifier_svc.drafts.exchange import DraftExchange
from verifier_svc.drafts.landing import Landing, LandingBuffer
from verifier_svc.drafts.remote_drafts import RemoteDrafts
from verifier_svc.engine.session_tracker import SessionTracker
from verifier_svc.orchestrator.step import PlannedRow, StepOutcome, StepPlan

VOCAB_SIZE = 1000
MAX_DRAFT_TOKENS = 5
DEADLINE_S = 0.002
NUM_TEXTS = 2


@dataclass(frozen=True, slots=True)
class Weather:
    """What a schedule has to stand."""

    faults: Faults = field(default_factory=Faults)
    crashes: int = 0
    hangs: int = 0
    lie: float = 0.0
    """Chance that a draft token is wrong."""


CALM = Weather()
WEATHERS = {
    "calm": CALM,
    "liar": Weather(lie=0.3),
    "slow": Weather(Faults(delay_s=(0.0005, 0.03))),
    "lossy": Weather(Faults(lost=0.15)),
    "disorder": Weather(Faults(late=0.2, late_s=0.1, repeated=0.2)),
    "damage": Weather(Faults(damaged=0.3)),
    "garbage": Weather(Faults(garbled=0.15)),
    "breaks": Weather(Faults(reset=0.05)),
    "crashes": Weather(crashes=3),
    "hangs": Weather(hangs=3),
    "storm": Weather(
        Faults((0.0001, 0.01), late=0.1, lost=0.05, repeated=0.1, damaged=0.1, garbled=0.03, reset=0.02), 1, 1, 0.2
    ),
}


class CountingLandingBuffer(LandingBuffer):
    """Knows how many branches have landed."""

    num_landed_branches = 0

    def put(self, branches: BranchBatch) -> None:
        self.num_landed_branches += len(branches)
        super().put(branches)


class DraftingDevice(SimulatedDevice):
    """A simulated device with the tensors of a real row state, through which its drafts come."""

    def __init__(
        self,
        rng: random.Random,
        stop_rate: float,
        rows: RowState,
        network: Network,
        step_s: float,
        are_drafts_right: bool,
    ) -> None:
        super().__init__(rng, BLOCK_SIZE, 0.0, stop_rate)
        self._are_drafts_right = are_drafts_right
        self.num_could_draft = 0
        self.num_drafted = 0
        self.longest_wait_s = 0.0
        self.waits_s: list[tuple[float, float]] = []  # when, and how long
        self._row_state = rows
        self._network = network
        self._step_s = step_s
        self._draft_tokens: dict[int, list[int]] = {}

    def run(self, plan: StepPlan) -> StepOutcome:
        generations = {planned.row: planned.generation for planned in plan.rows}
        for new in plan.new_rows:
            max_len = new.request.max_len
            prompt_len = new.request.prompt_len
            self._row_state.set_row(
                new.row, new.tokens, prompt_len, new.num_computed_tokens, max_len, generations[new.row]
            )
        outcome = super().run(plan)
        self._write_committed(outcome)
        self._network.advance(self._step_s)
        return outcome

    def _note_drafts(self, numbers: list[int], limits: list[int], counts: list[int]) -> None:
        """Look at the drafts of rows that stand in the row state, and keep them for the settling."""
        self.num_could_draft += sum(limit > 0 for limit in limits)
        self.num_drafted += sum(count > 0 for count in counts)
        texts: list[list[int]] = self._row_state.token_ids[numbers].tolist()
        for number, limit, count, text in zip(numbers, limits, counts, texts, strict=True):
            tokens = self.rows[number].tokens
            assert 0 <= count <= limit, "more draft tokens than there is room for"
            assert text[: len(tokens)] == tokens, "drafting has changed committed tokens"
            drafts = self._draft_tokens[number] = text[len(tokens) : len(tokens) + count]
            assert all(0 <= token < VOCAB_SIZE for token in drafts)
            if self._are_drafts_right:
                text_after = [true_token(self.rows[number].request, len(tokens) + index) for index in range(count)]
                assert drafts == text_after, "a draft of another request, or for another place"

    def _limit(self, planned: PlannedRow, start: int) -> int:
        """Draft tokens that a row may have: one that does not sample has no room."""
        row = self.rows[planned.row]
        samples = not row.finished and start + planned.num_tokens == len(row.tokens)
        room = row.request.max_len - len(row.tokens) - 1
        return max(0, min(planned.max_draft_tokens, room)) if samples else 0

    def _drafts_of(self, row: DeviceRow, planned: PlannedRow) -> list[int]:
        return self._draft_tokens.get(planned.row, [])

    def _write_committed(self, outcome: StepOutcome) -> None:
        rows: list[int] = []
        columns: list[int] = []
        tokens: list[int] = []
        lengths: dict[int, int] = {}
        for result in outcome.rows:
            if result.tokens:
                end = lengths[result.row] = len(self.rows[result.row].tokens)
                rows += [result.row] * len(result.tokens)
                columns += range(end - len(result.tokens), end)
                tokens += result.tokens
        if lengths:
            state = self._row_state
            state.token_ids[rows, columns] = torch.tensor(tokens, dtype=torch.int32)
            state.committed_len[list(lengths)] = torch.tensor(list(lengths.values()))


class HostDraftingDevice(DraftingDevice):
    """Drafts as the model runner does: the host matches when a step runs, and learns of its outcome at once."""

    def __init__(
        self,
        rng: random.Random,
        stop_rate: float,
        rows: RowState,
        drafts: RemoteDrafts,
        network: Network,
        step_s: float,
        are_drafts_right: bool,
    ) -> None:
        super().__init__(rng, stop_rate, rows, network, step_s, are_drafts_right)
        self._drafts = drafts
        self._sessions = SessionTracker()

    def run(self, plan: StepPlan) -> StepOutcome:
        outcome = super().run(plan)
        self._drafts.observe(self._sessions.update(plan, outcome))
        return outcome

    def _draft(self, planned_rows: Sequence[PlannedRow], starts: Sequence[int]) -> None:
        """As the model runner does: rows that have finished are left out."""
        self._draft_tokens.clear()
        numbers: list[int] = []
        limits: list[int] = []
        for planned, start in zip(planned_rows, starts, strict=True):
            if not self.rows[planned.row].finished:
                numbers.append(planned.row)
                limits.append(self._limit(planned, start))
        if not any(planned.max_draft_tokens for planned in planned_rows) or not numbers:
            return
        before_s = self._network.now
        counts: list[int] = self._drafts.propose(self._row_state, torch.tensor(numbers), torch.tensor(limits)).tolist()
        waited_s = self._network.now - before_s
        if waited_s:
            self.waits_s.append((before_s, waited_s))
        self._note_drafts(numbers, limits, counts)


class DraftSimulation(SimulatedRun):
    """One schedule: a workload, its drafters, and what befalls them.

    Args:
        seed: of everything that is random.
        weather: what may befall the drafters and the network.
    """

    MAX_MODEL_LENS = (40, 100, 200)
    MAX_REQUESTS = 12
    MAX_PROMPT_SHARE = 0.4
    STOP_RATES = (0.0, 0.01)
    ABORT_RATE = 0.005
    NUM_DRAFTERS = (1, 1, 2)
    STEP_TIMES_S = (0.002, 0.02)
    num_branch_steps = 2

    def __init__(self, seed: int, weather: Weather) -> None:
        self.weather = weather
        super().__init__(seed, depth=1 + seed % 3)

    def build_device(self, rng: random.Random) -> DraftingDevice:
        step_s = rng.choice(self.STEP_TIMES_S)
        network = self.network = Network(random.Random(rng.random()))
        num_drafters = rng.choice(self.NUM_DRAFTERS)
        self.drafters = [FakeDrafter(network, self._build_core) for _ in range(num_drafters)]
        hello = VerifierHello(
            verifier_id="simulated",
            model=ModelIdentity(vocab_size=VOCAB_SIZE),
            max_model_len=self.max_model_len,
            max_rows=self.max_num_seqs,
            branch_budget=4,
            branch_len=self.num_branch_steps * (MAX_DRAFT_TOKENS + 1),
        )
        self.transports = [
            FakeTransport(network, drafter, hello, self.weather.faults, f"fake-{index}")
            for index, drafter in enumerate(self.drafters)
        ]
        network.advance(0.01)  # the first drafters are there
        horizon_s = 200 * step_s
        for drafter in self.drafters:
            for _ in range(self.weather.crashes):
                crash_s = rng.uniform(0, horizon_s)
                network.after(crash_s, drafter.crash)
                network.after(crash_s + rng.uniform(0, horizon_s / 4), drafter.restart)
            for _ in range(self.weather.hangs):
                hang_s = rng.choice([0.001, 0.05, horizon_s])
                network.after(rng.uniform(0, horizon_s), lambda drafter=drafter, hang_s=hang_s: drafter.hang(hang_s))
        weather = self.weather
        are_drafts_right = weather.lie == weather.faults.damaged == weather.faults.garbled == 0
        rows = RowState(self.max_num_seqs, self.max_model_len, BLOCK_SIZE, torch.device("cpu"))
        return self.connect(rng, hello, rows, step_s, are_drafts_right)

    def connect(
        self, rng: random.Random, hello: VerifierHello, rows: RowState, step_s: float, are_drafts_right: bool
    ) -> DraftingDevice:
        """A device with drafts from the transports."""
        landing = CountingLandingBuffer(
            self.max_num_seqs, hello.branch_budget, hello.branch_len, MAX_DRAFT_TOKENS, rows.device
        )
        self.landing = landing
        drafts = self.drafts = RemoteDrafts(self._exchange(landing), landing, NoDraft())
        return HostDraftingDevice(rng, self.stop_rate, rows, drafts, self.network, step_s, are_drafts_right)

    def _exchange(self, landing: Landing) -> DraftExchange:
        return DraftExchange(self.transports, landing, self.max_num_seqs, VOCAB_SIZE, DEADLINE_S, self.network.clock)

    def _build_core(self) -> DrafterCore:
        texts = [[text_token(seed, position) for position in range(self.max_model_len)] for seed in range(NUM_TEXTS)]
        method = NoisyOracle(texts, self.weather.lie, self.network.rng.randrange(1 << 30), VOCAB_SIZE)
        max_rows = self.network.rng.choice([2, 16, 16])  # two may be too few
        rows = RowState(max_rows, self.max_model_len, BLOCK_SIZE, torch.device("cpu"))
        limits = DrafterLimits(16, self.max_model_len, 1 << 12, 64)
        return DrafterCore(method, "oracle", RowPool(rows), limits, ModelIdentity())

    def waited_s(self, start_s: float = 0.0, end_s: float = float("inf")) -> float:
        """How long the steps that began between two times have waited for drafters."""
        assert isinstance(self.device, DraftingDevice)
        return sum(wait for at, wait in self.device.waits_s if start_s <= at < end_s)

    def check(self) -> None:
        """Streams, blocks, rows, sessions, counters and waits."""
        super().check()
        assert isinstance(self.device, DraftingDevice)
        stats = self.drafts.stats
        assert all(wait <= DEADLINE_S + 1e-5 for _, wait in self.device.waits_s), "a step waited too long"
        assert stats.num_branches_used + stats.num_fallbacks == self.device.num_could_draft
        assert stats.num_branches_used + stats.num_fallback_drafts == self.device.num_drafted
        assert sum(drafter.num_rows for drafter in stats.drafters) == 0, "the exchange still has rows"
        lost = sum(drafter.num_stale_branches + drafter.num_invalid_branches for drafter in stats.drafters)
        received = sum(transport.num_branches_received for transport in self.transports)
        assert received == lost + self.landing.num_landed_branches
        for drafter in stats.drafters:
            assert drafter.num_accepted_tokens <= drafter.num_draft_tokens
        assert sum(drafter.num_drafts for drafter in stats.drafters) <= stats.num_branches_used
        if self.weather.faults == CALM.faults and not self.weather.crashes:
            self.network.advance(1.0 + self.weather.hangs * 4.0)  # what is on its way arrives
            left = [drafter.num_rows for drafter in self.drafters if not drafter.is_hung]
            assert not any(left), "a drafter still has sessions"
        self.drafts.close()
        self.network.advance(10.0)
        for drafter in self.drafters:
            if drafter.core is not None and not drafter.is_hung:
                load = drafter.core.load()
                assert (load.num_rows, load.num_streams) == (0, 0), "a drafter still has a verifier that is gone"


class LongSimulation(DraftSimulation):
    """Every request as long as it can be, so that there is time for something to happen and to pass."""

    MAX_MODEL_LENS = (400,)
    MIN_REQUESTS = 6
    MAX_REQUESTS = 8
    MAX_PROMPT_SHARE = 0.05
    STOP_RATES = (0.0,)
    SPARE_TOKENS = (40,)
    ABORT_RATE = 0.0
    NUM_DRAFTERS = (1,)
    STEP_TIMES_S = (0.02,)

    def __init__(self, seed: int, weather: Weather = CALM) -> None:
        super().__init__(seed, weather)
        self.requests = [
            replace(request, max_len=self.max_model_len, num_speculative_tokens=3) for request in self.requests
        ]
        self.start_s = self.network.now
