"""The fused decoder against the plain one, on tiny models of every architecture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from common.config import BLOCK_SIZE
from model_executor.attention.torch_backend import TorchAttentionBackend
from model_executor.batch_builder import build_forward_batch
from model_executor.kernels.step_inputs import StepInputs, build_step_inputs, make_step_inputs
from model_executor.kv_cache import KVCache
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


SMALL, WIDE, VENDOR = (3, 2), (6, 4), (6, 12)  # requests and tokens of each: up to 16 in all, up to 64, more
CASES = [(name, SMALL) for name in MODELS]
CASES += [(name, shape) for name in ("Qwen2ForCausalLM", "Qwen3ForCausalLM") for shape in (WIDE, VENDOR)]


@pytest.mark.parametrize(("name", "shape"), CASES)
def test_logits_and_kv_equal_the_plain_decoder(
    tmp_path: Path, device: torch.device, name: str, shape: tuple[int, int]
) -> None:
    num_reqs, width = shape
    architecture, overrides = MODELS[name]
    sizes: dict[str, Any] = {"head_dim": 32} | overrides  # a tensor core takes half a head of 16 or more
    make_model(tmp_path, architecture, **sizes)
    loaded = load_parameters(tmp_path, "float32", device, MAX_LEN, progress=False)
    config = loaded.config
    caches = [KVCache(config, 1 + num_reqs * 8, torch.float32, device) for _ in range(2)]
    fused = FusedDecoder(config, loaded.parameters, list(loaded.parameters.layers), MAX_LEN)
    attention = TorchAttentionBackend(config.num_heads, config.num_kv_heads, BLOCK_SIZE, torch.float32)
    decoder = Decoder(config, loaded.parameters, attention, MAX_LEN)
    rows = RowState(num_reqs, MAX_LEN, 16, device)
    order = torch.randperm(num_reqs * 8).tolist()
    lengths = torch.tensor([1, 17, 40, 5, 64, 33][:num_reqs], device=device)
    for row, length in enumerate(lengths.tolist()):
        rows.set_row(row, torch.randint(0, config.vocab_size, (length + width,)).tolist(), length, 0, MAX_LEN)
        rows.append_blocks(row, 0, [1 + block for block in order[row * 8 : row * 8 + 8]])
    idx_mapping = torch.arange(num_reqs, device=device)
    num_places, max_tokens = num_reqs * width, 256
    buffers = fused.make_buffers(max_tokens, num_places, num_reqs, width)

    def expect(count: torch.Tensor) -> torch.Tensor:
        batch = build_forward_batch(rows, idx_mapping, count)
        return decoder.compute_logits(decoder.forward(batch, caches[0], decoder.attention.prepare(batch)))

    def run(inputs: StepInputs, num_tokens: torch.Tensor, draft_len: int) -> torch.Tensor:
        inputs.idx_mapping.copy_(idx_mapping)
        inputs.num_tokens.copy_(num_tokens)
        inputs.draft_len.fill_(draft_len)
        build_step_inputs(rows, inputs)
        return fused.forward(inputs, rows.block_table, caches[1], buffers).view(num_reqs, width, -1)

    def compare_kv() -> None:
        # Block 0 is a dummy: what stands in the others must be the same.
        torch.testing.assert_close(caches[1].storage[:, :, 1:], caches[0].storage[:, :, 1:], atol=1e-4, rtol=1e-4)

    # The prompts first.
    rows.committed_len.copy_(lengths)
    expected = expect(lengths)
    mixed = make_step_inputs(num_reqs, width - 1, device, max_tokens)
    logits = run(mixed, lengths, 0)
    torch.testing.assert_close(logits[:, 0].float(), expected[lengths.cumsum(0) - 1], atol=2e-4, rtol=1e-4)
    compare_kv()
    for piece in fused.pieces(mixed, rows.block_table, caches[1], buffers, keeps_hidden=True):
        piece()
    hidden = buffers.normed[: int(lengths.sum())]
    torch.testing.assert_close(fused.compute_logits(hidden), expected, atol=2e-4, rtol=1e-4)
    logits = buffers.logits.view(num_reqs, width, -1)
    torch.testing.assert_close(logits[:, 0].float(), expected[lengths.cumsum(0) - 1], atol=2e-4, rtol=1e-4)
    # Then a token and its drafts, in either layout.
    rows.num_computed_tokens.copy_(lengths)
    rows.committed_len.copy_(lengths + 1)
    expected = expect(torch.full_like(lengths, width)).view(num_reqs, width, -1)
    for inputs in (mixed, make_step_inputs(num_reqs, width - 1, device)):
        logits = run(inputs, torch.ones_like(lengths), width - 1)
        torch.testing.assert_close(logits.float(), expected, atol=2e-4, rtol=1e-4)
        compare_kv()


def test_blocks_that_one_entry_fills_are_read_by_another_in_the_same_step(tmp_path: Path, device: torch.device) -> None:
    """A prompt that is admitted twice in one step: the second request shares the blocks that the first one fills."""
    make_model(tmp_path, "LlamaForCausalLM", head_dim=32)
    loaded = load_parameters(tmp_path, "float32", device, MAX_LEN, progress=False)
    config = loaded.config
    fused = FusedDecoder(config, loaded.parameters, list(loaded.parameters.layers), MAX_LEN)
    width, max_tokens = 4, 64
    buffers = fused.make_buffers(max_tokens, 2 * width, 2, width)
    prompt = torch.randint(0, config.vocab_size, (24,)).tolist()
    logits: list[torch.Tensor] = []
    for first in (0, 14):  # tokens that an earlier step has computed: the rest of the block is a chunk of 16 or of 2
        kv_cache = KVCache(config, 4, torch.float32, device)
        rows = RowState(2, MAX_LEN, 16, device)
        mixed = make_step_inputs(2, width - 1, device, max_tokens)
        steps = [([0, 16], [16, 8])] if first == 0 else [([0, 0], [14, 0]), ([14, 16], [2, 8])]
        for row in range(2):
            rows.set_row(row, prompt, len(prompt), 0, MAX_LEN)
            rows.append_blocks(row, 0, [1, 2 + row])
        for computed, counts in steps:
            rows.num_computed_tokens.copy_(torch.tensor(computed))
            mixed.idx_mapping.copy_(torch.tensor([0, 1]))
            mixed.num_tokens.copy_(torch.tensor(counts))
            build_step_inputs(rows, mixed)
            fused.forward(mixed, rows.block_table, kv_cache, buffers)
        logits.append(buffers.logits[width].clone())  # the second row's
    torch.testing.assert_close(logits[1], logits[0], atol=2e-4, rtol=1e-4)
