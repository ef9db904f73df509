"""The chain of products: what it computes, that launches follow each other, and that it never waits for ever.

It is CUDA C++, for Hopper GPUs alone: there is no interpreter for it, and elsewhere the kernels of Triton do its work.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from model_executor.kernels import product_chain as chain
from model_executor.kernels.cuda_source import CudaKernel, CudaSourceError
from model_executor.kernels.product_chain import ChainBuffers, ChainWeights, prepare_product_chain, product_chain_ref
from model_executor.kernels.step_inputs import build_step_inputs, make_step_inputs
from model_executor.kv_cache import KVCache
from model_executor.models.fused_decoder import FusedDecoder
from model_executor.models.registry import load_parameters
from model_executor.row_state import RowState
from tests.kernels.accuracy import relative_error
from tests.tiny_models import make_model

EPS = 1e-5
SIZES = {  # hidden, attended, inner, columns of the last product
    "1B": (2048, 2048, 8192, 3072),
    "1B, head": (2048, 2048, 8192, 128256),
    "8B": (4096, 4096, 14336, 6144),
    "3 units a program": (3072, 3072, 8192, 5120),
    "attention wider than the stream": (1024, 2048, 3072, 151936),
    "idle programs": (512, 512, 576, 776),
}


@pytest.fixture
def hopper(device: torch.device) -> torch.device:
    if not chain.runs_on(device, torch.bfloat16):
        pytest.skip("needs a Hopper GPU")
    return device


class Layer:
    """Random weights and activations of one chain."""

    def __init__(self, sizes: tuple[int, int, int, int], device: torch.device, has_bias: bool = False) -> None:
        hidden, attended, inner, columns = sizes

        def random(*shape: int, scale: float = 1.0) -> torch.Tensor:
            return torch.randn(*shape, dtype=torch.bfloat16, device=device) * scale

        self.weights = ChainWeights(
            output=random(hidden, attended, scale=attended**-0.5),
            post_norm=random(hidden),
            gate_up=random(2 * inner, hidden, scale=hidden**-0.5),
            down=random(hidden, inner, scale=inner**-0.5),
            next_norm=random(hidden),
            next=random(columns, hidden, scale=hidden**-0.5),
            next_bias=random(columns) if has_bias else None,
        )
        self.attended, self.stream = random(chain.MAX_TOKENS, attended), random(chain.MAX_TOKENS, hidden)

    def run(self, num_tokens: int, buffers: ChainBuffers) -> tuple[torch.Tensor, torch.Tensor]:
        """The stream and what comes after it; rows from num_tokens on are as they were, and 0."""
        stream = self.stream.clone()
        out = torch.zeros(chain.MAX_TOKENS, self.weights.next.shape[0], dtype=torch.bfloat16, device=stream.device)
        attended = self.attended.clone()  # by the kernel in front
        prepare_product_chain(
            attended[:num_tokens], stream[:num_tokens], out[:num_tokens], self.weights, buffers, EPS
        )()
        return stream, out


def make_buffers(layer: Layer) -> ChainBuffers:
    hidden, inner = layer.weights.down.shape
    return chain.make_chain_buffers(hidden, inner, layer.stream.device)


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [1, 2, 4, 7, 8, 9, 16])
@pytest.mark.parametrize("name", SIZES)
def test_equals_the_reference(hopper: torch.device, name: str, num_tokens: int) -> None:
    layer = Layer(SIZES[name], hopper, has_bias=num_tokens % 2 == 0)
    stream, out = layer.run(num_tokens, make_buffers(layer))
    expected_stream, expected = product_chain_ref(
        layer.attended[:num_tokens], layer.stream[:num_tokens], layer.weights, EPS
    )
    assert relative_error(stream[:num_tokens], expected_stream.double()) < 5e-3
    assert relative_error(out[:num_tokens], expected) < 1e-2
    assert torch.equal(stream[num_tokens:], layer.stream[num_tokens:])
    assert not out[num_tokens:].any()


@pytest.mark.gpu
def test_launches_that_share_buffers_give_what_they_give_alone(hopper: torch.device) -> None:
    layers = [Layer(SIZES[name], hopper) for name in ("1B", "1B, head", "1B")]
    tokens = (1, 16, 3, 8)
    alone = {(i, n): layer.run(n, make_buffers(layer)) for i, layer in enumerate(layers) for n in tokens}
    shared = make_buffers(layers[0])
    for _ in range(20):
        for (i, n), expected in alone.items():
            found = layers[i].run(n, shared)
            assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


@pytest.mark.gpu
def test_a_token_does_not_depend_on_those_beside_it(hopper: torch.device) -> None:
    layer = Layer(SIZES["1B"], hopper)
    buffers = make_buffers(layer)
    for fewest, most in ((1, 8), (9, 16)):
        whole = layer.run(most, buffers)
        for num_tokens in range(fewest, most):
            for found, expected in zip(layer.run(num_tokens, buffers), whole, strict=True):
                assert torch.equal(found[:num_tokens], expected[:num_tokens])


@pytest.mark.gpu
def test_a_program_that_never_comes_ends_in_an_error_of_the_device(hopper: torch.device) -> None:
    """In a process of its own: what the device reports is the end of its context."""
    code = """
import time
import torch
from model_executor.kernels.product_chain import prepare_product_chain
from tests.kernels.test_product_chain import EPS, SIZES, Layer, make_buffers
layer = Layer(SIZES["1B"], torch.device("cuda"))
buffers = make_buffers(layer)
out = torch.zeros(1, 3072, dtype=torch.bfloat16, device="cuda")
launch = prepare_product_chain(layer.attended[:1], layer.stream[:1], out, layer.weights, buffers, EPS, max_wait_ms=200)
buffers.counters[0] = buffers.mlp_sums.shape[0]  # as if programs were missing behind the second product
torch.cuda.synchronize()
begin = time.monotonic()
launch()
try:
    torch.cuda.synchronize()
except RuntimeError as error:
    assert time.monotonic() - begin < 30
    print("ended:", str(error).splitlines()[0])
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert "ended: CUDA error" in result.stdout, result.stderr


@pytest.mark.gpu
def test_a_source_that_does_not_compile_says_what_the_compiler_said(hopper: torch.device, tmp_path: Path) -> None:
    source = tmp_path / "broken.cu"
    source.write_text('extern "C" __global__ void broken() { no_such_call(SIZE); }')
    with pytest.raises(CudaSourceError, match=r"broken\.cu does not compile:\n(.*\n)*.*no_such_call"):
        CudaKernel(source, "broken", {"SIZE": 1})


MODELS = [
    "LlamaForCausalLM",
    "Qwen2ForCausalLM",  # a bias behind qkv
    "Qwen3ForCausalLM",  # norms of heads in front of attention
]


@pytest.mark.gpu
@pytest.mark.parametrize(("num_reqs", "width"), [(1, 1), (3, 2), (4, 4)])
@pytest.mark.parametrize("architecture", MODELS)
def test_a_decoder_with_chains_gives_the_logits_of_one_without(
    tmp_path: Path, hopper: torch.device, architecture: str, num_reqs: int, width: int
) -> None:
    wide: dict[str, Any] = {"hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 8, "head_dim": 64}
    make_model(tmp_path, architecture, num_hidden_layers=4, initializer_range=0.05, **wide)
    max_len = 128
    loaded = load_parameters(tmp_path, "bfloat16", hopper, max_len, progress=False)
    config = loaded.config
    rows = RowState(num_reqs, max_len, 16, hopper)
    lengths = torch.tensor([40, 17, 1, 64][:num_reqs], device=hopper)
    for row, length in enumerate(lengths.tolist()):
        rows.set_row(row, torch.randint(0, config.vocab_size, (length + width,)).tolist(), length, 0, max_len)
        rows.append_blocks(row, 0, list(range(1 + row * 8, 9 + row * 8)))
    rows.num_computed_tokens.copy_(lengths)
    rows.committed_len.copy_(lengths + 1)
    before = torch.randn(KVCache(config, 1 + num_reqs * 8, torch.bfloat16, hopper).storage.shape, device=hopper)
    logits: list[torch.Tensor] = []
    for uses_chains in (True, False):
        decoder = FusedDecoder(config, loaded.parameters, list(loaded.parameters.layers), max_len, uses_chains)
        kv_cache = KVCache(config, 1 + num_reqs * 8, torch.bfloat16, hopper)
        buffers = decoder.make_buffers(64, num_reqs * width, num_reqs, width)
        assert (buffers.chain is not None) == uses_chains
        inputs = make_step_inputs(num_reqs, width - 1, hopper)
        (forward,) = decoder.pieces(inputs, rows.block_table, kv_cache, buffers)
        graph = torch.cuda.CUDAGraph()
        for is_captured in (False, True):
            kv_cache.storage.copy_(before)
            inputs.idx_mapping.copy_(torch.arange(num_reqs))
            inputs.num_tokens.fill_(1)
            inputs.draft_len.fill_(width - 1)
            build_step_inputs(rows, inputs)
            if is_captured:
                with torch.cuda.graph(graph):
                    forward()
                graph.replay()
            else:
                forward()
            logits.append(buffers.logits[: num_reqs * width].double())
    eager, captured, without, _ = logits
    assert torch.equal(eager, captured)
    assert relative_error(eager, without) < 2e-2


@pytest.mark.parametrize(
    ("hidden", "attended", "inner", "next_sizes", "does_fit"),
    [
        (2048, 2048, 8192, (3072, 128256), True),
        (4096, 4096, 14336, (6144, 128256), True),
        (512, 512, 512, (8,), True),
        (4224, 4096, 8192, (6144,), True),
        (4288, 4096, 8192, (6144,), False),  # more columns of the stream than a warp sums up
        (448, 512, 512, (1024,), False),  # fewer inner elements than eight warps share
        (896, 896, 4864 - 32, (1152,), False),  # no multiple of 64
        (2048, 2048, 8192, (3076,), False),  # no multiple of 8
    ],
)
def test_sizes_that_can_be_shared_out(
    hidden: int, attended: int, inner: int, next_sizes: tuple[int, ...], does_fit: bool
) -> None:
    assert chain.fits(hidden, attended, inner, next_sizes, programs=132) == does_fit


def test_tokens_that_do_not_belong_together_are_refused(device: torch.device) -> None:
    def zeros(rows: int, columns: int) -> torch.Tensor:
        return torch.zeros(rows, columns, dtype=torch.bfloat16, device=device)

    one = zeros(512, 512)
    weights = ChainWeights(one, one[0], zeros(1024, 512), one, one[0], one, None)
    buffers = ChainBuffers(*(zeros(1, 1) for _ in range(6)))
    for attended, stream, out in ((17, 17, 17), (2, 1, 1), (1, 1, 2)):
        with pytest.raises(ValueError, match=f"{attended}, {stream} and {out} tokens"):
            prepare_product_chain(zeros(attended, 512), zeros(stream, 512), zeros(out, 512), weights, buffers, EPS)


def test_without_the_bindings_of_cuda_the_error_names_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", None)
    with pytest.raises(CudaSourceError, match=r"no cuda\.bindings\.driver, which comes with torch's builds for CUDA"):
        CudaKernel(tmp_path / "any.cu", "any", {})


def test_no_chain_on_a_cpu_nor_in_float32(device: torch.device) -> None:
    assert not chain.runs_on(torch.device("cpu"), torch.bfloat16)
    assert not chain.runs_on(device, torch.float32)
