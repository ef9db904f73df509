"""A decode step as one CUDA graph: drafts, inputs, forward, draw, commit, outcome.

Captured once for a number of requests and of draft tokens; a smaller batch fills the entries that are left with a row
that has finished, which every kernel passes over.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from model_executor.kernels.commit_tokens import OUTCOME_HEADER, commit_tokens
from model_executor.kernels.decode_inputs import DecodeInputs, build_decode_inputs, make_decode_inputs
from model_executor.kernels.gumbel_argmax import BLOCK, gumbel_argmax
from model_executor.kernels.ngram_search import ngram_search
from model_executor.models.fused_decoder import DecodeBuffers, FusedDecoder
from model_executor.row_state import RowState
from verifier_svc.sampling.state import SamplingState


@dataclass(frozen=True, slots=True)
class NgramSettings:
    """How the graph looks for drafts."""

    prompt_lookup_max: int
    prompt_lookup_min: int


class DecodeStep:
    """The kernels of a decode step for a fixed number of requests and draft tokens, over buffers of its own.

    Args:
        num_reqs: entries of a batch.
        num_draft: K; 0 is a step without drafts.
        decoder: the target model.
        rows: row state; its last row is finished for ever and fills unused entries.
        sampling: parameters of the rows.
        ngram: how drafts are found.
        forced_acceptance: for benchmarks, chance that at least 1, 2, ... drafts are accepted.
    """

    def __init__(
        self,
        num_reqs: int,
        num_draft: int,
        decoder: FusedDecoder,
        rows: RowState,
        sampling: SamplingState,
        ngram: NgramSettings,
        forced_acceptance: Sequence[float] = (),
    ) -> None:
        device = decoder.device
        self.num_reqs = num_reqs
        self.num_draft = num_draft
        self._decoder = decoder
        self._rows = rows
        self._sampling = sampling
        self._ngram = ngram
        self._pad_row = rows.committed_len.shape[0] - 1
        self._inputs: DecodeInputs = make_decode_inputs(num_reqs, num_draft, device)
        self._buffers: DecodeBuffers = decoder.make_buffers(num_reqs, num_draft + 1)
        num_places = num_reqs * (num_draft + 1)
        num_blocks = -(-decoder.config.vocab_size // BLOCK)
        self._values = torch.empty(num_places, num_blocks, dtype=torch.float32, device=device)
        self._tokens = torch.empty(num_places, num_blocks, dtype=torch.int32, device=device)
        self._forced: Tensor | None = None
        if num_draft and forced_acceptance:
            self._forced = torch.tensor(forced_acceptance[:num_draft], dtype=torch.float32, device=device)
        # Row and draft limit of every entry come in one copy, the outcome leaves in another.
        self._batch = torch.stack([self._inputs.idx_mapping, self._inputs.max_draft_tokens])  # [2, num_reqs]
        self.outcome = torch.zeros(num_reqs, OUTCOME_HEADER + num_draft + 1, dtype=torch.int32, device=device)
        self._graph: torch.cuda.CUDAGraph | None = None

    def run(self) -> None:
        """The kernels, one after the other, on the current stream."""
        inputs, rows, sampling = self._inputs, self._rows, self._sampling
        inputs.idx_mapping.copy_(self._batch[0])
        inputs.max_draft_tokens.copy_(self._batch[1])
        if self.num_draft:
            ngram_search(
                rows.token_ids,
                rows.committed_len,
                rows.finished,
                inputs.idx_mapping,
                inputs.best_match,
                self._ngram.prompt_lookup_max,
                self._ngram.prompt_lookup_min,
            )
        build_decode_inputs(rows, inputs, self._ngram.prompt_lookup_max)
        logits = self._decoder.forward(inputs, rows.block_table, self._buffers)
        gumbel_argmax(
            logits,
            sampling.temperature,
            sampling.seed,
            rows.committed_len,
            inputs.idx_mapping,
            inputs.query_len,
            self._values,
            self._tokens,
        )
        commit_tokens(rows, sampling.stop_token_ids, inputs, self._values, self._tokens, self.outcome, self._forced)

    def capture(self, pool: Any | None) -> Any:
        """Capture `run` as a graph, over rows that have all finished. Returns the memory pool, to be shared."""
        self._batch[0].fill_(self._pad_row)
        self._batch[1].zero_()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self.run()  # compiles the kernels, and lets the vendor's library choose its own
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, pool=pool):
            self.run()
        return self._graph.pool()

    def enqueue(self, batch_cpu: Tensor) -> None:
        """Run the step for the entries of `batch_cpu`; returns before it has run.

        Args:
            batch_cpu: [2, num_reqs] int64 in pinned memory: row and draft limit of each entry; unused ones have the pad
                row. It must stay as it is until the step has run.
        """
        self._batch.copy_(batch_cpu, non_blocking=True)
        if self._graph is not None:
            self._graph.replay()
        else:
            self.run()
