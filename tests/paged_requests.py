"""Drives a decoder through ForwardBatch for tests: requests with paged blocks in shuffled order."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from common.config import BLOCK_SIZE
from model_executor.forward_batch import ForwardBatch
from model_executor.kv_cache import KVCache
from model_executor.models.decoder import Decoder


@dataclass(slots=True)
class PagedRequest:
    """Tokens of a request, how many of them have KV, and the blocks that hold it."""

    tokens: list[int]
    num_computed_tokens: int = 0
    blocks: list[int] = field(default_factory=list[int])


class PagedHarness:
    """Gives requests blocks from a shuffled pool and runs steps over them."""

    def __init__(self, decoder: Decoder, num_blocks: int = 128, seed: int = 0) -> None:
        self.decoder = decoder
        self.kv_cache = KVCache(decoder.config, num_blocks, decoder.dtype, decoder.device)
        self._free = list(range(1, num_blocks))
        random.Random(seed).shuffle(self._free)

    def step(self, work: Sequence[tuple[PagedRequest, int]]) -> list[Tensor]:
        """Run the next query_len tokens of each (request, query_len); logits [query_len, vocab_size] of each."""
        batch = self.build_batch(work)
        with torch.inference_mode():
            hidden = self.decoder.forward(batch, self.kv_cache, self.decoder.attention.prepare(batch))
            logits = self.decoder.compute_logits(hidden)
        for request, query_len in work:
            request.num_computed_tokens += query_len
        return list(logits.split([query_len for _, query_len in work]))

    def build_batch(self, work: Sequence[tuple[PagedRequest, int]]) -> ForwardBatch:
        """The batch of these query tokens; takes the blocks that it needs from the pool."""
        ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        starts, seq_lens = [0], list[int]()
        for request, query_len in work:
            first = request.num_computed_tokens
            end = first + query_len
            while len(request.blocks) * BLOCK_SIZE < end:
                request.blocks.append(self._free.pop())
            ids += request.tokens[first:end]
            positions += range(first, end)
            slots += [request.blocks[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for p in range(first, end)]
            starts.append(starts[-1] + query_len)
            seq_lens.append(end)
        max_blocks = max(len(request.blocks) for request, _ in work)
        # What stands behind a row's own blocks must not matter: it is a block far outside the cache.
        table = [request.blocks + [10**6] * (max_blocks - len(request.blocks)) for request, _ in work]
        return ForwardBatch(
            input_ids=torch.tensor(ids),
            positions=torch.tensor(positions),
            slot_mapping=torch.tensor(slots),
            query_start_loc=torch.tensor(starts),
            seq_lens=torch.tensor(seq_lens),
            block_table=torch.tensor(table),
        )

    def generate(self, prompt: Sequence[int], num_tokens: int) -> list[int]:
        """Greedy output of `num_tokens` tokens: the prompt in one step, then one token a step."""
        request = PagedRequest(list(prompt))
        logits = self.step([(request, len(prompt))])[0]
        for _ in range(num_tokens - 1):
            request.tokens.append(int(logits[-1].argmax()))
            logits = self.step([(request, 1)])[0]
        request.tokens.append(int(logits[-1].argmax()))
        return request.tokens[len(prompt) :]
