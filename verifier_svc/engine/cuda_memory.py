"""How much of a GPU's memory the KV cache gets."""

from __future__ import annotations

import torch

from common.config import BLOCK_SIZE, EngineConfig
from common.errors import InvalidArgumentError
from model_executor.kv_cache import bytes_per_block, max_useful_blocks
from model_executor.models.registry import LoadedModel

RESERVE_BYTES = 256 << 20
"""For what comes and goes: log probabilities of prompts."""


def free_bytes() -> int:
    """Of the current GPU, whoever uses the rest."""
    torch.cuda.synchronize()
    return torch.cuda.mem_get_info()[0]


def num_cuda_blocks(config: EngineConfig, loaded: LoadedModel, graph_bytes: int) -> int:
    """KV blocks that fit beside weights, buffers and whatever else there is by now, and the graphs to come.

    No more than all rows together can ever fill.

    Args:
        config: share of the GPU's memory that may be used, by whoever uses it; rows.
        loaded: the model.
        graph_bytes: measured.

    Raises:
        InvalidArgumentError: there is no room for one request of the longest kind.
    """
    total = torch.cuda.mem_get_info()[1]
    utilization = config.gpu_memory_utilization
    budget = max(0, int(total * utilization) - (total - free_bytes()) - graph_bytes - RESERVE_BYTES)
    block_bytes = bytes_per_block(loaded.config, loaded.parameters.embed_tokens.dtype)
    blocks_each = -(-loaded.max_model_len // BLOCK_SIZE)
    num_blocks = budget // block_bytes
    if num_blocks < blocks_each + 1:
        needed = (blocks_each + 1) * block_bytes
        reason = f"leaves {budget} bytes for KV, and one request of max_model_len needs {needed}"
        raise InvalidArgumentError("gpu_memory_utilization", utilization, f"a larger share, as this one {reason}")
    return min(num_blocks, max_useful_blocks(config.max_num_seqs, loaded.max_model_len))
