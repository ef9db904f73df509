"""Embedded wiring: verifier and drafter in one process. The only module that imports several services."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer

from common.config import BLOCK_SIZE, EngineConfig
from common.draft_exchange import VerifierHello
from common.errors import InvalidArgumentError, ModelLoadError
from common.logging import get_logger
from common.model_identity import read_model_identity
from drafter_svc.methods.ngram import NgramMethod
from model_executor.drafting import DraftMethod, NoDraft
from model_executor.kv_cache import KVCache, max_useful_blocks, num_blocks_for
from model_executor.models.config import ModelConfig, load_model_config
from model_executor.models.registry import (
    LoadedModel,
    build_decoder,
    load_parameters,
    resolve_dtype,
    resolve_max_model_len,
)
from model_executor.row_state import RowState
from verifier_svc.drafts.builder import build_remote_device_drafts, build_remote_drafts, build_verifier_hello
from verifier_svc.drafts.device_drafts import DeviceDrafts, DeviceOnlyDrafts, RemoteDeviceDrafts
from verifier_svc.drafts.grpc_transport import GrpcTransport
from verifier_svc.drafts.remote_drafts import RemoteDrafts
from verifier_svc.drafts.shared_memory import SharedMemoryOptions
from verifier_svc.engine.engine import Engine
from verifier_svc.engine.executor import InlineExecutor, StepExecutor
from verifier_svc.engine.memory_report import MemoryUse, log_memory
from verifier_svc.engine.model_runner import ModelRunner
from verifier_svc.engine.token_row_memory import check_token_row_memory
from verifier_svc.front.admission import ServedModel
from verifier_svc.messages import ExchangeCounts
from verifier_svc.orchestrator.block_pool import BlockPool
from verifier_svc.orchestrator.orchestrator import Orchestrator
from verifier_svc.sampling.state import SamplingState

ASYNC_DEPTH = 2
"""Steps in flight of the asynchronous loop."""

CUDA_PREFILL_BESIDE_DECODE = 256
"""Tokens of a step with prompts in which other rows decode: with more, a long prompt makes all streams stutter."""


@dataclass(frozen=True, slots=True)
class LocalEngine:
    """An engine and what its requests are checked against."""

    engine: Engine
    served: ServedModel
    dtype: str
    """Of the weights in memory, such as float32."""
    exchange_counts: Callable[[], ExchangeCounts] | None
    """Counts of remote drafters; None where there are none."""
    memory: MemoryUse | None
    """What takes the memory of a GPU."""


def build_draft_method(config: EngineConfig, vocab_size: int, max_model_len: int, device: torch.device) -> DraftMethod:
    """The method that `config.drafter` names; remote drafters are looked for at once, and used once they are there."""
    if config.drafter == "none" or config.num_speculative_tokens == 0:
        return NoDraft()
    ngram = NgramMethod(config.prompt_lookup_max, config.prompt_lookup_min)
    if not config.drafter_addresses:
        return ngram
    hello = build_verifier_hello(config, read_model_identity(Path(config.model)), vocab_size, max_model_len)
    return build_remote_drafts(
        _transports(config, hello),
        hello,
        config.num_speculative_tokens,
        ngram if config.draft_fallback == "ngram" else NoDraft(),
        config.draft_deadline,
        device,
    )


def _transports(config: EngineConfig, hello: VerifierHello) -> list[GrpcTransport]:
    shared_memory = None
    if config.draft_transport != "grpc":
        shared_memory = SharedMemoryOptions(Path(config.draft_shm_dir), is_required=config.draft_transport == "shm")
    return [GrpcTransport(address, hello, shared_memory) for address in config.drafter_addresses]


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
        _check_cpu_memory(config, model_config, max_model_len)
    check_token_row_memory(config.max_token_row_memory, config.max_num_seqs, max_model_len)
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
    model_config = loaded.config
    depth = ASYNC_DEPTH if config.async_scheduling else 1
    if draft_method is None and _has_cuda_steps(config, loaded):
        parts = _cuda_parts(config, loaded, depth, forced_acceptance)
    elif forced_acceptance:
        raise InvalidArgumentError("forced_acceptance", forced_acceptance, "none, as these steps cannot do it")
    else:
        parts = _torch_parts(config, loaded, draft_method)
    orchestrator = Orchestrator(
        BlockPool(parts.num_blocks, BLOCK_SIZE, config.enable_prefix_caching),
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_num_waiting=config.max_num_waiting,
        max_prefill_beside_decode=_max_prefill_beside_decode(config),
    )
    served = ServedModel(
        vocab_size=model_config.vocab_size,
        max_model_len=loaded.max_model_len,
        eos_token_ids=model_config.eos_token_ids,
        num_speculative_tokens=0 if config.drafter == "none" else config.num_speculative_tokens,
        tokenizer=tokenizer,
    )
    logger = get_logger(__name__)
    logger.info(
        "engine ready",
        **config.model_dump(),
        served_dtype=parts.dtype,
        served_max_model_len=loaded.max_model_len,
        num_kv_cache_tokens=(parts.num_blocks - 1) * BLOCK_SIZE,
    )
    if parts.memory is not None:
        log_memory(parts.memory, logger)
    engine = Engine(orchestrator, parts.executor, depth)
    return LocalEngine(engine, served, parts.dtype, parts.exchange_counts, parts.memory)


@dataclass(frozen=True, slots=True)
class _Parts:
    """What runs steps on a device, and what there is to say about it."""

    executor: StepExecutor
    num_blocks: int
    dtype: str
    exchange_counts: Callable[[], ExchangeCounts] | None
    memory: MemoryUse | None


def _torch_parts(config: EngineConfig, loaded: LoadedModel, draft_method: DraftMethod | None) -> _Parts:
    """Steps as torch operations, on any device."""
    device, model_config = torch.device(config.device), loaded.config
    decoder = build_decoder(loaded)
    num_blocks = num_blocks_for(config.kv_cache_memory, model_config, decoder.dtype, loaded.max_model_len)
    num_blocks = min(num_blocks, max_useful_blocks(config.max_num_seqs, loaded.max_model_len))
    kv_cache = KVCache(model_config, num_blocks, decoder.dtype, device)
    rows = RowState(config.max_num_seqs, loaded.max_model_len, BLOCK_SIZE, device)
    sampling = SamplingState(config.max_num_seqs, model_config.vocab_size, device)
    if draft_method is None:
        draft_method = build_draft_method(config, model_config.vocab_size, loaded.max_model_len, device)
    runner = ModelRunner(decoder, kv_cache, rows, sampling, draft_method)
    counts = draft_method.counts if isinstance(draft_method, RemoteDrafts) else None
    return _Parts(InlineExecutor(runner), num_blocks, _name(decoder.dtype), counts, None)


def _cuda_parts(config: EngineConfig, loaded: LoadedModel, depth: int, forced_acceptance: Sequence[float]) -> _Parts:
    """Steps as CUDA graphs."""
    # Late: it imports triton, which a machine without a GPU need not have.
    from verifier_svc.engine.build_cuda import WriteStager, build_cuda_engine_parts

    vocab_size, max_model_len = loaded.config.vocab_size, loaded.max_model_len

    def build_drafts(writes: WriteStager) -> DeviceDrafts:
        if not config.drafter_addresses or config.num_speculative_tokens == 0:
            return DeviceOnlyDrafts()
        identity = read_model_identity(Path(config.model))
        hello = build_verifier_hello(config, identity, vocab_size, max_model_len, num_steps_ahead=depth - 1)
        transports = _transports(config, hello)
        device = torch.device(config.device)
        return build_remote_device_drafts(transports, hello, config.draft_deadline, device, writes)

    layers = list(loaded.parameters.layers)
    parts = build_cuda_engine_parts(config, loaded, layers, depth, build_drafts, forced_acceptance)
    counts = parts.drafts.counts if isinstance(parts.drafts, RemoteDeviceDrafts) else None
    dtype = _name(loaded.parameters.embed_tokens.dtype)
    return _Parts(parts.executor, parts.num_blocks, dtype, counts, parts.memory)


def _has_cuda_steps(config: EngineConfig, loaded: LoadedModel) -> bool:
    if config.device != "cuda":
        return False
    from model_executor.models.fused_decoder import supports  # late, as above

    return supports(loaded.config)


def _max_prefill_beside_decode(config: EngineConfig) -> int | None:
    if config.max_prefill_beside_decode is None and config.device == "cuda":
        return CUDA_PREFILL_BESIDE_DECODE
    return config.max_prefill_beside_decode


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _check_cpu_memory(config: EngineConfig, model_config: ModelConfig, max_model_len: int) -> None:
    dtype = resolve_dtype(config.dtype, model_config, torch.device("cpu"))
    num_blocks_for(config.kv_cache_memory, model_config, dtype, max_model_len)


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
