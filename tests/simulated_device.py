"""A device made of dictionaries: runs step plans with random acceptance and checks every KV block it touches.

The token of a request at a position is a pure function of (request, position), as sample-and-match promises, so the
right stream is known beforehand. A KV slot holds a fingerprint of the whole prefix it was computed from: a slot that
was overwritten, shared wrongly or never written shows at the next step that reads it.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from common.types import FinishReason, Request, TokenLogprobs
from verifier_svc.orchestrator.step import PlannedRow, RowOutcome, StepOutcome, StepPlan


@functools.cache
def text_token(seed: int, position: int) -> int:
    """Token of a text at a position."""
    return random.Random(f"{seed}/{position}").randrange(1000)


def true_token(request: Request, position: int) -> int:
    return text_token(request.seed, position)


def true_stream(request: Request, stop_rate: float) -> tuple[list[int], FinishReason]:
    """Output tokens of a request decoded alone, one token at a time."""
    tokens: list[int] = []
    for position in range(len(request.prompt_token_ids), request.max_len):
        token = true_token(request, position)
        tokens.append(token)
        if token < 1000 * stop_rate:
            return tokens, FinishReason.STOP
    return tokens, FinishReason.LENGTH


@dataclass
class DeviceRow:
    request: Request
    generation: int
    tokens: list[int]
    num_computed: int
    num_prompt_logprobs: int | None
    blocks: list[int] = field(default_factory=list)
    finished: bool = False


class SimulatedDevice:
    """Executes plans in order; `block_size` as the pool's; `accept` is the chance of each draft token."""

    def __init__(self, rng: random.Random, block_size: int, accept: float, stop_rate: float) -> None:
        self.rng = rng
        self.block_size = block_size
        self.accept = accept
        self.stop_rate = stop_rate
        self.rows: dict[int, DeviceRow] = {}
        self.generations: dict[int, int] = {}
        self.kv: dict[tuple[int, int], int] = {}
        self.max_query_tokens = 0

    def run(self, plan: StepPlan) -> StepOutcome:
        for new in plan.new_rows:
            generation = next(p.generation for p in plan.rows if p.row == new.row)
            assert generation > self.generations.get(new.row, -1), "a row changed hands under its old generation"
            self.generations[new.row] = generation
            self.rows[new.row] = DeviceRow(
                new.request, generation, list(new.tokens), new.num_computed_tokens, new.num_prompt_logprobs
            )
        for append in plan.block_appends:
            row = self.rows[append.row]
            row.blocks[append.start :] = append.block_ids
        # Every row's KV is written before any row reads: a prompt may share a block that this very step fills.
        starts = [self._write(planned) for planned in plan.rows]
        self._draft(plan.rows, starts)
        return StepOutcome(plan.step_id, [self._settle(*args) for args in zip(plan.rows, starts, strict=True)])

    def _write(self, planned: PlannedRow) -> int:
        row = self.rows[planned.row]
        assert row.generation == planned.generation
        start = row.num_computed
        if not row.finished:
            end = start + planned.num_tokens
            assert end <= len(row.tokens), "a step was planned past the committed tokens"
            for position in range(start, end):
                self._write_slot(row, position, row.tokens[: position + 1])
        return start

    def _settle(self, planned: PlannedRow, start: int) -> RowOutcome:
        row = self.rows[planned.row]
        if row.finished:
            return RowOutcome(planned.row, planned.generation, [], 0, 0)
        end = start + planned.num_tokens
        prompt_logprobs = self._prompt_logprobs(row, start, end)
        if end < len(row.tokens):
            row.num_computed = end
            return RowOutcome(planned.row, planned.generation, [], 0, 0, None, None, prompt_logprobs)
        drafts = self._drafts_of(row, planned)
        num_draft = len(drafts)
        accepted = 0
        while accepted < num_draft and drafts[accepted] == true_token(row.request, len(row.tokens) + accepted):
            accepted += 1
        for j in range(num_draft):
            self._write_slot(row, len(row.tokens) + j, row.tokens + drafts[: j + 1])
        for position in range(end):
            slot = row.blocks[position // self.block_size], position % self.block_size
            assert self.kv.get(slot) == hash(tuple(row.tokens[: position + 1])), "KV of another prefix was read"
        return self._commit(row, planned, num_draft, accepted, prompt_logprobs)

    def _draft(self, planned_rows: Sequence[PlannedRow], starts: Sequence[int]) -> None:
        """Before the rows are settled one by one: for those who draft for all at once. `starts`: tokens with KV."""

    def _drafts_of(self, row: DeviceRow, planned: PlannedRow) -> list[int]:
        """Draft tokens of a row that samples; random ones here."""
        limit = min(planned.max_draft_tokens, row.request.max_len - len(row.tokens) - 1)
        num_draft = self.rng.randint(0, limit) if limit > 0 else 0
        accepted = 0
        while accepted < num_draft and self.rng.random() < self.accept:
            accepted += 1
        return [true_token(row.request, len(row.tokens) + j) if j < accepted else -7 for j in range(num_draft)]

    def _commit(
        self,
        row: DeviceRow,
        planned: PlannedRow,
        num_draft: int,
        accepted: int,
        prompt_logprobs: list[TokenLogprobs] | None,
    ) -> RowOutcome:
        emitted: list[int] = []
        finish: FinishReason | None = None
        for _ in range(accepted + 1):
            token = true_token(row.request, len(row.tokens))
            row.tokens.append(token)
            emitted.append(token)
            if token < 1000 * self.stop_rate:
                finish = FinishReason.STOP
            elif len(row.tokens) == row.request.max_len:
                finish = FinishReason.LENGTH
            if finish:
                break
        assert len(row.tokens) <= row.request.max_len
        assert len(emitted) <= planned.max_new_tokens
        row.num_computed = len(row.tokens) - 1
        row.finished = finish is not None
        accepted = min(accepted, len(emitted))
        return RowOutcome(planned.row, planned.generation, emitted, num_draft, accepted, finish, None, prompt_logprobs)

    def _prompt_logprobs(self, row: DeviceRow, start: int, end: int) -> list[TokenLogprobs] | None:
        if row.num_prompt_logprobs is None:
            return None
        last = min(end, len(row.request.prompt_token_ids) - 1)
        return [TokenLogprobs([row.tokens[p + 1]], [float(p + 1)], 1) for p in range(start, last)]

    def _write_slot(self, row: DeviceRow, position: int, prefix: list[int]) -> None:
        index = position // self.block_size
        assert index < len(row.blocks), "a write beyond the reserved blocks"
        self.kv[row.blocks[index], position % self.block_size] = hash(tuple(prefix))

    def writable_blocks(self, plans: Iterable[StepPlan]) -> set[int]:
        """Blocks that plans not yet run could write if every draft token of theirs were accepted."""
        reach: dict[int, int] = {}
        tables: dict[int, list[int]] = {}  # with what the plans append: it may stand where trimmed blocks did
        for plan in plans:
            appends = {append.row: append for append in plan.block_appends}
            for planned in plan.rows:
                row = self.rows.get(planned.row)
                if row is None or row.generation != planned.generation:
                    continue
                reach[planned.row] = reach.get(planned.row, len(row.tokens)) + planned.max_new_tokens
                table = tables.setdefault(planned.row, list(row.blocks))
                if (append := appends.get(planned.row)) is not None:
                    table[append.start :] = append.block_ids
        blocks: set[int] = set()
        for index, end in reach.items():
            row = self.rows[index]
            last = (min(end, row.request.max_len) - 2) // self.block_size  # the last token of all gets no KV
            blocks.update(tables[index][row.num_computed // self.block_size : last + 1])
        return blocks
