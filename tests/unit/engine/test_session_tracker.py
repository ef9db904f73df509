"""What a drafter hears of a request."""

from __future__ import annotations

import pytest

from common.draft_codec import decode_verifier_frame, encode_update
from common.draft_exchange import SessionUpdate
from common.sampling_params import SamplingParams
from common.types import Request
from verifier_svc.engine.session_tracker import SessionTracker
from verifier_svc.orchestrator.step import NewRow, PlannedRow, StepOutcome, StepPlan


@pytest.mark.parametrize("top_k", [-1, 0, 1, 2**31 - 1, 2**31, 2**32 - 1, 2**70])
def test_any_top_k_of_a_request_fits_a_frame(top_k: int) -> None:
    """An engine that cannot tell its drafter of a row does not go on."""
    request = Request("one", [1, 2, 3], SamplingParams(top_k=top_k), seed=2**64 - 1, max_len=10)
    new = NewRow(0, request, [1, 2, 3], num_computed_tokens=0, num_prompt_logprobs=None)
    row = PlannedRow(0, generation=1, num_tokens=3, max_draft_tokens=0, max_new_tokens=1)
    plan = StepPlan(1, released=[], new_rows=[new], block_appends=[], rows=[row])
    update = SessionTracker().update(plan, StepOutcome(1, []))
    (frame,) = encode_update(update, 1, 1000)
    _, decoded = decode_verifier_frame(frame, 1000)
    assert isinstance(decoded, SessionUpdate)
    assert decoded.opened == update.opened
    assert decoded.opened[0].top_k == min(top_k, 2**31 - 1)
