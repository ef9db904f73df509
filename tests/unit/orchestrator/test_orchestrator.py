"""Plan and apply, one decision at a time. tests/property has the random schedules."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from common.errors import InvalidArgumentError, ResourceExhaustedError
from common.sampling_params import SamplingParams
from common.types import FinishReason, Request
from verifier_svc.orchestrator.block_pool import BlockPool
from verifier_svc.orchestrator.orchestrator import Orchestrator
from verifier_svc.orchestrator.step import PlannedRow, RowOutcome, StepOutcome, StepPlan

SIZE = 4


def make_request(
    name: str, prompt: int | Sequence[int] = 3, *, max_len: int = 40, k: int = 0, **params: Any
) -> Request:
    """A prompt of so many tokens, which no other request shares, or of these."""
    tokens = [1000 * ord(name[-1]) + i for i in range(prompt)] if isinstance(prompt, int) else list(prompt)
    return Request(name, tokens, SamplingParams(**params), seed=0, max_len=max_len, num_speculative_tokens=k)


def make(
    num_blocks: int = 33, *, rows: int = 4, tokens: int = 64, waiting: int = 8, beside: int | None = None
) -> Orchestrator:
    return Orchestrator(
        BlockPool(num_blocks, SIZE),
        max_num_seqs=rows,
        max_num_batched_tokens=tokens,
        max_num_waiting=waiting,
        max_prefill_beside_decode=beside,
    )


def plan(orchestrator: Orchestrator) -> StepPlan:
    """The next plan, of which there must be one."""
    planned = orchestrator.plan()
    assert planned is not None
    return planned


def answer(planned: StepPlan, emit: int = 1, finish: dict[int, FinishReason] | None = None) -> StepOutcome:
    """Each row that samples commits `emit` tokens, or as many as were planned for it."""
    return StepOutcome(planned.step_id, [_answer_row(p, emit, (finish or {}).get(p.row)) for p in planned.rows])


def _answer_row(row: PlannedRow, emit: int, finish: FinishReason | None) -> RowOutcome:
    tokens = [7] * min(emit, row.max_new_tokens)
    return RowOutcome(row.row, row.generation, tokens, row.max_draft_tokens, max(0, len(tokens) - 1), finish)


def step(orchestrator: Orchestrator, emit: int = 1) -> StepPlan:
    """One step of the synchronous loop."""
    planned = plan(orchestrator)
    orchestrator.apply(answer(planned, emit))
    return planned


def all_blocks_are_free(orchestrator: Orchestrator) -> bool:
    return orchestrator.pool.num_free == orchestrator.pool.num_blocks - 1


# -- queue -------------------------------------------------------------------------------------------------------------


def test_the_queue_is_bounded() -> None:
    orchestrator = make(waiting=2)
    orchestrator.add(make_request("a"))
    orchestrator.add(make_request("b"))
    with pytest.raises(ResourceExhaustedError, match=r"2 requests are waiting already: .*max_num_waiting = 2"):
        orchestrator.add(make_request("c"))
    plan(orchestrator)
    orchestrator.add(make_request("c"))
    assert (orchestrator.num_running, orchestrator.num_waiting) == (2, 1)


def test_an_id_is_used_once_at_a_time() -> None:
    orchestrator = make()
    orchestrator.add(make_request("a"))
    for _ in range(2):
        with pytest.raises(InvalidArgumentError, match="request_id = 'a'"):
            orchestrator.add(make_request("a"))
        orchestrator.plan()
    orchestrator.abort("a")
    orchestrator.add(make_request("a"))


def test_a_step_holds_a_token_of_every_row() -> None:
    with pytest.raises(InvalidArgumentError, match="max_num_batched_tokens = 3: expected at least max_num_seqs = 4"):
        make(rows=4, tokens=3)


def test_nothing_to_do() -> None:
    orchestrator = make()
    assert orchestrator.plan() is None
    assert not orchestrator.has_work
    assert orchestrator.num_in_flight == 0


def test_first_come_first_served() -> None:
    orchestrator = make(rows=2)
    for name in "abc":
        orchestrator.add(make_request(name))
    assert [new.request.request_id for new in plan(orchestrator).new_rows] == ["a", "b"]
    assert orchestrator.num_waiting == 1


# -- abort -------------------------------------------------------------------------------------------------------------


def test_abort_of_a_request_nobody_knows() -> None:
    assert not make().abort("a")


def test_abort_in_the_queue() -> None:
    orchestrator = make()
    orchestrator.add(make_request("a"))
    assert orchestrator.abort("a")
    assert not orchestrator.has_work
    assert orchestrator.plan() is None


def test_abort_in_prefill() -> None:
    orchestrator = make(tokens=5)
    orchestrator.add(make_request("a", 12))
    step(orchestrator)
    assert orchestrator.abort("a")
    assert all_blocks_are_free(orchestrator)
    assert (orchestrator.num_running, orchestrator.num_waiting) == (0, 0)


def test_abort_with_steps_in_flight() -> None:
    orchestrator = make()
    orchestrator.add(make_request("a", k=2))
    orchestrator.add(make_request("b", k=2))
    first, second = plan(orchestrator), plan(orchestrator)
    assert orchestrator.abort("a")
    assert orchestrator.has_work
    assert not all_blocks_are_free(orchestrator)
    events = orchestrator.apply(answer(first)) + orchestrator.apply(answer(second, emit=2))
    assert {event.request_id for event in events} == {"b"}
    assert orchestrator.stats.num_stale_outcomes == 2
    assert orchestrator.abort("b")
    assert all_blocks_are_free(orchestrator)


def test_abort_of_a_request_that_has_just_finished() -> None:
    orchestrator = make()
    orchestrator.add(make_request("a"))
    planned = plan(orchestrator)
    (event,) = orchestrator.apply(answer(planned, finish={planned.rows[0].row: FinishReason.STOP}))
    assert event.finish_reason is FinishReason.STOP
    assert not orchestrator.abort("a")
    assert all_blocks_are_free(orchestrator)


# -- budget ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("tokens", "drafts"), [(4, 0), (7, 0), (8, 1), (15, 2), (16, 3), (64, 3)])
def test_drafts_give_way_and_every_running_row_gets_a_token(tokens: int, drafts: int) -> None:
    orchestrator = make(rows=4, tokens=tokens)
    for name in "abcd":
        orchestrator.add(make_request(name, 1, k=3))
    while len(step(orchestrator).rows) < 4 or orchestrator.num_waiting:
        pass
    rows = plan(orchestrator).rows
    assert [(row.num_tokens, row.max_draft_tokens) for row in rows] == [(1, drafts)] * 4


def test_drafts_give_way_to_a_request_that_waits() -> None:
    orchestrator = make(rows=4, tokens=8)
    orchestrator.add(make_request("a", 1, k=3))
    orchestrator.add(make_request("b", 1, k=3))
    step(orchestrator)
    assert [row.max_draft_tokens for row in step(orchestrator).rows] == [3, 3]
    orchestrator.add(make_request("c", 3, k=3))
    planned = step(orchestrator)
    assert [new.request.request_id for new in planned.new_rows] == ["c"]
    assert [row.max_draft_tokens for row in planned.rows] == [1, 1, 0]


def test_a_prefill_goes_on_beside_decode_rows() -> None:
    orchestrator = make(rows=3, tokens=9)
    for name, length in (("a", 1), ("b", 1), ("c", 20)):
        orchestrator.add(make_request(name, length, k=5))
    assert [row.num_tokens for row in step(orchestrator).rows] == [1, 1, 7]
    rows = plan(orchestrator).rows
    assert [(row.num_tokens, row.max_draft_tokens) for row in rows] == [(1, 2), (1, 2), (3, 0)]


def test_a_long_prompt_comes_in_chunks_and_samples_at_its_end() -> None:
    orchestrator = make(tokens=8)
    orchestrator.add(make_request("a", 20, k=3))
    chunks = [step(orchestrator).rows[0] for _ in range(3)]
    assert [chunk.num_tokens for chunk in chunks] == [8, 8, 4]
    assert [chunk.max_new_tokens for chunk in chunks] == [0, 0, 1]
    assert [chunk.max_draft_tokens for chunk in chunks] == [0, 0, 0]
    assert plan(orchestrator).rows[0].max_new_tokens == 4


def num_tokens(planned: StepPlan) -> list[int]:
    return [row.num_tokens for row in planned.rows]


def test_prompts_are_short_beside_rows_that_decode_and_long_without_any() -> None:
    orchestrator = make(tokens=32, beside=6)
    orchestrator.add(make_request("a", 35))
    assert num_tokens(step(orchestrator)) == [32], "nobody waits for it"
    orchestrator.add(make_request("b", 20))
    # "a" is still in its prompt, so that the rest of the step is for "b".
    assert num_tokens(step(orchestrator)) == [3, 20]
    orchestrator.add(make_request("c", 15))
    assert [num_tokens(step(orchestrator)) for _ in range(4)] == [[1, 1, 4], [1, 1, 4], [1, 1, 4], [1, 1, 3]]


def test_prompts_share_what_they_may_take_beside_rows_that_decode() -> None:
    orchestrator = make(tokens=32, beside=8)
    orchestrator.add(make_request("a", 3, k=2))
    step(orchestrator)
    for name in "bc":
        orchestrator.add(make_request(name, 4))
    planned = step(orchestrator)
    assert [(row.num_tokens, row.max_draft_tokens) for row in planned.rows] == [(1, 2), (4, 0), (1, 0)]
    assert [new.request.request_id for new in planned.new_rows] == ["b", "c"]
    assert num_tokens(step(orchestrator)) == [1, 1, 3]


def test_rows_that_decode_leave_prompts_half_of_what_these_may_take() -> None:
    orchestrator = make(tokens=32, beside=6)
    for name in "abc":
        orchestrator.add(make_request(name, 2, k=3))
    step(orchestrator)
    orchestrator.add(make_request("d", 9))
    assert [num_tokens(step(orchestrator)) for _ in range(3)] == [[1, 1, 1, 3]] * 3


@pytest.mark.parametrize(("beside", "chunk"), [(1, 1), (2, 1), (3, 1), (4, 2)])
def test_prompts_get_a_token_however_small_the_bound_is(beside: int, chunk: int) -> None:
    orchestrator = make(tokens=32, beside=beside)
    for name in "abc":
        orchestrator.add(make_request(name, 2, k=3))
    step(orchestrator)
    orchestrator.add(make_request("d", 9))
    assert [num_tokens(step(orchestrator)) for _ in range(3)] == [[1, 1, 1, chunk]] * 3


def test_a_request_waits_for_a_step_with_room_for_its_prompt() -> None:
    orchestrator = make(tokens=32, beside=4)
    orchestrator.add(make_request("a", 3))
    step(orchestrator)
    for name in "bc":
        orchestrator.add(make_request(name, 4))
    assert [new.request.request_id for new in step(orchestrator).new_rows] == ["b"]
    assert [new.request.request_id for new in step(orchestrator).new_rows] == ["c"]


def test_a_bound_beyond_the_step_changes_nothing() -> None:
    orchestrator = make(rows=3, tokens=9, beside=64)
    for name, length in (("a", 1), ("b", 20)):
        orchestrator.add(make_request(name, length, k=3))
    assert num_tokens(step(orchestrator)) == [1, 8]
    rows = plan(orchestrator).rows
    assert [(row.num_tokens, row.max_draft_tokens) for row in rows] == [(1, 3), (5, 0)]


def test_a_request_without_speculation_gets_no_drafts() -> None:
    orchestrator = make()
    orchestrator.add(make_request("a", k=0))
    orchestrator.add(make_request("b", k=2))
    step(orchestrator)
    assert [row.max_draft_tokens for row in plan(orchestrator).rows] == [0, 2]


# -- prefix cache ------------------------------------------------------------------------------------------------------


def num_cached(orchestrator: Orchestrator, tokens: Sequence[int]) -> int:
    blocks, _ = orchestrator.pool.lookup([*tokens, -1])
    orchestrator.pool.free(blocks)
    return len(blocks)


def test_a_generated_block_is_filed_when_the_kv_of_all_its_tokens_is_written() -> None:
    """The last committed token has no KV yet, and what a draft claims is no token."""
    orchestrator = make()
    request = make_request("a", 2, k=5)
    orchestrator.add(request)
    text = [*request.prompt_token_ids, *[7] * 20]
    step(orchestrator)  # 3 tokens
    planned = plan(orchestrator)  # drafts reach over the end of the block
    assert num_cached(orchestrator, text) == 0
    orchestrator.apply(answer(planned, emit=1))  # 4 tokens: the block is full but its last KV is not written
    assert num_cached(orchestrator, text) == 0
    step(orchestrator, emit=1)
    assert num_cached(orchestrator, text) == 1
    step(orchestrator, emit=4)  # 9 tokens
    assert num_cached(orchestrator, text) == 2


def test_a_chunk_files_the_blocks_it_fills() -> None:
    orchestrator = make(tokens=6)
    request = make_request("a", 12)
    orchestrator.add(request)
    assert [(step(orchestrator), num_cached(orchestrator, request.prompt_token_ids))[1] for _ in range(2)] == [1, 3]


def test_a_prompt_that_is_known_is_not_computed_again() -> None:
    orchestrator = make()
    orchestrator.add(make_request("a", range(9)))
    step(orchestrator)
    orchestrator.add(make_request("b", range(9)))
    (new,) = plan(orchestrator).new_rows
    assert new.num_computed_tokens == 8
    assert (orchestrator.stats.num_prefix_queries, orchestrator.stats.num_prefix_hits) == (18, 8)


def test_prompt_logprobs_skip_nothing() -> None:
    orchestrator = make()
    orchestrator.add(make_request("a", range(9)))
    step(orchestrator)
    orchestrator.add(make_request("b", range(9), prompt_logprobs=0))
    planned = plan(orchestrator)
    assert planned.new_rows[0].num_computed_tokens == 0
    assert planned.new_rows[0].num_prompt_logprobs == 0
    assert max(row.num_tokens for row in planned.rows) == 9
    assert orchestrator.stats.num_prefix_queries == 9, "it is no miss of the cache"


def test_admission_that_waits_for_blocks_does_not_look_the_prefix_up_again(monkeypatch: pytest.MonkeyPatch) -> None:
    orchestrator = make(num_blocks=1 + 10)
    orchestrator.add(make_request("a", 30))
    step(orchestrator)
    lookups: list[int] = []
    lookup = orchestrator.pool.lookup

    def counted(tokens: Sequence[int]) -> tuple[list[int], int]:
        lookups.append(len(tokens))
        return lookup(tokens)

    monkeypatch.setattr(orchestrator.pool, "lookup", counted)
    orchestrator.add(make_request("b", 20))
    for _ in range(5):
        step(orchestrator)
    assert lookups == [20]
    orchestrator.abort("a")
    assert plan(orchestrator).new_rows[0].request.request_id == "b"


def test_admission_that_waits_for_blocks_needs_fewer_when_fewer_run() -> None:
    orchestrator = make(num_blocks=1 + 10)
    for name in "abc":
        orchestrator.add(make_request(name, 5))
    step(orchestrator)  # 6 blocks; 4 are left
    orchestrator.add(make_request("d", 13))  # 4 blocks, and one for each that runs
    assert not step(orchestrator).new_rows
    orchestrator.abort("a")
    assert [new.request.request_id for new in plan(orchestrator).new_rows] == ["d"]


# -- preemption --------------------------------------------------------------------------------------------------------


def test_the_newest_request_is_preempted_and_keeps_its_place_at_the_head_of_the_queue() -> None:
    orchestrator = make(num_blocks=1 + 6, rows=2)
    orchestrator.add(make_request("a", 7, max_len=24))
    step(orchestrator)
    orchestrator.add(make_request("b", 7, max_len=24))
    step(orchestrator)
    orchestrator.add(make_request("c", 1))
    while not orchestrator.stats.num_preemptions:
        step(orchestrator)
    assert (orchestrator.num_running, orchestrator.num_waiting) == (1, 2)
    orchestrator.abort("a")
    planned = plan(orchestrator)
    assert [new.request.request_id for new in planned.new_rows] == ["b", "c"]
    assert len(planned.new_rows[0].tokens) > 7, "committed tokens are kept"


def test_two_preempted_in_one_step_come_back_in_their_order() -> None:
    orchestrator = make(num_blocks=1 + 9, rows=3)
    for name in "abc":
        orchestrator.add(make_request(name, 4, max_len=36))
    while orchestrator.num_running > 1:
        step(orchestrator)
    orchestrator.abort("a")
    assert [new.request.request_id for new in plan(orchestrator).new_rows] == ["b", "c"]


def test_outcome_of_a_preempted_row_is_dropped_and_counted() -> None:
    orchestrator = make(num_blocks=1 + 4, rows=2)
    orchestrator.add(make_request("a", 7, max_len=16))
    orchestrator.add(make_request("b", 3, max_len=16))
    step(orchestrator)
    before = plan(orchestrator)
    while not orchestrator.stats.num_preemptions:
        assert orchestrator.num_in_flight < 9
        orchestrator.plan()
    events = orchestrator.apply(answer(before))
    assert [event.request_id for event in events] == ["a"]
    assert orchestrator.stats.num_stale_outcomes == 1


# -- lengths and rows --------------------------------------------------------------------------------------------------


def test_a_row_gets_a_new_generation_with_each_request() -> None:
    orchestrator = make(rows=1)
    generations: list[int] = []
    for name in "abc":
        orchestrator.add(make_request(name))
        planned = plan(orchestrator)
        generations.append(planned.rows[0].generation)
        orchestrator.apply(answer(planned, finish={0: FinishReason.STOP}))
    assert generations == [0, 1, 2]


def test_outcomes_come_in_order() -> None:
    orchestrator = make()
    orchestrator.add(make_request("a"))
    _, second = plan(orchestrator), plan(orchestrator)
    with pytest.raises(AssertionError, match="outcome of step 1 came where step 0 was due"):
        orchestrator.apply(answer(second))


def test_blocks_reserved_for_rejected_drafts_come_back() -> None:
    orchestrator = make()
    orchestrator.add(make_request("a", 3, k=16))
    step(orchestrator)
    first, second = plan(orchestrator), plan(orchestrator)
    assert orchestrator.pool.num_free == 32 - 10  # 4 committed tokens, 17 that the first step may add, 16 drafts
    orchestrator.apply(answer(first, emit=1))
    assert orchestrator.pool.num_free == 32 - 10, "the second step may still write them"
    orchestrator.apply(answer(second, emit=1))
    assert orchestrator.pool.num_free == 32 - 6  # 6 committed tokens and 16 drafts of the next step


def test_draft_statistics_are_those_of_the_outcomes() -> None:
    orchestrator = make()
    orchestrator.add(make_request("a", 3, k=3))
    step(orchestrator)
    step(orchestrator, emit=2)
    stats = orchestrator.draft_stats
    assert (stats.num_drafts, stats.num_draft_tokens, stats.num_accepted_tokens) == (1, 3, 1)
