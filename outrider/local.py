"""Embedded wiring: verifier and drafter in one process. The only module that imports several services."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer

from common.config import BLOCK_SIZE, EngineConfig
from common.errors import ModelLoadError
from common.logging import get_logger
from common.model_identity import read_model_identity
from drafter_svc.methods.ngram import NgramMethod
from model_executor.drafting import DraftMethod, NoDraft
from model_executor.kv_cache import KVCache, num_blocks_for
from model_executor.models.config import ModelConfig, load_model_config
from model_executor.models.registry import (
    LoadedModel,
    build_decoder,
    load_parameters,
    resolve_dtype,
    resolve_max_model_len,
)
from model_executor.row_state import RowState
from verifier_svc.drafts.builder import build_remote_drafts, build_verifier_hello
from verifier_svc.drafts.grpc_transport import GrpcTransport
from verifier_svc.drafts.shared_memory import SharedMemoryOptions
from verifier_svc.engine.cuda_memory import num_cuda_blocks
from verifier_svc.engine.engine import Engine
from verifier_svc.engine.executor import InlineExecutor, StepExecutor
from verifier_svc.engine.model_runner import ModelRunner
from verifier_svc.front.admission import ServedModel
from verifier_svc.orchestrator.block_pool import BlockPool
from verifier_svc.orchestrator.orchestrator import Orchestrator
from verifier_svc.sampling.state import SamplingState

ASYNC_DEPTH = 2
"""Steps in flight of the asynchronous loop."""


@dataclass(frozen=True, slots=True)
class LocalEngine:
    """An engine and what its requests are checked against."""

    engine: Engine
    served: ServedModel
    dtype: str
    """Of the weights in memory, such as float32."""
    draft_method: DraftMethod


def build_draft_method(config: EngineConfig, vocab_size: int, max_model_len: int, device: torch.device) -> DraftMethod:
    """The method that `config.drafter` names; remote drafters are looked for at once, and used once they are there."""
    if config.drafter == "none" or config.num_speculative_tokens == 0:
        return NoDraft()
    ngram = NgramMethod(config.prompt_lookup_max, config.prompt_lookup_min)
    if not config.drafter_addresses:
        return ngram
    hello = build_verifier_hello(config, read_model_identity(Path(config.model)), vocab_size, max_model_len)
    shared_memory = None
    if config.draft_transport != "grpc":
        shared_memory = SharedMemoryOptions(Path(config.draft_shm_dir), is_required=config.draft_transport == "shm")
    return build_remote_drafts(
        [GrpcTransport(address, hello, shared_memory) for address in config.drafter_addresses],
        hello,
        config.num_speculative_tokens,
        ngram if config.draft_fallback == "ngram" else NoDraft(),
        config.draft_deadline,
        device,
    )


def build_local_engine(
    config: EngineConfig, draft_method: DraftMethod | None = None, progress: bool = True
) -> LocalEngine:
    """Load the model and wire an engine around it.

    Args:
        config: what to serve.
        draft_method: used instead of the one that `config.drafter` names.
        progress: show a bar while weights load, if standard error is a terminal.

    Raises:
        ModelLoadError: the model directory cannot be served.
        InvalidArgumentError: an option does not fit the model.
    """
    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)
    # First what takes no time: a limit that does not fit is said before weights are read. And the tokenizer's loader
    # reads config.json too: it would call a broken one a broken tokenizer.
    model_config = load_model_config(config.model)
    max_model_len = resolve_max_model_len(config.max_model_len, model_config)
    if config.device == "cpu":
        _num_cpu_blocks(config, model_config, max_model_len)
    tokenizer = None if config.skip_tokenizer_init else load_tokenizer(config.model)
    loaded = load_parameters(config.model, config.dtype, torch.device(config.device), max_model_len, progress)
    return assemble_engine(config, loaded, tokenizer, draft_method)


def assemble_engine(
    config: EngineConfig,
    loaded: LoadedModel,
    tokenizer: Tokenizer | None = None,
    draft_method: DraftMethod | None = None,
    forced_acceptance: Sequence[float] = (),
) -> LocalEngine:
    """Wire an engine around a model in memory.

    Args:
        config: what to serve.
        loaded: the model, on `config.device`; its layers are taken out of it.
        tokenizer: None: token ids in and out.
        draft_method: used instead of the one that `config.drafter` names.
        forced_acceptance: for benchmarks on a GPU, chance that at least 1, 2, ... draft tokens are accepted.
    """
    device = torch.device(config.device)
    model_config, max_model_len = loaded.config, loaded.max_model_len
    dtype = loaded.parameters.embed_tokens.dtype
    # On a CPU nobody else may hold the layers: the decoder packs them and lets go of the plain ones, one at a time.
    layers = list(loaded.parameters.layers) if device.type == "cuda" else []
    decoder = build_decoder(loaded)
    if device.type == "cuda":
        num_blocks = num_cuda_blocks(decoder, config.gpu_memory_utilization, config.max_num_batched_tokens)
    else:
        num_blocks = _num_cpu_blocks(config, model_config, max_model_len)
    # No more blocks than all rows together can ever fill: a small model would only clear memory that nobody uses.
    num_blocks = min(num_blocks, config.max_num_seqs * -(-max_model_len // BLOCK_SIZE) + 1)
    kv_cache = KVCache(model_config, num_blocks, dtype, device)
    num_rows = config.max_num_seqs + (device.type == "cuda")  # a graph fills its unused entries with one row more
    rows = RowState(num_rows, max_model_len, BLOCK_SIZE, device)
    sampling = SamplingState(num_rows, model_config.vocab_size, device)
    if draft_method is None:
        draft_method = build_draft_method(config, model_config.vocab_size, max_model_len, device)
    runner = ModelRunner(decoder, kv_cache, rows, sampling, draft_method)
    depth = ASYNC_DEPTH if config.async_scheduling else 1
    executor: StepExecutor = InlineExecutor(runner)
    if device.type == "cuda" and isinstance(draft_method, NoDraft | NgramMethod):
        # Late: they import triton, which a machine without a GPU need not have.
        from model_executor.models.fused_decoder import FusedDecoder, supports
        from verifier_svc.engine.build_cuda import build_cuda_executor

        if supports(model_config):
            fused = FusedDecoder(model_config, loaded.parameters, layers, kv_cache, max_model_len)
            executor = build_cuda_executor(config, fused, runner, rows, sampling, depth, forced_acceptance)
    orchestrator = Orchestrator(
        BlockPool(num_blocks, BLOCK_SIZE, config.enable_prefix_caching),
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_num_waiting=config.max_num_waiting,
    )
    served = ServedModel(
        vocab_size=model_config.vocab_size,
        max_model_len=max_model_len,
        eos_token_ids=model_config.eos_token_ids,
        num_speculative_tokens=0 if config.drafter == "none" else config.num_speculative_tokens,
        tokenizer=tokenizer,
    )
    dtype_name = str(dtype).removeprefix("torch.")
    get_logger(__name__).info(
        "engine ready",
        **config.model_dump(),
        served_dtype=dtype_name,
        served_max_model_len=max_model_len,
        num_kv_cache_tokens=(num_blocks - 1) * BLOCK_SIZE,
    )
    return LocalEngine(Engine(orchestrator, executor, depth), served, dtype_name, draft_method)


def _num_cpu_blocks(config: EngineConfig, model_config: ModelConfig, max_model_len: int) -> int:
    dtype = resolve_dtype(config.dtype, model_config, torch.device("cpu"))
    return num_blocks_for(config.kv_cache_memory, model_config, dtype, max_model_len)


def load_tokenizer(directory: str) -> Tokenizer:
    """The fast tokenizer of a model directory, set up as transformers does.

    Raises:
        ModelLoadError: there is none, or it cannot be read.
    """
    if not Path(directory).is_dir():
        raise ModelLoadError(f"model directory {directory} does not exist: expected a Hugging Face model directory")
    from transformers import AutoTokenizer  # late: it takes a second, and many tests need none

    try:
        tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers raises many kinds, and all of them mean a broken directory here
        hint = "expected tokenizer.json; skip_tokenizer_init=True serves token ids without one"
        raise ModelLoadError(f"{directory} holds no tokenizer that can be read ({error}): {hint}") from error
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if not isinstance(backend, Tokenizer):
        raise ModelLoadError(f"{directory} holds a tokenizer of class {type(tokenizer).__name__}: expected a fast one")
    return backend
