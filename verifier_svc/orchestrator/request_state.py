"""What the orchestrator knows of one request."""

from __future__ import annotations

from common.types import Request, TokenLogprobs
from verifier_svc.orchestrator.block_pool import ROOT_UID, BlockPool


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

    def trim(self, pool: BlockPool) -> None:
        """Give back blocks that neither a step in flight nor the next one can reach, now that the length is known."""
        num_tokens = min(self.optimistic_len + self.request.num_speculative_tokens, self.request.max_len - 1)
        keep = pool.num_blocks_for(num_tokens)
        if len(self.block_ids) > keep:
            pool.free(self.block_ids[keep:])
            del self.block_ids[keep:]

    def register_full_blocks(self, pool: BlockPool, num_tokens: int) -> None:
        """File the blocks that the first `num_tokens` tokens fill; their KV is computed or planned to be."""
        size = pool.block_size
        while (self.num_registered_blocks + 1) * size <= num_tokens:
            index = self.num_registered_blocks
            tokens = tuple(self.tokens[index * size : (index + 1) * size])
            self.last_uid = pool.register(self.block_ids[index], self.last_uid, tokens)
            self.num_registered_blocks += 1
