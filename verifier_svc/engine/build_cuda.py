"""Wiring of the CUDA step: which decode graphs there are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tqdm import tqdm

from common.config import EngineConfig
from model_executor.models.fused_decoder import FusedDecoder
from model_executor.row_state import RowState
from verifier_svc.engine.cuda_executor import CudaExecutor
from verifier_svc.engine.decode_graph import DecodeStep, NgramSettings
from verifier_svc.engine.model_runner import ModelRunner
from verifier_svc.sampling.state import SamplingState


def build_cuda_executor(
    config: EngineConfig,
    decoder: FusedDecoder,
    runner: ModelRunner,
    rows: RowState,
    sampling: SamplingState,
    depth: int,
    forced_acceptance: Sequence[float] = (),
) -> CudaExecutor:
    """Decode steps for batches of 1, 2, 4, ... requests, with and without drafts, captured as graphs.

    Args:
        config: which sizes, and whether to capture.
        decoder, runner, rows, sampling: what the steps work on.
        depth: steps in flight.
        forced_acceptance: see `DecodeStep`.
    """
    rows.committed_len[-1] = 1  # of the row that fills unused entries: it has a last token to look at
    ngram = NgramSettings(config.prompt_lookup_max, config.prompt_lookup_min)
    draft_counts = {0} if config.drafter == "none" else {0, config.num_speculative_tokens}
    sizes: list[int] = []
    while not sizes or sizes[-1] < config.max_num_seqs:
        sizes.append(min(2 ** len(sizes), config.max_num_seqs))
    shapes = [(size, count) for size in reversed(sizes) for count in sorted(draft_counts)]
    steps: list[DecodeStep] = []
    pool: Any = None
    for num_reqs, num_draft in tqdm(shapes, desc="decode graphs", disable=None):
        step = DecodeStep(num_reqs, num_draft, decoder, rows, sampling, ngram, forced_acceptance)
        if config.cuda_graphs == "full":
            pool = step.capture(pool)
        steps.append(step)
    return CudaExecutor(runner, steps, rows, depth)
