"""What the orchestrator knows of one request."""

from __future__ import annotations

from common.types import Request, TokenLogprobs
from verifier_svc.orchestrator.block_pool import ROOT_UID


class RequestState:
    """Settled values and upper bounds, under two different names.

    `tokens` and `committed_len` are settled. `optimistic_len` assumes that every draft token in flight is accepted: it
    bounds what a step may write and is never an index into `tokens`.
    """

    __slots__ = (
        "block_ids",
        "generation",
        "last_uid",
        "max_tokens_in_flight",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_new_blocks",
        "num_prompt_logprobs",
        "num_registered_blocks",
        "num_samples_in_flight",
        "prefill_len",
        "prompt_logprobs_cursor",
        "request",
        "row",
        "tokens",
    )

    def __init__(self, request: Request) -> None:
        self.request = request
        self.tokens = list(request.prompt_token_ids)
        self.num_prompt_logprobs = 0
        """Prompt positions reported so far."""
        self.num_cached_tokens = -1
        """Found in the prefix cache by the first admission; -1 before it."""
        self.row = -1
        self.generation = -1
        self.reset_progress()

    def reset_progress(self) -> None:
        """Back to a request that holds nothing: committed tokens are kept, their KV is to be computed again."""
        self.block_ids: list[int] = []
        self.num_computed_tokens = 0
        """Prefill progress that is planned; meaningless once the prefill is over, when the device counts."""
        self.prefill_len = len(self.tokens)
        self.num_new_blocks = 0
        """Blocks that the prefill needs beside those in the prefix cache, as admission last saw it; 0 at first."""
        self.max_tokens_in_flight = 0
        self.num_samples_in_flight = 0
        """Steps in flight that will commit at least one token each."""
        self.num_registered_blocks = 0
        self.last_uid = ROOT_UID
        self.prompt_logprobs_cursor = 0

    @property
    def committed_len(self) -> int:
        return len(self.tokens)

    @property
    def optimistic_len(self) -> int:
        return min(len(self.tokens) + self.max_tokens_in_flight, self.request.max_len)

    @property
    def in_prefill(self) -> bool:
        return self.num_computed_tokens < self.prefill_len

    def take_prompt_logprobs(self, entries: list[TokenLogprobs]) -> list[TokenLogprobs]:
        """The entries of the next prompt positions, less those that were reported before a preemption."""
        start = self.prompt_logprobs_cursor
        self.prompt_logprobs_cursor += len(entries)
        fresh = entries[max(0, self.num_prompt_logprobs - start) :]
        self.num_prompt_logprobs += len(fresh)
        return fresh
