"""Wiring of the steps on a CUDA device: which there are, which of them are graphs, and what memory is left for KV."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from common.config import BLOCK_SIZE, EngineConfig
from model_executor.kv_cache import KVCache
from model_executor.models.fused_decoder import FusedDecoder
from model_executor.models.parameters import LayerParameters
from model_executor.models.registry import LoadedModel
from model_executor.row_state import RowState
from verifier_svc.drafts.device_drafts import DeviceDrafts
from verifier_svc.engine.cuda_executor import CudaExecutor
from verifier_svc.engine.cuda_memory import free_bytes, num_cuda_blocks
from verifier_svc.engine.device_step import DeviceStep, DraftRules, StepParts
from verifier_svc.engine.memory_report import MemoryUse, tensor_bytes
from verifier_svc.engine.prompt_logprobs import PromptLogprobs
from verifier_svc.engine.staging import WriteStager
from verifier_svc.engine.step_shape import StepShape
from verifier_svc.sampling.device_sampler import DeviceSampler
from verifier_svc.sampling.state import SamplingState

MAX_CAPTURED_TOKENS = 1024
"""Mixed steps up to this many tokens are graphs. Larger ones keep the device busy for longer than a launch takes."""


@dataclass(frozen=True, slots=True)
class CudaEngineParts:
    """What an engine on a CUDA device is made of."""

    executor: CudaExecutor
    num_blocks: int
    drafts: DeviceDrafts
    memory: MemoryUse


def build_cuda_engine_parts(
    config: EngineConfig,
    loaded: LoadedModel,
    layers: Sequence[LayerParameters],
    depth: int,
    build_drafts: Callable[[WriteStager], DeviceDrafts],
    forced_acceptance: Sequence[float] = (),
) -> CudaEngineParts:
    """Row state, KV cache and steps around a model in a GPU's memory.

    Args:
        config: sizes, and what to capture.
        loaded: the model.
        layers: of the model, in order.
        depth: steps in flight.
        build_drafts: makes the host's share of drafting, which stages its writes through what it is given.
        forced_acceptance: for benchmarks, chance that at least 1, 2, ... draft tokens are accepted.

    Raises:
        InvalidArgumentError: the memory does not do for one request of the longest kind.
    """
    device = loaded.parameters.embed_tokens.device
    total_bytes, weight_bytes = torch.cuda.get_device_properties(device).total_memory, torch.cuda.memory_allocated()
    others_bytes = total_bytes - free_bytes() - weight_bytes
    num_draft = 0 if config.drafter == "none" else config.num_speculative_tokens
    max_places = config.max_num_seqs * (num_draft + 1)
    max_tokens = max(_token_counts(config)[-1], max_places)

    # One row more than requests can have: a step fills its unused entries with it.
    rows = RowState(config.max_num_seqs + 1, loaded.max_model_len, BLOCK_SIZE, device)
    sampling = SamplingState(config.max_num_seqs + 1, loaded.config.vocab_size, device, has_tables=True)
    row_bytes = tensor_bytes(vars(rows).values()) + tensor_bytes(vars(sampling).values())
    if sampling.tables is not None:
        row_bytes += tensor_bytes(getattr(sampling.tables, field.name) for field in fields(sampling.tables))
    stager = WriteStager(max(1 << 20, 8 * loaded.max_model_len), depth)
    stager.write(rows.committed_len, config.max_num_seqs, np.ones(1, dtype=np.int64))  # it has a last token to look at
    stager.flush()
    drafts = build_drafts(stager)
    decoder = FusedDecoder(
        loaded.config, loaded.parameters, layers, loaded.max_model_len, uses_chains=config.product_chain
    )
    parts = StepParts(
        decoder=decoder,
        kv_cache=KVCache(loaded.config, 1, decoder.dtype, device),
        rows=rows,
        sampling=sampling,
        sampler=DeviceSampler(sampling, rows, max_places),
        buffers=decoder.make_buffers(max_tokens, max_places, config.max_num_seqs, num_draft + 1),
        drafts=DraftRules(
            uses_ngram=config.drafter == "ngram" or config.draft_fallback == "ngram",
            prompt_lookup_max=config.prompt_lookup_max,
            prompt_lookup_min=config.prompt_lookup_min,
            landing=drafts.landing,
        ),
        forced_acceptance=torch.tensor(forced_acceptance[:num_draft], dtype=torch.float32, device=device)
        if forced_acceptance
        else None,
    )
    shapes = _captured_shapes(config, num_draft)
    graph_bytes = _measure_graphs(config, parts, shapes)
    torch.cuda.empty_cache()
    step_bytes = total_bytes - free_bytes() - others_bytes - weight_bytes - row_bytes
    num_blocks = num_cuda_blocks(config, loaded, graph_bytes)
    parts = replace(parts, kv_cache=KVCache(loaded.config, num_blocks, decoder.dtype, device))

    before = free_bytes()
    captured: list[DeviceStep] = []
    pool: Any = None
    for shape in tqdm(shapes, desc="capturing steps", disable=None):
        captured.append(DeviceStep(shape, parts))
        pool = captured[-1].capture(config.cuda_graphs, pool)
    eager = [DeviceStep(shape, parts) for shape in _eager_shapes(config, num_draft)]
    memory = MemoryUse(
        device=torch.cuda.get_device_name(device),
        total_bytes=total_bytes,
        others_bytes=others_bytes,
        weight_bytes=weight_bytes,
        step_bytes=step_bytes,
        graph_bytes=before - free_bytes(),
        token_row_bytes=tensor_bytes([rows.token_ids]),
        sampling_bytes=row_bytes - tensor_bytes([rows.token_ids]),
        kv_cache_bytes=tensor_bytes([parts.kv_cache.storage]),
        num_kv_blocks=num_blocks,
    )
    executor = CudaExecutor(
        captured + eager,
        rows,
        sampling,
        drafts,
        stager,
        PromptLogprobs(decoder, rows),
        depth,
        is_checked=config.debug_step_path,
    )
    return CudaEngineParts(executor, num_blocks, drafts, memory)


def _captured_shapes(config: EngineConfig, num_draft: int) -> list[StepShape]:
    """The largest first: graphs share their memory."""
    sizes: list[int] = []
    while not sizes or sizes[-1] < config.max_num_seqs:
        sizes.append(min(2 ** len(sizes), config.max_num_seqs))
    decode = [StepShape(size, k, None, True) for size in reversed(sizes) for k in sorted({0, num_draft})]
    counts = [count for count in _token_counts(config) if count <= MAX_CAPTURED_TOKENS]
    mixed = [StepShape(config.max_num_seqs, num_draft, count, True) for count in reversed(counts)]
    return [replace(shape, is_plain=is_plain) for shape in mixed + decode for is_plain in (True, False)]


def _eager_shapes(config: EngineConfig, num_draft: int) -> list[StepShape]:
    """Mixed steps too large to be worth a graph, and those for log probabilities of prompts, which are rare."""
    return [
        StepShape(config.max_num_seqs, num_draft, count, is_plain, keeps_hidden)
        for count in _token_counts(config)
        for is_plain in (True, False)
        for keeps_hidden in (False, True)
        if keeps_hidden or count > MAX_CAPTURED_TOKENS
    ]


def _token_counts(config: EngineConfig) -> list[int]:
    """Tokens of mixed steps: a step is padded to the next of these, and one of them can do the most.

    Multiples of 64 as long as each takes the vendor's products less time than the next (8B shape, 256, 320, 384 and
    512 tokens: 7.0, 8.5, 9.5 and 11.9 ms). 448 tokens take 14.6 ms.
    """
    counts = [0]
    while counts[-1] < config.max_num_batched_tokens:
        counts.append(counts[-1] + (64 if counts[-1] < 384 else 128 if counts[-1] < 1024 else 256))
    return counts[1:]


def _measure_graphs(config: EngineConfig, parts: StepParts, shapes: Sequence[StepShape]) -> int:
    """Bytes that all graphs will take, judged by three of them; and the kernels of steps have run once after this."""
    for shape in _eager_shapes(config, max(shape.num_draft for shape in shapes))[-4:]:
        DeviceStep(shape, parts).run_idle()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free = [free_bytes()]
    pool: Any = None
    steps: list[DeviceStep] = []
    for shape in (shapes[0], shapes[1], shapes[-1]):
        steps.append(DeviceStep(shape, parts))
        pool = steps[-1].capture(config.cuda_graphs, pool)
        free.append(free_bytes())
    first, each = free[0] - free[1], (free[1] - free[3]) / 2
    return int(first + each * (len(shapes) - 1))
