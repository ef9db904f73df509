"""How much of a GPU's memory the KV cache gets."""

from __future__ import annotations

import torch

from common.config import BLOCK_SIZE
from common.errors import InvalidArgumentError
from model_executor.forward_batch import ForwardBatch
from model_executor.kv_cache import DUMMY_BLOCK, KVCache, bytes_per_block
from model_executor.models.decoder import AnyDecoder


def num_cuda_blocks(decoder: AnyDecoder, utilization: float, max_num_batched_tokens: int) -> int:
    """KV blocks that fit beside the weights and the activations of the largest step, which is run once to see.

    Args:
        decoder: on its GPU.
        utilization: share of the GPU's memory that may be used, by whoever uses it.
        max_num_batched_tokens: tokens of the largest step.

    Raises:
        InvalidArgumentError: there is no room for one request of the longest kind.
    """
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    _run_dummy_step(decoder, max_num_batched_tokens)
    activation_bytes = torch.cuda.max_memory_allocated() - before
    torch.cuda.empty_cache()
    free_bytes, total_bytes = torch.cuda.mem_get_info()
    budget = int(total_bytes * utilization) - (total_bytes - free_bytes) - 2 * activation_bytes
    block_bytes = bytes_per_block(decoder.config, decoder.dtype)
    num_blocks = max(0, budget) // block_bytes
    min_blocks = -(-decoder.max_model_len // BLOCK_SIZE) + 1
    if num_blocks < min_blocks:
        reason = (
            f"leaves {max(0, budget)} bytes for KV, and one request of max_model_len needs {min_blocks * block_bytes}"
        )
        raise InvalidArgumentError("gpu_memory_utilization", utilization, f"a larger share, as this one {reason}")
    return num_blocks


def _run_dummy_step(decoder: AnyDecoder, num_tokens: int) -> None:
    """A prefill of `num_tokens` tokens over the dummy block."""
    cache = KVCache(decoder.config, 1, decoder.dtype, decoder.device)
    lengths = [min(decoder.max_model_len, num_tokens)] * max(1, num_tokens // decoder.max_model_len)
    positions = torch.cat([torch.arange(length, device=decoder.device) for length in lengths])
    ends = torch.tensor([0, *lengths], device=decoder.device).cumsum(0)
    max_blocks = -(-lengths[0] // BLOCK_SIZE)
    batch = ForwardBatch(
        input_ids=torch.zeros_like(positions),
        positions=positions,
        slot_mapping=DUMMY_BLOCK * BLOCK_SIZE + positions % BLOCK_SIZE,
        query_start_loc=ends,
        seq_lens=ends.diff(),
        block_table=torch.full((len(lengths), max_blocks), DUMMY_BLOCK, dtype=torch.int64, device=decoder.device),
    )
    hidden = decoder.forward(batch, cache, decoder.attention.prepare(batch))
    decoder.compute_logits(hidden[-1:])
