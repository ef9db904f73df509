"""Every kernel at the sizes that `python -m bench kernels` times. A new kernel is one more function in `_PER_MODEL`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from bench.attention_cases import prefill_attention_cases, verify_attention_cases, write_kv_cases
from bench.kernel_case import Case, Shape, Sizes, Work, copies_for
from bench.sampling_cases import sampling_cases
from model_executor.kernels import rms_norm as norm
from model_executor.kernels import silu_mul as silu
from model_executor.kernels.fused_gemm import Epilogue
from model_executor.kernels.ngram_search import ngram_search
from model_executor.kernels.product_chain import MAX_TOKENS as MAX_CHAIN_TOKENS
from model_executor.kernels.product_chain import ChainWeights, make_chain_buffers, prepare_product_chain, runs_on
from model_executor.kernels.rms_norm import NormTiles, rms_norm
from model_executor.kernels.silu_mul import SiluTiles, silu_mul
from model_executor.kernels.small_gemm import MAX_TOKENS, make_norm_input, small_gemm
from model_executor.kernels.wide_gemm import make_split_parts, make_wide_norm_input, wide_gemm


def _products(shape: Shape) -> list[tuple[str, int, int]]:
    """Name, columns and inner size of the products of a step; gate and up stand once each, above one another."""
    config = shape.config
    return [
        ("qkv", shape.qkv_size, config.hidden_size),
        ("o", config.hidden_size, shape.attended_size),
        ("gate_up", 2 * config.intermediate_size, config.hidden_size),
        ("down", config.hidden_size, config.intermediate_size),
        ("lm_head", config.vocab_size, config.hidden_size),
    ]


def _product_cases(shape: Shape, sizes: Sizes) -> Iterator[Case]:
    """Products as the fused steps run them, with what is before and after them, beside the vendor's alone."""
    for name, columns, inner in _products(shape):
        for num_rows in sizes.product_rows:
            size = f"{shape.name} {name}, {num_rows} x {inner} x {columns}"
            fused = "small_gemm" if num_rows <= MAX_TOKENS else "wide_gemm"
            yield Case(fused, size, partial(_fused_product, shape, name, num_rows, columns, inner))
            yield Case("torch mm", size, partial(_product, shape, num_rows, columns, inner))


def _fused_product(shape: Shape, name: str, num_rows: int, columns: int, inner: int, device: torch.device) -> Work:
    weights = _weights(shape, columns, inner, device)
    x = torch.randn(num_rows, inner, dtype=shape.dtype, device=device)
    out = torch.empty(num_rows, columns // 2 if name == "gate_up" else columns, dtype=shape.dtype, device=device)
    product, make_norm = small_gemm, make_norm_input
    if num_rows > MAX_TOKENS:
        product, make_norm = partial(wide_gemm, parts=make_split_parts(device)), make_wide_norm_input
    if name in ("o", "down"):
        next_input = make_norm(columns, shape.dtype, device)
        norm_weight = torch.ones(columns, dtype=shape.dtype, device=device)
        epilogue = Epilogue(residual=torch.zeros_like(out), next_weight=norm_weight, next_input=next_input)
    else:
        square_sums = make_norm(inner, shape.dtype, device).square_sums
        epilogue = Epilogue(square_sums=square_sums, eps=1e-5, silu=name == "gate_up")
    return Work([partial(product, x, weight, out, epilogue) for weight in weights], weights[0].nbytes)


def _product(shape: Shape, num_rows: int, columns: int, inner: int, device: torch.device) -> Work:
    weights = _weights(shape, columns, inner, device)
    x = torch.randn(num_rows, inner, dtype=shape.dtype, device=device)
    out = torch.empty(num_rows, columns, dtype=shape.dtype, device=device)
    return Work([partial(torch.mm, x, weight.t(), out=out) for weight in weights], weights[0].nbytes)


def _product_chain_cases(shape: Shape, sizes: Sizes) -> Iterator[Case]:
    if not torch.cuda.is_available() or not runs_on(torch.device("cuda"), shape.dtype):
        return
    for num_rows in sizes.product_rows:
        if num_rows <= MAX_CHAIN_TOKENS:
            size = f"{shape.name} {num_rows} tokens, o to qkv"
            yield Case("product_chain", size, partial(_product_chain, shape, num_rows))


def _product_chain(shape: Shape, num_rows: int, device: torch.device) -> Work:
    config = shape.config
    sizes = [(columns, inner) for _, columns, inner in _products(shape)[:4]]
    qkv, output, gate_up, down = (_weights(shape, *size, device) for size in sizes)
    norm_weight = torch.ones(config.hidden_size, dtype=shape.dtype, device=device)
    attended, stream, out = (
        torch.ones(num_rows, columns, dtype=shape.dtype, device=device)
        for columns in (shape.attended_size, config.hidden_size, shape.qkv_size)
    )
    # One behind the other, with no attention between them: none begins early.
    buffers = make_chain_buffers(config.hidden_size, config.intermediate_size, device)
    calls: list[Callable[[], object]] = [
        prepare_product_chain(
            attended, stream, out, ChainWeights(o, norm_weight, gu, d, norm_weight, q, None), buffers, 1e-5
        )
        for q, o, gu, d in zip(qkv, output, gate_up, down, strict=False)  # as many as there are copies of the largest
    ]
    return Work(calls, sum(weights[0].nbytes for weights in (qkv, output, gate_up, down)))


def _weights(shape: Shape, columns: int, inner: int, device: torch.device) -> list[torch.Tensor]:
    """Filled by one value: random weights would take longer than the kernel, and zeros draw less power."""
    count = copies_for(columns * inner * shape.dtype.itemsize)
    return [torch.full((columns, inner), 0.01, dtype=shape.dtype, device=device) for _ in range(count)]


def _rms_norm_cases(shape: Shape, sizes: Sizes) -> Iterator[Case]:
    for tiles in norm.candidates(shape.config.hidden_size):
        if not tiles.last_first:  # makes no difference when nothing stands before and after it
            size = f"{shape.name} {sizes.num_tokens} tokens: {tiles.num_warps} warps"
            yield Case("rms_norm", size, partial(_rms_norm, shape, sizes, tiles))


def _rms_norm(shape: Shape, sizes: Sizes, tiles: NormTiles, device: torch.device) -> Work:
    hidden = shape.config.hidden_size
    x, out = (torch.randn(sizes.num_tokens, hidden, dtype=shape.dtype, device=device) for _ in range(2))
    weight = torch.ones(hidden, dtype=shape.dtype, device=device)
    return Work([partial(rms_norm, x, weight, out, 1e-5, tiles)], 2 * x.numel() * x.element_size())


def _silu_mul_cases(shape: Shape, sizes: Sizes) -> Iterator[Case]:
    for tiles in silu.candidates():
        if not tiles.last_first:
            size = f"{shape.name} {sizes.num_tokens} tokens: {tiles.columns} columns, {tiles.num_warps} warps"
            yield Case("silu_mul", size, partial(_silu_mul, shape, sizes, tiles))


def _silu_mul(shape: Shape, sizes: Sizes, tiles: SiluTiles, device: torch.device) -> Work:
    inner = shape.config.intermediate_size
    gate_up = torch.randn(sizes.num_tokens, 2 * inner, dtype=shape.dtype, device=device)
    out = torch.empty(sizes.num_tokens, inner, dtype=shape.dtype, device=device)
    return Work([partial(silu_mul, gate_up, out, tiles)], 3 * out.numel() * out.element_size())


def _ngram_search_cases(sizes: Sizes) -> Iterator[Case]:
    for vocab_size in (50, 100_000):
        size = f"{sizes.num_rows} x {sizes.text_len} random tokens of {vocab_size}"
        yield Case("ngram_search", size, partial(_ngram_search, sizes, vocab_size))


def _ngram_search(sizes: Sizes, vocab_size: int, device: torch.device) -> Work:
    num_rows, text_len = sizes.num_rows, sizes.text_len
    num_bytes = num_rows * text_len * 4
    lengths = torch.full((num_rows,), text_len, device=device)
    finished = torch.zeros(num_rows, dtype=torch.bool, device=device)
    rows = torch.arange(num_rows, device=device)
    best = torch.full((num_rows,), -1, device=device)
    texts = [
        torch.randint(vocab_size, (num_rows, text_len), dtype=torch.int32, device=device)
        for _ in range(copies_for(num_bytes))  # between two searches of a text the weights go through the L2
    ]
    return Work([partial(ngram_search, text, lengths, finished, rows, best, 4, 2) for text in texts], num_bytes)


_PER_MODEL: tuple[Callable[[Shape, Sizes], Iterator[Case]], ...] = (
    verify_attention_cases,
    prefill_attention_cases,
    write_kv_cases,
    _silu_mul_cases,
    _rms_norm_cases,
    _product_cases,
    _product_chain_cases,
    sampling_cases,
)
_PER_RUN: tuple[Callable[[Sizes], Iterator[Case]], ...] = (_ngram_search_cases,)


def kernel_cases(shapes: list[Shape], sizes: Sizes) -> Iterator[Case]:
    """Every case, those of one kernel and model one after the other."""
    for make in _PER_RUN:
        yield from make(sizes)
    for shape in shapes:
        for make_of_model in _PER_MODEL:
            yield from make_of_model(shape, sizes)
