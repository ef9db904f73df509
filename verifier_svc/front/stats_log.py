"""The line about what is going on that a verifier logs every ten seconds, if anything is."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from common.logging import Logger
from verifier_svc.front.metrics import FrontMetrics

INTERVAL_S = 10.0


@dataclass(frozen=True, slots=True)
class _Totals:
    time_s: float
    num_prompt_tokens: int
    num_generation_tokens: int
    num_prefix_queries: int
    num_prefix_hits: int
    num_drafts: int
    num_draft_tokens: int
    num_accepted_tokens: int
    per_pos: tuple[int, ...]

    @classmethod
    def of(cls, metrics: FrontMetrics) -> _Totals:
        load = metrics.load
        return cls(
            metrics.clock(),
            metrics.num_prompt_tokens,
            metrics.num_generation_tokens,
            load.num_prefix_queries,
            load.num_prefix_hits,
            load.num_drafts,
            load.num_draft_tokens,
            load.num_accepted_tokens,
            tuple(load.num_accepted_tokens_per_pos),
        )


class StatsLog:
    """Says what happened since it last spoke.

    Args:
        metrics: where the counts are.
        logger: who is told.
    """

    def __init__(self, metrics: FrontMetrics, logger: Logger) -> None:
        self._metrics = metrics
        self._logger = logger
        self._last = _Totals.of(metrics)
        self._was_active = False

    async def run(self) -> None:
        """For ever."""
        while True:
            await asyncio.sleep(INTERVAL_S)
            self.log()

    def log(self) -> None:
        """One record, if there was activity now or before the last call: so the last one shows that it is over."""
        before, now = self._last, _Totals.of(self._metrics)
        self._last = now
        load = self._metrics.load
        num_prompt = now.num_prompt_tokens - before.num_prompt_tokens
        num_generated = now.num_generation_tokens - before.num_generation_tokens
        is_active = bool(num_prompt or num_generated or load.num_running or load.num_waiting)
        if not is_active and not self._was_active:
            return
        self._was_active = is_active
        elapsed_s = max(now.time_s - before.time_s, 1e-9)
        fields: dict[str, object] = {
            "prompt_tokens_per_s": round(num_prompt / elapsed_s, 1),
            "generation_tokens_per_s": round(num_generated / elapsed_s, 1),
            "num_running": load.num_running,
            "num_waiting": load.num_waiting,
            "kv_cache_usage": round(load.kv_cache_usage, 4),
        }
        num_queries = now.num_prefix_queries - before.num_prefix_queries
        if num_queries:
            fields["prefix_cache_hit_rate"] = round((now.num_prefix_hits - before.num_prefix_hits) / num_queries, 3)
        self._logger.info("throughput", **fields, **_acceptance(before, now))


def _acceptance(before: _Totals, now: _Totals) -> dict[str, object]:
    num_drafts = now.num_drafts - before.num_drafts
    if not num_drafts:
        return {}
    num_draft_tokens = now.num_draft_tokens - before.num_draft_tokens
    num_accepted = now.num_accepted_tokens - before.num_accepted_tokens
    earlier = before.per_pos + (0,) * (len(now.per_pos) - len(before.per_pos))
    per_pos = [round((count - old) / num_drafts, 3) for count, old in zip(now.per_pos, earlier, strict=True)]
    return {
        "acceptance_length": round(1 + num_accepted / num_drafts, 2),
        "acceptance_rate": round(num_accepted / num_draft_tokens, 3),
        "acceptance_per_pos": per_pos,
        "num_draft_tokens": num_draft_tokens,
        "num_accepted_tokens": num_accepted,
    }
