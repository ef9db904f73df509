"""The products between two attentions of a decoder layer as one kernel, for steps of up to 16 tokens.

`product_chain.cu` is the kernel, in CUDA C++: it streams weights through shared memory past the ends of products, and
begins to do so before the attention in front of it has ended. Triton has no words for that. What it saves is in
docs/adr/0013-product-chain.md.

Grid: a program a multiprocessor; all must run at once. Bytes: the weights of four products, once.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import torch
from torch import Tensor

from model_executor.kernels.cuda_source import CudaKernel, KernelArguments, make_tensor_map
from model_executor.kernels.fused_gemm import fused_gemm_ref

MAX_TOKENS = 16
_NUM_THREADS = 288  # of a program
_MIN_INNER = 512  # inner elements of a product: eight warps take 64 or more each
_MAX_HIDDEN_PER_PROGRAM = 32  # columns of the residual stream
_SHARED_BYTES = 232448  # of a program, all that a multiprocessor of a Hopper GPU has


@dataclass(frozen=True, slots=True)
class ChainWeights:
    """Weights of the four products and of the norms between them."""

    output: Tensor  # [hidden, attended]
    post_norm: Tensor  # [hidden]
    gate_up: Tensor  # [2 * inner, hidden]
    down: Tensor  # [hidden, inner]
    next_norm: Tensor  # [hidden]
    next: Tensor  # [N, hidden]
    next_bias: Tensor | None  # [N]


@dataclass(frozen=True, slots=True)
class ChainBuffers:
    """What the products of a chain leave for each other. Chains run one after the other and share it."""

    scaled_mlp: Tensor  # [MAX_TOKENS, hidden]
    activated: Tensor  # [MAX_TOKENS, inner]
    scaled_next: Tensor  # [MAX_TOKENS, hidden]
    mlp_sums: Tensor  # [programs, MAX_TOKENS] float32
    next_sums: Tensor  # [programs, MAX_TOKENS] float32
    counters: Tensor  # [3] int64, of programs that have ended a product; they only grow


class _Arguments(ctypes.Structure):
    """`Arguments` of product_chain.cu."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("post_norm", "next_norm", "bias", "stream")),
        *((name, ctypes.c_void_p) for name in ("scaled_mlp", "activated", "scaled_next", "out")),
        *((name, ctypes.c_void_p) for name in ("mlp_sums", "next_sums", "counters")),
        ("num_tokens", ctypes.c_int),
        ("eps", ctypes.c_float),
    ]


def num_programs(device: torch.device) -> int:
    """Programs of a launch: one a multiprocessor."""
    return torch.cuda.get_device_properties(device).multi_processor_count


def fits(hidden: int, attended: int, inner: int, next_sizes: tuple[int, ...], programs: int) -> bool:
    """Whether the kernel can share out products of these sizes.

    Args:
        hidden, attended, inner: inner elements of products.
        next_sizes: columns of those at the ends of chains.
        programs: of a launch on the device.
    """
    inners = (hidden, attended, inner)
    if any(size % 64 or size < _MIN_INNER for size in inners) or any(size % 8 for size in next_sizes):
        return False
    return hidden <= _MAX_HIDDEN_PER_PROGRAM * programs


def runs_on(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether this device can run the kernel, which is written for Hopper GPUs and bfloat16."""
    if device.type != "cuda" or dtype != torch.bfloat16 or torch.cuda.get_device_capability(device)[0] != 9:
        return False
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin >= _SHARED_BYTES


def make_chain_buffers(hidden: int, inner: int, device: torch.device) -> ChainBuffers:
    """Buffers for all chains of a model."""
    programs = num_programs(device)

    def zeros(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    return ChainBuffers(
        scaled_mlp=zeros(MAX_TOKENS, hidden),
        activated=zeros(MAX_TOKENS, inner),
        scaled_next=zeros(MAX_TOKENS, hidden),
        mlp_sums=zeros(programs, MAX_TOKENS, dtype=torch.float32),
        next_sums=zeros(programs, MAX_TOKENS, dtype=torch.float32),
        counters=zeros(3, dtype=torch.int64),
    )


def prepare_product_chain(
    attended: Tensor,
    stream: Tensor,
    out: Tensor,
    weights: ChainWeights,
    buffers: ChainBuffers,
    eps: float,
    max_wait_ms: int = 20_000,
) -> Callable[[], None]:
    """Make a launch; calling it enqueues the kernel, as often as one likes.

        stream += attended @ output.T
        stream += down(silu(gate) * up), of rms_norm(stream, post_norm)
        out = rms_norm(stream, next_norm) @ next.T + next_bias

    The kernel in front of it must be the one that makes `attended`, and may let it begin early; `stream` must have been
    written before that one.

    Args:
        attended: [num_tokens, attended] bfloat16, at most MAX_TOKENS rows.
        stream: [num_tokens, hidden], the residual stream, changed in place.
        out: [num_tokens, N], written.
        weights: of the four products.
        buffers: of `make_chain_buffers`.
        eps: of both norms.
        max_wait_ms: after this long without all of its programs running, the kernel ends with an error of the device.

    Raises:
        CudaSourceError: CUDA cannot compile or load the kernel.
        ValueError: the tensors do not have the same tokens, or too many.
    """
    num_tokens, hidden = stream.shape
    if num_tokens > MAX_TOKENS or not len(attended) == len(out) == num_tokens:
        raise ValueError(f"{len(attended)}, {num_tokens} and {len(out)} tokens: not the same, or over {MAX_TOKENS}")
    programs = num_programs(stream.device)
    rows = 8 if num_tokens <= 8 else 16
    defines = {
        "HIDDEN": hidden,
        "ATTENDED": attended.shape[1],
        "INTER": weights.down.shape[1],
        "NEXT": out.shape[1],
        "ROWS": rows,
        "NUM_SMS": programs,
        "HAS_BIAS": int(weights.next_bias is not None),
        "MAX_WAIT_MS": max_wait_ms,
    }
    kernel, shared_bytes, box_sizes = _load_kernel(tuple(defines.items()), stream.device.index)
    matrices = (weights.output, weights.gate_up, weights.down, weights.next)
    inputs = (
        attended,
        *(tensor[:num_tokens] for tensor in (buffers.scaled_mlp, buffers.activated, buffers.scaled_next)),
    )
    maps = [make_tensor_map(matrix, *box) for matrix, box in zip(matrices, box_sizes, strict=True)]
    maps += [make_tensor_map(x, rows, columns) for x, (_, columns) in zip(inputs, box_sizes, strict=True)]
    bias = weights.post_norm if weights.next_bias is None else weights.next_bias  # without HAS_BIAS nobody looks
    tensors = (weights.post_norm, weights.next_norm, bias, stream, buffers.scaled_mlp, buffers.activated)
    tensors += (buffers.scaled_next, out, buffers.mlp_sums, buffers.next_sums, buffers.counters)
    struct = _Arguments(*(tensor.data_ptr() for tensor in tensors), num_tokens, eps)
    arguments = KernelArguments(maps, struct, (*matrices, *inputs, *tensors))
    return partial(kernel.launch, programs, _NUM_THREADS, shared_bytes, arguments)


def product_chain_ref(attended: Tensor, stream: Tensor, weights: ChainWeights, eps: float) -> tuple[Tensor, Tensor]:
    """The same in float64, but for what stands in memory between products, which is as narrow as there.

    Returns:
        The stream, [num_tokens, hidden] of its dtype, and out, [num_tokens, N] float64.
    """
    dtype = stream.dtype
    stream = fused_gemm_ref(attended, weights.output, residual=stream).to(dtype)
    activated = fused_gemm_ref(stream, weights.gate_up, norm_weight=weights.post_norm, eps=eps, silu=True).to(dtype)
    stream = fused_gemm_ref(activated, weights.down, residual=stream).to(dtype)
    return stream, fused_gemm_ref(stream, weights.next, norm_weight=weights.next_norm, eps=eps, bias=weights.next_bias)


@cache
def _load_kernel(
    defines: tuple[tuple[str, int], ...], device: int
) -> tuple[CudaKernel, int, tuple[tuple[int, int], ...]]:
    """The kernel, the shared memory that a program asks for, and rows and inner elements of each product's boxes."""
    with torch.cuda.device(device):
        kernel = CudaKernel(Path(__file__).with_name("product_chain.cu"), "product_chain", dict(defines))
        shared_bytes, *boxes = kernel.read_ints("plan")
        kernel.allow_shared_memory(shared_bytes)
    return kernel, shared_bytes, tuple(zip(boxes[::2], boxes[1::2], strict=True))
