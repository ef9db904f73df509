"""What each step means for the drafter's sessions."""

from __future__ import annotations

from common.draft_exchange import RowCommitted, RowOpened, SessionUpdate
from verifier_svc.orchestrator.step import NewRow, StepOutcome, StepPlan

# A frame carries it in 32 bits, a request may name any number, and no vocabulary has more tokens than this.
_MAX_TOP_K = 2**31 - 1


class SessionTracker:
    """Turns plans and outcomes, in order, into session updates. It knows how long each row is, and nothing else."""

    def __init__(self) -> None:
        self._committed_len: dict[int, int] = {}  # by row

    def update(self, plan: StepPlan, outcome: StepOutcome) -> SessionUpdate:
        """Rows closed, opened and committed to by one step."""
        generations = {planned.row: planned.generation for planned in plan.rows} if plan.new_rows else {}
        opened: list[RowOpened] = []
        for new in plan.new_rows:
            self._committed_len[new.row] = len(new.tokens)
            opened.append(_opened(new, generations[new.row]))
        committed: list[RowCommitted] = []
        for result in outcome.rows:
            if result.tokens:
                base_len = self._committed_len[result.row]
                committed.append(RowCommitted(result.row, result.generation, base_len, result.tokens))
                self._committed_len[result.row] = base_len + len(result.tokens)
        return SessionUpdate(plan.released, opened, committed)


def _opened(new: NewRow, generation: int) -> RowOpened:
    request = new.request
    params = request.params
    return RowOpened(
        row=new.row,
        generation=generation,
        request_id=request.request_id,
        token_ids=new.tokens,
        prompt_len=request.prompt_len,
        max_len=request.max_len,
        num_speculative_tokens=request.num_speculative_tokens,
        seed=request.seed,
        temperature=0.0 if params.is_greedy else params.temperature,
        top_p=params.top_p,
        top_k=min(params.top_k, _MAX_TOP_K),
        min_p=params.min_p,
    )
