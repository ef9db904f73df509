"""Bugs that other engines shipped, in planning and n-gram drafting. Numbers are issues of vllm-project/vllm.

Those of sampling stand in tests/unit/sampling/test_traps_sampling.py, those that take a whole engine in
tests/integration/test_traps.py.
"""

from __future__ import annotations

import random
from collections import deque
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from common.sampling_params import SamplingParams
from common.types import FinishReason, Request
from drafter_svc.methods.ngram import NgramMethod
from model_executor.row_state import RowState
from tests.simulated_device import SimulatedDevice, text_token
from verifier_svc.orchestrator.block_pool import BlockPool
from verifier_svc.orchestrator.orchestrator import Orchestrator
from verifier_svc.orchestrator.step import RowOutcome, StepOutcome, StepPlan

SIZE = 4


def make_request(name: str, prompt_len: int, max_len: int, k: int, seed: int = 0) -> Request:
    prompt = [text_token(seed, position) for position in range(prompt_len)]
    return Request(name, prompt, SamplingParams(), seed, max_len, num_speculative_tokens=k)


def make(num_blocks: int, rows: int = 4) -> Orchestrator:
    pool = BlockPool(num_blocks, SIZE, enable_prefix_caching=False)
    return Orchestrator(pool, max_num_seqs=rows, max_num_batched_tokens=64, max_num_waiting=8)


def plan(orchestrator: Orchestrator) -> StepPlan:
    planned = orchestrator.plan()
    assert planned is not None
    return planned


def reject_all(planned: StepPlan) -> StepOutcome:
    """Every row that samples commits one token, and every draft is rejected."""
    outcomes = [(p, [5] if p.max_new_tokens else []) for p in planned.rows]
    rows = [RowOutcome(p.row, p.generation, tokens, p.max_draft_tokens, 0) for p, tokens in outcomes]
    return StepOutcome(planned.step_id, rows)


# -- lengths and placeholders ------------------------------------------------------------------------------------------


def test_38098_38419_a_resumed_row_holds_committed_tokens_only() -> None:
    """#38098, #38419: the optimistic length was used as an index, and a drafter was fed the token -1 behind the text.

    A request is preempted while steps with drafts of it are in flight. What the device gets when it comes back is what
    was committed, whatever the steps in flight might have added.
    """
    orchestrator = make(num_blocks=64)
    request = make_request("a", 3, 40, k=5)
    orchestrator.add(request)
    orchestrator.apply(reject_all(plan(orchestrator)))
    in_flight = [plan(orchestrator), plan(orchestrator)]
    (state,) = orchestrator._running
    assert (state.committed_len, state.optimistic_len) == (4, 4 + 2 * 6)
    orchestrator._preempt(state)
    resumed = plan(orchestrator)
    assert resumed.new_rows[0].tokens == [*request.prompt_token_ids, 5]
    assert resumed.rows[0].num_tokens == 4
    for planned in in_flight:
        assert orchestrator.apply(reject_all(planned)) == []
    assert state.tokens == [*request.prompt_token_ids, 5]
    (event,) = orchestrator.apply(reject_all(resumed))
    assert event.tokens == [5]


@pytest.mark.parametrize("depth", [2, 3, 4])
def test_48245_preemption_with_outputs_in_flight_keeps_every_count(depth: int) -> None:
    """#48245: a row was preempted with outputs in flight, whose counts went below zero, and the engine died."""
    preemptions = stale = 0
    for seed in range(40):
        rng = random.Random(seed)
        orchestrator = make(num_blocks=1 + 10, rows=3)
        device = SimulatedDevice(rng, SIZE, accept=0.5, stop_rate=0.0)
        for name in "abcdefgh":
            orchestrator.add(make_request(name, rng.randint(1, 8), rng.choice([12, 36]), k=4, seed=ord(name)))
        in_flight: deque[StepPlan] = deque()
        while orchestrator.has_work:
            if rng.random() < 0.1:  # a row that changes hands while it has outcomes to come
                orchestrator.abort(rng.choice("abcdefgh"))
            while len(in_flight) < depth and (planned := orchestrator.plan()) is not None:
                in_flight.append(planned)
            orchestrator.apply(device.run(in_flight.popleft()))
            for state in [*orchestrator._running, *orchestrator._waiting]:
                # Just what the plans in flight can bring, no more and no less.
                ours = [p for planned in in_flight for p in planned.rows if p[:2] == (state.row, state.generation)]
                assert state.max_tokens_in_flight == sum(p.max_new_tokens for p in ours)
                assert state.num_samples_in_flight == sum(p.max_new_tokens > 0 for p in ours)
            assert orchestrator._rows.num_releasing_blocks == sum(
                len(blocks) for _, blocks in orchestrator._rows._releasing
            )
        preemptions += orchestrator.stats.num_preemptions
        stale += orchestrator.stats.num_stale_outcomes
        assert orchestrator.pool.num_free == 10
    assert preemptions > 0
    assert stale > 0


def test_45357_47728_blocks_of_an_aborted_row_rest_until_its_steps_have_run() -> None:
    """#45357, #47728: a block was freed and given to another request while a step in flight still wrote to it."""
    orchestrator = make(num_blocks=1 + 8)
    orchestrator.add(make_request("a", 15, 32, k=4))
    first, second = plan(orchestrator), plan(orchestrator)
    in_use = {block for planned in (first, second) for append in planned.block_appends for block in append.block_ids}
    assert len(in_use) >= 5
    orchestrator.abort("a")
    orchestrator.add(make_request("b", 24, 32, k=0))  # needs more than what is not in use
    for planned in (first, second):
        assert not plan_blocks(orchestrator) & in_use
        orchestrator.apply(reject_all(planned))
    while orchestrator.num_in_flight:
        orchestrator.apply(StepOutcome(orchestrator._in_flight[0].step_id, []))
    assert plan_blocks(orchestrator) & in_use, "now they may be used again"


def plan_blocks(orchestrator: Orchestrator) -> set[int]:
    planned = orchestrator.plan()
    return {block for append in planned.block_appends for block in append.block_ids} if planned else set()


def test_45357_47728_blocks_of_a_finished_row_rest_until_its_steps_have_run() -> None:
    """The same where the row finished: the step behind the last one was planned before anybody knew."""
    orchestrator = make(num_blocks=1 + 8)
    orchestrator.add(make_request("a", 3, 32, k=4))
    first, second = plan(orchestrator), plan(orchestrator)
    (row,) = first.rows
    orchestrator.apply(StepOutcome(0, [RowOutcome(row.row, row.generation, [5], 0, 0, FinishReason.STOP)]))
    assert orchestrator.pool.num_free < 8
    orchestrator.apply(StepOutcome(1, [RowOutcome(row.row, row.generation, [], 0, 0) for _ in second.rows]))
    assert orchestrator.pool.num_free == 8


@pytest.mark.parametrize("k", [0, 1, 5])
def test_27922_no_step_is_planned_past_max_tokens(k: int) -> None:
    """#27922: a step was scheduled though those in flight were sure to reach max_tokens."""
    orchestrator = make(num_blocks=64)
    orchestrator.add(make_request("a", 3, max_len=3 + 4, k=k))
    # Each step commits one token at least, so the fourth is sure to end the output.
    plans = [plan(orchestrator) for _ in range(4)]
    assert orchestrator.plan() is None
    for num_before, planned in enumerate(plans):
        # One token of each step before this one is sure, and one more is drawn beside the drafts.
        assert planned.rows[0].max_draft_tokens <= max(0, 4 - num_before - 1)


def test_13673_drafts_are_planned_within_max_len_and_so_are_their_blocks() -> None:
    """#13673: drafts beyond max_model_len were written to memory that no block was behind."""
    orchestrator = make(num_blocks=64)
    orchestrator.add(make_request("a", 6, max_len=8, k=5))
    orchestrator.apply(reject_all(plan(orchestrator)))
    planned = plan(orchestrator)
    assert planned.rows[0].max_draft_tokens == 0
    assert sum(len(state.block_ids) for state in orchestrator._running) == 2


# -- dummy block -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("caching", [True, False])
def test_56734_the_dummy_block_is_never_owned(caching: bool) -> None:
    """#56734: warm-up steps wrote through stale block tables into blocks of the prefix cache. They get a block of their
    own here, which the pool must never hand out, through whatever cycle of filing, eviction and reset."""
    rng = random.Random(0)
    pool = BlockPool(9, SIZE, caching)
    held: list[list[int]] = []
    for _ in range(500):
        if held and (pool.num_free == 0 or rng.random() < 0.5):
            pool.free(held.pop(rng.randrange(len(held))))
        elif rng.random() < 0.02:
            pool.reset_cache()
        elif pool.num_free:
            blocks = pool.allocate(rng.randint(1, pool.num_free))
            assert 0 not in blocks
            pool.register(blocks[0], 0, tuple(rng.randrange(2) for _ in range(SIZE)))
            held.append(blocks)


# -- n-gram ------------------------------------------------------------------------------------------------------------


def draft(texts: list[list[int]], limits: list[int], longest: int = 5, shortest: int = 2) -> list[list[int]]:
    rows = RowState(len(texts), 64, 16, torch.device("cpu"))
    for row, text in enumerate(texts):
        rows.set_row(row, text, len(text), 0, 64)
    counts = NgramMethod(longest, shortest).propose(rows, torch.arange(len(texts)), torch.tensor(limits)).tolist()
    return [rows.token_ids[r, len(t) : len(t) + counts[r]].tolist() for r, t in enumerate(texts)]


def test_37150_44056_a_row_without_a_match_does_not_count_as_drafted() -> None:
    """#37150, #44056: acceptance was counted with padded and trimmed drafts, so that the rate was wrong."""
    assert draft([[1, 2, 3, 4], [1, 2, 9, 1, 2]], [3, 3]) == [[], [9, 1]]
    orchestrator = make(num_blocks=64)
    orchestrator.add(make_request("a", 3, 40, k=5))
    orchestrator.apply(reject_all(plan(orchestrator)))
    for num_draft, num_accepted in ((0, 0), (2, 1), (0, 0)):  # what the device verified, of 5 that were allowed
        planned = plan(orchestrator)
        (row,) = planned.rows
        assert row.max_draft_tokens == 5
        tokens = [5] * (num_accepted + 1)
        result = RowOutcome(row.row, row.generation, tokens, num_draft, num_accepted)
        orchestrator.apply(StepOutcome(planned.step_id, [result]))
    stats = orchestrator.draft_stats
    assert (stats.num_drafts, stats.num_draft_tokens, stats.num_accepted_tokens) == (1, 2, 1)
    assert stats.num_accepted_tokens_per_pos == [1, 0]


def test_40875_short_matches_draft_little_and_longer_ones_come_first() -> None:
    """#40875: with a minimum of 2 the first short match drafted all K tokens, mostly noise."""
    text = [1, 2, 3, 4, 50, 51, 52, 53, 3, 4, 60, 61, 62, 63]
    assert draft([[*text, 3, 4]], [5]) == [[60, 61]], "a match of 2 drafts 2 tokens"
    assert draft([[*text, 2, 3, 4]], [5]) == [[50, 51, 52]], "a match of 3 wins over a later one of 2"
    assert draft([[*text, 4]], [5]) == [[]], "one token is no match"


class LargestTensor(TorchDispatchMode):
    """Sees the result of every torch operation, but for views of one tensor and writes to it."""

    def __init__(self, but: Tensor) -> None:
        super().__init__()
        self._but = but.untyped_storage().data_ptr()
        self.num_elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.untyped_storage().data_ptr() != self._but:
            self.num_elements = max(self.num_elements, result.numel())
        return result


def test_search_covers_the_real_length_and_not_the_padded_width() -> None:
    """A search over [rows, max_model_len] costs the longest text that could be, each step."""
    max_model_len = 200_000
    rows = RowState(3, max_model_len, 16, torch.device("cpu"))
    rows.token_ids.fill_(7)  # would match everywhere
    texts = [[1, 2, 3, 1, 2], [4] * 50, [5, 6]]
    for row, text in enumerate(texts):
        rows.set_row(row, text, len(text), 0, max_model_len)
    with LargestTensor(rows.token_ids) as seen:
        counts = NgramMethod(5, 2).propose(rows, torch.arange(3), torch.tensor([4, 4, 4]))
    assert counts.tolist() == [2, 4, 0]
    total = sum(len(text) for text in texts)
    assert total <= seen.num_elements < 4 * total
