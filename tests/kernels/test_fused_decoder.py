"""The fused decoder against the plain one, on tiny models of every architecture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from common.config import BLOCK_SIZE
from model_executor.attention.torch_backend import TorchAttentionBackend
from model_executor.batch_builder import build_forward_batch
from model_executor.kernels.decode_inputs import make_decode_inputs
from model_executor.kv_cache import KVCache
from model_executor.models.cuda_decoder import CudaDecoder
from model_executor.models.decoder import Decoder
from model_executor.models.fused_decoder import FusedDecoder
from model_executor.models.registry import load_parameters
from model_executor.row_state import RowState
from tests.tiny_models import ARCHITECTURES, LLAMA3_ROPE, make_model

MAX_LEN = 128
MODELS: dict[str, tuple[str, dict[str, Any]]] = {name: (name, {}) for name in ARCHITECTURES} | {
    "head_dim and rope": ("LlamaForCausalLM", {"head_dim": 32, "rope_parameters": LLAMA3_ROPE}),
    "odd sizes": ("LlamaForCausalLM", {"vocab_size": 331, "tie_word_embeddings": True}),
}


FUSED, WIDE = (3, 2), (6, 4)  # requests and tokens of each: few enough to fuse, and more
CASES = [(name, FUSED) for name in MODELS] + [(name, WIDE) for name in ("Qwen2ForCausalLM", "Qwen3ForCausalLM")]


@pytest.mark.parametrize(("name", "shape"), CASES)
def test_logits_and_kv_equal_the_plain_decoder(
    tmp_path: Path, device: torch.device, name: str, shape: tuple[int, int]
) -> None:
    num_reqs, width = shape
    architecture, overrides = MODELS[name]
    sizes: dict[str, Any] = {"head_dim": 32} | overrides  # a tensor core takes half a head of 16 or more
    make_model(tmp_path, architecture, **sizes)
    loaded = load_parameters(tmp_path, "float32", device, MAX_LEN, progress=False)
    layers = list(loaded.parameters.layers)
    config = loaded.config
    caches = [KVCache(config, 1 + num_reqs * 8, torch.float32, device) for _ in range(2)]
    fused = FusedDecoder(config, loaded.parameters, layers, caches[1], MAX_LEN)
    attention = TorchAttentionBackend(config.num_heads, config.num_kv_heads, BLOCK_SIZE, torch.float32)
    on_gpu = CudaDecoder(config, loaded.parameters, layers, attention, MAX_LEN)
    decoder = Decoder(config, loaded.parameters, attention, MAX_LEN)
    rows = RowState(num_reqs, MAX_LEN, 16, device)
    order = torch.randperm(num_reqs * 8).tolist()
    lengths = [1, 17, 40, 5, 64, 33][:num_reqs]
    for row, length in enumerate(lengths):
        rows.set_row(row, torch.randint(0, config.vocab_size, (length + width,)).tolist(), length, 0, MAX_LEN)
        rows.append_blocks(row, 0, [1 + block for block in order[row * 8 : row * 8 + 8]])
    idx_mapping = torch.arange(num_reqs, device=device)
    contexts = torch.tensor(lengths, device=device)
    for count in (contexts, torch.full_like(contexts, width)):  # the context first, then the query tokens
        batch = build_forward_batch(rows, idx_mapping, count)
        hidden = decoder.forward(batch, caches[0], decoder.attention.prepare(batch))
        expected = decoder.compute_logits(hidden)
        hidden = on_gpu.forward(batch, caches[1], attention.prepare(batch))
        torch.testing.assert_close(on_gpu.compute_logits(hidden), expected, atol=2e-4, rtol=1e-4)
        if count is contexts:
            rows.num_computed_tokens.copy_(contexts)

    inputs = make_decode_inputs(num_reqs, width - 1, device)
    inputs.idx_mapping.copy_(idx_mapping)
    inputs.query_len.fill_(width)
    inputs.seq_lens.copy_(contexts + width)
    inputs.input_ids.copy_(batch.input_ids)
    logits = fused.forward(inputs, rows.block_table, fused.make_buffers(num_reqs, width))
    torch.testing.assert_close(logits.float(), expected, atol=2e-4, rtol=1e-4)
    # Block 0 is a dummy: what stands in the others must be the same.
    torch.testing.assert_close(caches[1].storage[:, :, 1:], caches[0].storage[:, :, 1:], atol=1e-4, rtol=1e-4)
