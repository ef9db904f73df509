"""A step on a CUDA device, whole or in pieces as CUDA graphs: drafts, inputs, forward, draw, commit, outcome.

Made once for a number of entries, of draft tokens and of tokens. A smaller batch fills the entries that are left with a
row that has finished, which every kernel passes over. The host says which row does how many tokens; everything else is
read on the device, so a step can be enqueued before the outcome of the one before it is known.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from model_executor.kernels.commit_tokens import OUTCOME_HEADER, commit_tokens
from model_executor.kernels.ngram_search import ngram_search
from model_executor.kernels.select_drafts import select_drafts
from model_executor.kernels.step_inputs import StepInputs, build_step_inputs, make_step_inputs
from model_executor.kv_cache import KVCache
from model_executor.landing_tensors import LandingTensors
from model_executor.models.fused_decoder import FusedDecoder, StepBuffers
from model_executor.row_state import RowState
from verifier_svc.engine.step_shape import StepShape
from verifier_svc.sampling.device_sampler import DeviceSampler
from verifier_svc.sampling.state import SamplingState

Capture = Literal["full", "piecewise", "none"]


@dataclass(frozen=True, slots=True)
class DraftRules:
    """How a step finds its drafts."""

    uses_ngram: bool
    prompt_lookup_max: int
    prompt_lookup_min: int
    landing: LandingTensors | None
    """Where branches of drafters land; None: there are none."""


@dataclass(frozen=True, slots=True)
class StepParts:
    """What all steps of an engine work on. Buffers are those of the largest step."""

    decoder: FusedDecoder
    kv_cache: KVCache
    rows: RowState  # the last row is finished for ever and fills unused entries
    sampling: SamplingState
    sampler: DeviceSampler
    buffers: StepBuffers
    drafts: DraftRules
    forced_acceptance: Tensor | None  # [K] float32, for benchmarks: chance that at least 1, 2, ... drafts are accepted


class _Body:
    """What a step runs before and after the forward pass."""

    def __init__(self, shape: StepShape, parts: StepParts, inputs: StepInputs, buffers: StepBuffers) -> None:
        self._parts = parts
        self._inputs = inputs
        self._buffers = buffers
        self._num_draft = shape.num_draft
        self._draw = parts.sampler.plain if shape.is_plain else parts.sampler.processed
        forced = parts.forced_acceptance
        self._forced = None if forced is None or shape.num_draft == 0 else forced[: shape.num_draft]
        width = OUTCOME_HEADER + inputs.width
        self.outcome = torch.zeros(shape.num_reqs, width, dtype=torch.int32, device=parts.decoder.device)

    def begin(self, forward: Callable[[], None]) -> None:
        """Drafts and inputs, and the beginning of the forward pass."""
        rows, inputs, drafts = self._parts.rows, self._inputs, self._parts.drafts
        if self._num_draft:
            if drafts.uses_ngram:
                ngram_search(
                    rows.token_ids,
                    rows.committed_len,
                    rows.finished,
                    inputs.idx_mapping,
                    inputs.best_match,
                    drafts.prompt_lookup_max,
                    drafts.prompt_lookup_min,
                )
            select_drafts(rows, inputs, drafts.prompt_lookup_max, drafts.landing, inputs.source)
        build_step_inputs(rows, inputs)
        forward()

    def end(self, forward: Callable[[], None]) -> None:
        """The end of the forward pass, and what is drawn and committed after it."""
        forward()
        rows, sampling = self._parts.rows, self._parts.sampling
        draws = self._draw(self._buffers.logits, self._inputs)
        commit_tokens(
            rows,
            sampling.stop_token_ids,
            sampling.seed,
            self._inputs,
            draws.values,
            draws.tokens,
            self.outcome,
            self._forced,
        )

    def whole(self, forward: Callable[[], None]) -> None:
        """Around a forward pass of one piece."""
        self.begin(forward)
        self.end(_nothing)


def _nothing() -> None:
    pass


class DeviceStep:
    """The kernels of a step of one shape."""

    def __init__(self, shape: StepShape, parts: StepParts) -> None:
        self.shape = shape
        self.is_captured = False
        self._parts = parts
        self.inputs: StepInputs = make_step_inputs(
            shape.num_reqs, shape.num_draft, parts.decoder.device, shape.num_tokens
        )
        self._buffers = parts.buffers.first(shape.num_input_tokens, shape.num_reqs * self.inputs.width)
        # The calls know nothing of this object: an engine that is let go of gives its memory back at once.
        body = _Body(shape, parts, self.inputs, self._buffers)
        self.outcome = body.outcome  # [num_reqs, OUTCOME_HEADER + width]
        pieces = parts.decoder.pieces(
            self.inputs, parts.rows.block_table, parts.kv_cache, parts.buffers, shape.keeps_hidden
        )
        self._calls: Sequence[Callable[[], None]] = [partial(body.whole, pieces[0])]
        """In order; those with an odd index are attention."""
        if len(pieces) > 1:
            self._calls = [partial(body.begin, pieces[0]), *pieces[1:-1], partial(body.end, pieces[-1])]

    @property
    def hidden(self) -> Tensor:
        """Hidden states of all tokens, [T, hidden], of a step that keeps them; those of the last step that ran."""
        return self._buffers.normed

    def run_idle(self) -> None:
        """Run the kernels over rows that have all finished: compiles them, and lets libraries choose theirs."""
        self.inputs.batch[0].fill_(self._parts.rows.committed_len.shape[0] - 1)
        self.inputs.batch[1:].zero_()
        for call in self._calls:
            call()
        self.logprobs()  # no part of the graph, but compiled before the first request that asks for it

    def capture(self, mode: Capture, pool: Any | None) -> Any:
        """Make a graph of the step, or of its pieces between attentions. Returns the memory pool, to be shared."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self.run_idle()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        if mode == "none":
            return pool
        self.is_captured = True
        if mode == "full" or self.shape.num_tokens is None:
            graph = _capture(self._calls, pool)
            self._calls = [graph.replay]
            return graph.pool()
        calls: list[Callable[[], None]] = []
        for index, call in enumerate(self._calls):
            if index % 2:
                calls.append(call)
                continue
            graph = _capture([call], pool)
            pool = graph.pool()
            calls.append(graph.replay)
        self._calls = calls
        return pool

    def enqueue(self) -> None:
        """Run the step for what stands in `inputs.batch`; returns before it has run."""
        for call in self._calls:
            call()

    def logprobs(self) -> Tensor:
        """Log probabilities of the tokens just drawn, for the rows that ask; see `DeviceSampler.logprobs`."""
        drawn = self.outcome[:, OUTCOME_HEADER:]
        return self._parts.sampler.logprobs(self._buffers.logits, self.inputs, drawn)


def _capture(calls: Sequence[Callable[[], None]], pool: Any | None) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with _no_collection(), torch.cuda.graph(graph, pool=pool):
        for call in calls:
            call()
    return graph


@contextmanager
def _no_collection() -> Iterator[None]:
    """Graphs of an engine that is gone may wait for the collector; to free one while another is captured ends both."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
