"""Sampling as kernels over fixed buffers: what a CUDA graph of a step runs between the forward pass and the commit.

Two variants. The plain one knows the temperature and nothing else; the processed one does all that `Sampler` does. A
row that asks for nothing else draws the same token in both, so which variant a step runs depends on its company, and
its tokens do not.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from common.types import TokenLogprobs
from model_executor.kernels.gumbel_argmax import gumbel_argmax, num_slots_for
from model_executor.kernels.process_logits import ProcessorParams, process_logits
from model_executor.kernels.sampling_scores import Places, ProcessedScores
from model_executor.kernels.token_logprobs import (
    NUM_LISTED,
    PACKED_WIDTH,
    LogprobScratch,
    make_logprob_scratch,
    token_logprobs,
)
from model_executor.kernels.top_k_cut import top_k_cut
from model_executor.kernels.top_p_draw import top_p_draw
from model_executor.kernels.truncation import TruncationParams, TruncationScratch, make_truncation_scratch
from model_executor.row_state import RowState
from model_executor.sampling_tables import ProcessorTables
from verifier_svc.sampling.state import SamplingState


@dataclass(frozen=True, slots=True)
class Draws:
    """What `commit_tokens` takes: the best of every slot of the vocabulary at every place. Views of the sampler's
    buffers."""

    values: Tensor  # [P, num_slots] float32
    tokens: Tensor  # [P, num_slots] int32


class DeviceSampler:
    """Buffers for steps of up to `max_places` places, and the kernels over them. Steps share it: they run in order.

    For a vocabulary of 128256 a place takes 0.6 MB: 513 KB of scores, 49 KB of lists, 25 KB for log probabilities.

    Args:
        state: with tables.
        rows: row state.
        max_places: num_reqs * width of the largest step.
    """

    def __init__(self, state: SamplingState, rows: RowState, max_places: int) -> None:
        if state.tables is None:
            raise ValueError("a SamplingState with tables is needed, and this one has none")
        self._state = state
        self._rows = rows
        self._tables: ProcessorTables = state.tables
        device, vocab_size = state.device, state.vocab_size
        most = max_places * num_slots_for(1, vocab_size)  # slots of all places; a few places have the most each
        self._values = torch.empty(most, dtype=torch.float32, device=device)
        self._tokens = torch.empty(most, dtype=torch.int32, device=device)
        self._scores = ProcessedScores(
            flags=state.row_flags,
            processed=torch.empty(max_places, vocab_size, dtype=torch.float32, device=device),
            cut_value=torch.empty(max_places, dtype=torch.float32, device=device),
            cut_token=torch.empty(max_places, dtype=torch.int32, device=device),
        )
        self._scratch: TruncationScratch = make_truncation_scratch(max_places, vocab_size, device)
        self._logprob_scratch: LogprobScratch = make_logprob_scratch(max_places, vocab_size, device)
        self._packed_logprobs = torch.zeros(max_places, PACKED_WIDTH, dtype=torch.int32, device=device)
        self._processors = ProcessorParams(
            flags=state.row_flags,
            repetition_penalty=state.repetition_penalty,
            presence_penalty=state.presence_penalty,
            frequency_penalty=state.frequency_penalty,
            min_len=state.min_len,
            stop_token_ids=state.stop_token_ids,
        )
        self._truncation = TruncationParams(
            flags=state.row_flags,
            temperature=state.temperature,
            top_k=state.top_k,
            top_p=state.top_p,
            log_min_p=state.log_min_p,
        )

    def plain(self, logits: Tensor, inputs: Places) -> Draws:
        """Draw for rows that are plain (`SamplingState.is_plain`).

        Args:
            logits: of the target model, [P, V] with P = num_reqs * width of `inputs`; left as they are.
            inputs: of this step.
        """
        return self._draw(logits, inputs, None)

    def processed(self, logits: Tensor, inputs: Places) -> Draws:
        """Draw for any rows; arguments as in `plain`. Runs before the commit of its step: drafts are read."""
        process_logits(logits, inputs, self._rows, self._processors, self._tables, self._scores.processed)
        top_k_cut(logits, inputs, self._truncation, self._scores, self._scratch)
        draws = self._draw(logits, inputs, self._scores)
        top_p_draw(
            logits,
            inputs,
            self._truncation,
            self._state.seed,
            self._rows.committed_len,
            self._scores,
            self._scratch,
            draws.values,
            draws.tokens,
        )
        return draws

    def logprobs(self, logits: Tensor, inputs: Places, drawn: Tensor) -> Tensor:
        """Log probabilities of drawn tokens, for the rows that ask for some.

        Args:
            logits, inputs: as in `plain`.
            drawn: [num_reqs, width] int32, the token of every place: the columns of the outcome behind its header.

        Returns:
            [P, PACKED_WIDTH] int32, a view of the sampler's buffer, for one copy to the host and `unpack_logprobs`.
        """
        packed = self._packed_logprobs[: logits.shape[0]]
        token_logprobs(logits, inputs, self._state.num_logprobs, drawn, self._logprob_scratch, packed)
        return packed

    def _draw(self, logits: Tensor, inputs: Places, scores: ProcessedScores | None) -> Draws:
        state, num_places = self._state, logits.shape[0]
        num_slots = num_slots_for(num_places, logits.shape[1])
        size = num_places * num_slots
        draws = Draws(self._values[:size].view(-1, num_slots), self._tokens[:size].view(-1, num_slots))
        gumbel_argmax(
            logits,
            state.temperature,
            state.seed,
            self._rows.committed_len,
            inputs.idx_mapping,
            inputs.num_samples,
            draws.values,
            draws.tokens,
            scores,
        )
        return draws


def unpack_logprobs(packed: NDArray[np.int32], place: int, num_logprobs: int, vocab_size: int) -> TokenLogprobs:
    """What `DeviceSampler.logprobs` left for one place, of a row that asks for `num_logprobs` best tokens.

    Args:
        packed: [P, PACKED_WIDTH] on the host.
        place: entry * width + offset.
        num_logprobs: at least 0.
        vocab_size: no list is longer.
    """
    line = packed[place]
    count = 1 + min(num_logprobs, vocab_size)
    ids, bits = line[1 : 1 + count], line[1 + NUM_LISTED : 1 + NUM_LISTED + count]
    return TokenLogprobs(ids.tolist(), bits.view(np.float32).tolist(), int(line[0]))
