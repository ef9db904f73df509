"""One step on the device: draft, build inputs, forward, sample, match and commit. Torch operations on row state.

Everything a step needs to know about lengths and tokens it reads from the row state, never from the host: a step can
run while the outcome of the one before it has not reached the orchestrator yet.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from common.types import FinishReason, TokenLogprobs
from model_executor.batch_builder import build_forward_batch
from model_executor.drafting import DraftMethod
from model_executor.forward_batch import ForwardBatch
from model_executor.kv_cache import KVCache
from model_executor.models.decoder import Decoder
from model_executor.row_state import RowState
from verifier_svc.engine.prompt_logprobs import PromptChunk, PromptLogprobs
from verifier_svc.engine.session_tracker import SessionTracker
from verifier_svc.orchestrator.step import PlannedRow, RowOutcome, StepOutcome, StepPlan
from verifier_svc.sampling.commit import FINISHED_LENGTH, FINISHED_STOP, NOT_FINISHED, CommitResult, match_and_commit
from verifier_svc.sampling.logprobs import gather_logprobs
from verifier_svc.sampling.sampler import Sampler
from verifier_svc.sampling.state import SamplingState

_FINISH_REASONS = {
    NOT_FINISHED: None,
    FINISHED_STOP: FinishReason.STOP,
    FINISHED_LENGTH: FinishReason.LENGTH,
}


@dataclass(frozen=True, slots=True)
class StepRows:
    """The rows of one step that are still running. B entries."""

    planned: list[PlannedRow]
    idx_mapping: Tensor  # [B] int64, row of each entry
    num_tokens: Tensor  # [B] int64, committed tokens to compute
    samples: Tensor  # [B] bool, the last committed token is among them
    max_draft_tokens: Tensor  # [B] int64


@dataclass(frozen=True, slots=True)
class SampleRows:
    """The T positions that a step samples: of each row that samples, behind its last token and behind each draft."""

    entry: Tensor  # [T] int64, which entry of the step
    offset: Tensor  # [T] int64, 0 .. draft_len within the entry
    token_index: Tensor  # [T] int64, which token of the forward batch
    position: Tensor  # [T] int64, absolute index of the token to draw


class ModelRunner:
    """Runs step plans in order on one device.

    Args:
        decoder: the target model.
        kv_cache: paged KV.
        rows: row state.
        sampling: sampling parameters of the rows.
        draft_method: what claims the next tokens.
    """

    def __init__(
        self, decoder: Decoder, kv_cache: KVCache, rows: RowState, sampling: SamplingState, draft_method: DraftMethod
    ) -> None:
        self._decoder = decoder
        self._kv_cache = kv_cache
        self._rows = rows
        self._sampling = sampling
        self._sampler = Sampler(sampling)
        self._draft_method = draft_method
        self._sessions = SessionTracker()
        self._prompt_logprobs = PromptLogprobs(decoder, rows)
        self._num_logprobs: list[int | None] = [None] * rows.committed_len.shape[0]  # host side, by row

    def run(self, plan: StepPlan) -> StepOutcome:
        """Execute one step and say what it committed."""
        self._stage(plan)
        outcome = self._execute(plan)
        self._draft_method.observe(self._sessions.update(plan, outcome))
        return outcome

    def close(self) -> None:
        """Let go of the draft method; no step runs after this."""
        self._draft_method.close()

    @torch.inference_mode()
    def _execute(self, plan: StepPlan) -> StepOutcome:
        step = self._select(plan)
        if not step.planned:
            return _outcome(plan, {})
        draft_len = self._draft(step)
        batch = build_forward_batch(self._rows, step.idx_mapping, step.num_tokens + draft_len)
        metadata = self._decoder.attention.prepare(batch)
        hidden = self._decoder.forward(batch, self._kv_cache, metadata)  # [num_tokens, hidden]
        prompt_logprobs = self._prompt_logprobs.compute(self._prompt_chunks(step, hidden, batch))
        where = self._sample_rows(step, draft_len, batch.query_start_loc)
        logits = self._decoder.compute_logits(hidden[where.token_index])  # [T, vocab_size]
        sampled = self._sampler.sample(
            logits, step.idx_mapping[where.entry], where.position, self._rows.token_ids, self._rows.prompt_len
        )
        result = self._commit(step, draft_len, where, sampled)
        logprobs = self._logprobs(step, where, logits, sampled)
        return _outcome(plan, _row_outcomes(step, draft_len, result, logprobs, prompt_logprobs))

    def _stage(self, plan: StepPlan) -> None:
        """Bring new rows and blocks of a plan to the device."""
        generations = {planned.row: planned.generation for planned in plan.rows} if plan.new_rows else {}
        for new in plan.new_rows:
            request = new.request
            self._rows.set_row(
                new.row,
                new.tokens,
                request.prompt_len,
                new.num_computed_tokens,
                request.max_len,
                generations[new.row],
            )
            self._sampling.set_row(new.row, request)
            self._num_logprobs[new.row] = request.params.logprobs
            self._prompt_logprobs.set_row(new.row, new.num_prompt_logprobs)
        for append in plan.block_appends:
            self._rows.append_blocks(append.row, append.start, append.block_ids)

    def _select(self, plan: StepPlan) -> StepRows:
        """Rows that have finished since the plan was made are left out: they are no-ops."""
        rows = self._rows
        idx_mapping = torch.tensor([p.row for p in plan.rows], dtype=torch.int64, device=rows.device)
        planned = plan.rows
        finished: list[bool] = rows.finished[idx_mapping].tolist()
        if any(finished):
            planned = [p for p, is_finished in zip(planned, finished, strict=True) if not is_finished]
            idx_mapping = torch.tensor([p.row for p in planned], dtype=torch.int64, device=rows.device)
        num_tokens = torch.tensor([p.num_tokens for p in planned], dtype=torch.int64, device=rows.device)
        limit = torch.tensor([p.max_draft_tokens for p in planned], dtype=torch.int64, device=rows.device)
        committed_len = rows.committed_len[idx_mapping]
        samples = rows.num_computed_tokens[idx_mapping] + num_tokens == committed_len
        room = rows.max_len[idx_mapping] - committed_len - 1  # the bonus token comes on top
        return StepRows(planned, idx_mapping, num_tokens, samples, torch.minimum(limit, room).clamp(min=0) * samples)

    def _draft(self, step: StepRows) -> Tensor:
        """Draft tokens of each entry, [B] int64; the tokens stand in the row state."""
        if not any(p.max_draft_tokens for p in step.planned):
            return torch.zeros_like(step.max_draft_tokens)
        return self._draft_method.propose(self._rows, step.idx_mapping, step.max_draft_tokens)

    def _prompt_chunks(self, step: StepRows, hidden: Tensor, batch: ForwardBatch) -> dict[int, PromptChunk]:
        """What the step computed for rows that ask for log probabilities of their prompt."""
        if not any(self._prompt_logprobs.wants(p.row) for p in step.planned):
            return {}
        starts: list[int] = batch.query_start_loc.tolist()
        return {
            p.row: PromptChunk(hidden[starts[i] : starts[i + 1]], int(batch.positions[starts[i]]))
            for i, p in enumerate(step.planned)
        }

    def _sample_rows(self, step: StepRows, draft_len: Tensor, query_start_loc: Tensor) -> SampleRows:
        counts = (draft_len + 1) * step.samples  # [B]
        ends = counts.cumsum(0)  # [B]
        total = int(ends[-1])
        entry = torch.repeat_interleave(counts, output_size=total)  # [T]
        offset = torch.arange(total, device=counts.device) - (ends - counts)[entry]  # [T]
        first_token = query_start_loc[1:] - counts  # [B], the last committed token
        position = self._rows.committed_len[step.idx_mapping]  # [B]
        return SampleRows(entry, offset, first_token[entry] + offset, position[entry] + offset)

    def _commit(self, step: StepRows, draft_len: Tensor, where: SampleRows, sampled: Tensor) -> CommitResult:
        rows = self._rows
        width = max(p.max_draft_tokens for p in step.planned) + 1
        drawn = torch.full((len(step.planned), width), -1, dtype=torch.int64, device=rows.device)  # [B, K + 1]
        drawn[where.entry, where.offset] = sampled
        # A chunk that ends before the last committed token only moves the prefill on; a row that samples is set below.
        rows.num_computed_tokens[step.idx_mapping] += step.num_tokens
        return match_and_commit(rows, self._sampling, step.idx_mapping, draft_len, drawn, step.samples)

    def _logprobs(
        self, step: StepRows, where: SampleRows, logits: Tensor, sampled: Tensor
    ) -> dict[int, list[TokenLogprobs]]:
        """Log probabilities of every drawn token, by row, for the rows that ask."""
        wanted = {p.row: self._num_logprobs[p.row] for p in step.planned}
        if all(count is None for count in wanted.values()):
            return {}
        entry_rows = step.idx_mapping[where.entry]  # [T]
        found: dict[int, list[TokenLogprobs]] = {}
        for row, count in wanted.items():
            if count is not None:
                mask = entry_rows == row
                found[row] = gather_logprobs(logits[mask], sampled[mask], count)
        return found


def _row_outcomes(
    step: StepRows,
    draft_len: Tensor,
    result: CommitResult,
    logprobs: dict[int, list[TokenLogprobs]],
    prompt_logprobs: dict[int, list[TokenLogprobs]],
) -> dict[int, RowOutcome]:
    outcomes: dict[int, RowOutcome] = {}
    columns = (draft_len, result.num_emitted, result.num_accepted, result.finished, result.tokens)
    for planned, num_draft, count, accepted, finished, tokens in zip(
        step.planned, *(column.tolist() for column in columns), strict=True
    ):
        row_logprobs = logprobs.get(planned.row)
        outcomes[planned.row] = RowOutcome(
            planned.row,
            planned.generation,
            tokens[:count],
            num_draft,
            accepted,
            _FINISH_REASONS[finished],
            None if row_logprobs is None else row_logprobs[:count],
            prompt_logprobs.get(planned.row),
        )
    return outcomes


def _outcome(plan: StepPlan, outcomes: dict[int, RowOutcome]) -> StepOutcome:
    """In the plan's order; a row that had finished before the step reports nothing."""
    rows = [outcomes.get(p.row) or RowOutcome(p.row, p.generation, [], 0, 0) for p in plan.rows]
    return StepOutcome(plan.step_id, rows)
