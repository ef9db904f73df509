"""Drafts for steps that choose them on the device: what the host does before such a step, and after its outcome.

Steps are handed over before the outcome of the one before is known. So a step that waits for a drafter while another
one runs costs nothing, as long as the wait is the shorter one; it is at most the deadline in any case.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from model_executor.landing_tensors import FROM_BRANCH, NO_DRAFT, LandingTensors
from verifier_svc.drafts.device_landing import DeviceLanding
from verifier_svc.drafts.drafter_link import DrafterLink
from verifier_svc.drafts.exchange import DraftExchange, ExchangeStats
from verifier_svc.engine.session_tracker import SessionTracker
from verifier_svc.messages import ExchangeCounts
from verifier_svc.orchestrator.step import StepOutcome, StepPlan


class DeviceDrafts(Protocol):
    """The host's share of drafting. Each step is told of twice, and both in the order of the steps."""

    @property
    def landing(self) -> LandingTensors | None:
        """Branches that the step chooses from; None: it has only what it finds itself."""
        ...

    def before_step(self, plan: StepPlan) -> None:
        """A step is about to be handed over: stage what it is to choose from."""
        ...

    def after_step(self, plan: StepPlan, outcome: StepOutcome, sources: Sequence[int]) -> None:
        """The outcome of the oldest step in flight is known.

        Args:
            plan, outcome: of that step.
            sources: of each of the plan's rows, where its draft came from: NO_DRAFT, FROM_BRANCH or FROM_NGRAM.
        """
        ...

    def close(self) -> None:
        """Let go of whatever is held; no step comes after this."""
        ...


class DeviceOnlyDrafts:
    """No drafts, or those that the device finds in the row's own tokens: the host has no part in it."""

    @property
    def landing(self) -> LandingTensors | None:
        return None

    def before_step(self, plan: StepPlan) -> None:
        pass

    def after_step(self, plan: StepPlan, outcome: StepOutcome, sources: Sequence[int]) -> None:
        pass

    def close(self) -> None:
        pass


class _Claim(NamedTuple):
    """What a row's drafter had claimed when a step was handed over."""

    link: DrafterLink
    """By the outcome, the row may have another drafter."""
    known_len: int
    """Committed tokens that the host knew of."""
    num_claimed: int
    """Tokens of the best branch beyond these."""


class _InFlight(NamedTuple):
    """A step that has been handed over."""

    claims: dict[int, _Claim]
    """By row, of those that may draft and have a drafter."""
    max_new_tokens: dict[tuple[int, int], int]
    """By (row, generation), of those that sample."""


class _Candidate(NamedTuple):
    """A row of a step that may draft, and what the host knows of it."""

    row: int
    generation: int
    text: list[int]
    num_in_flight: int
    """Tokens that the steps in flight may commit."""


class RemoteDeviceDrafts:
    """Drafts that come through transports and land on the device.

    Args:
        exchange: with the drafters; closed with this object.
        landing: where its branches land.
    """

    def __init__(self, exchange: DraftExchange, landing: DeviceLanding) -> None:
        self._exchange = exchange
        self._landing = landing
        self._sessions = SessionTracker()
        self._in_flight: deque[_InFlight] = deque()

    @property
    def landing(self) -> LandingTensors | None:
        return self._landing.tensors

    @property
    def links(self) -> Sequence[DrafterLink]:
        """The drafters, in the order of their transports."""
        return self._exchange.links

    @property
    def stats(self) -> ExchangeStats:
        """Counts since the start."""
        return self._exchange.stats

    def before_step(self, plan: StepPlan) -> None:
        """See `DeviceDrafts.before_step`. Waits at most the deadline, for drafters that owe an answer."""
        self._exchange.receive()
        candidates = self._candidates(plan)
        num_claimed: list[int] = []

        def find_without() -> list[int]:
            nonlocal num_claimed
            num_claimed = self._num_claimed(candidates)
            return self._without(candidates, num_claimed)

        self._exchange.wait_until(find_without)
        self._landing.flush()
        claims: dict[int, _Claim] = {}
        for candidate, claimed in zip(candidates, num_claimed, strict=True):
            link = self._exchange.drafter_of(candidate.row)
            if link is not None:
                claims[candidate.row] = _Claim(link, len(candidate.text), claimed)
        max_new_tokens = {(p.row, p.generation): p.max_new_tokens for p in plan.rows if p.max_new_tokens}
        self._in_flight.append(_InFlight(claims, max_new_tokens))

    def after_step(self, plan: StepPlan, outcome: StepOutcome, sources: Sequence[int]) -> None:
        """See `DeviceDrafts.after_step`. Never waits."""
        exchange, stats = self._exchange, self._exchange.stats
        claims = self._in_flight.popleft().claims
        for planned, result, source in zip(plan.rows, outcome.rows, sources, strict=True):
            if not planned.max_draft_tokens or not result.tokens:
                continue
            text = exchange.text_of(planned.row, planned.generation)
            if text is None or exchange.max_len_of(planned.row) <= len(text) + 1:
                continue  # closed since, or there was room for the last token only
            is_branch = source == FROM_BRANCH
            stats.num_branches_used += is_branch
            stats.num_fallbacks += not is_branch
            stats.num_fallback_drafts += source not in (NO_DRAFT, FROM_BRANCH)
            claim = claims.get(planned.row)
            exchange.note_draft(
                planned.row, claim.link if claim is not None and is_branch else None, result.num_draft_tokens
            )
            if claim is not None:
                _note_overtaken(claim, len(text) - claim.known_len, is_branch)
        exchange.observe(self._sessions.update(plan, outcome))

    def close(self) -> None:
        self._exchange.close()

    def counts(self) -> ExchangeCounts:
        """What there is to tell of the drafters, for the front."""
        return self._exchange.counts()

    def _candidates(self, plan: StepPlan) -> list[_Candidate]:
        """Those rows of a plan that may draft; left out are those whose first step is still in flight."""
        candidates: list[_Candidate] = []
        for planned in plan.rows:
            if not planned.max_draft_tokens:
                continue
            text = self._exchange.text_of(planned.row, planned.generation)
            if text is not None:
                key = planned.row, planned.generation
                in_flight = sum(step.max_new_tokens.get(key, 0) for step in self._in_flight)
                candidates.append(_Candidate(planned.row, planned.generation, text, in_flight))
        return candidates

    def _num_claimed(self, candidates: list[_Candidate]) -> list[int]:
        """How far branches go on beyond what the host knows of each row."""
        if not candidates:
            return []
        rows, generations, texts, _ = zip(*candidates, strict=True)
        return self._landing.num_claimed(rows, generations, texts).tolist()

    def _without(self, candidates: list[_Candidate], num_claimed: list[int]) -> list[int]:
        """Rows for which an answer is owed, and whose branches may all be used up when the step begins.

        The steps in flight may commit as much as they have planned; a branch that goes on beyond that is enough.
        """
        exchange = self._exchange
        return [
            row
            for (row, _, text, in_flight), claimed in zip(candidates, num_claimed, strict=True)
            if claimed <= in_flight
            and exchange.owes_answer(row)
            and exchange.max_len_of(row) > len(text) + in_flight + 1
        ]


def _note_overtaken(claim: _Claim, num_committed: int, is_branch: bool) -> None:
    """Tell the watchdog how a claim fared against the tokens that steps in flight have committed."""
    if num_committed == 0:
        return
    if is_branch:
        claim.link.note_overtaken(num_committed, num_committed)
    elif claim.num_claimed > num_committed:  # it would have been used, had it been right
        claim.link.note_overtaken(1, 0)
