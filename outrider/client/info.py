"""What a service says of itself: values of the client's interface."""

from __future__ import annotations

from dataclasses import dataclass

from smg_grpc_proto.generated import vllm_engine_pb2 as pb


@dataclass(frozen=True, slots=True)
class Health:
    """One address."""

    is_healthy: bool
    message: str
    """The service's word, or why it did not answer."""


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What an address serves."""

    name: str
    path: str
    model_type: str
    architectures: tuple[str, ...]
    vocab_size: int
    max_model_len: int
    """Prompt + output tokens at most."""
    eos_token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """An address as a process."""

    num_active_requests: int
    is_paused: bool
    uptime_s: float
    server_type: str
    dtype: str
    block_size: int
    max_num_seqs: int


@dataclass(frozen=True, slots=True)
class Load:
    """One data-parallel rank of an address, between two of its steps."""

    num_running: int
    num_waiting: int
    max_num_seqs: int
    kv_cache_usage: float
    """0 to 1."""
    num_used_tokens: int
    max_num_tokens: int
    tokens_per_second: float
    prefix_hit_rate: float


def to_model_info(message: pb.GetModelInfoResponse) -> ModelInfo:
    return ModelInfo(
        name=message.served_model_name,
        path=message.model_path,
        model_type=message.model_type,
        architectures=tuple(message.architectures),
        vocab_size=message.vocab_size,
        max_model_len=message.max_context_length,
        eos_token_ids=tuple(message.eos_token_ids),
    )


def to_server_info(message: pb.GetServerInfoResponse) -> ServerInfo:
    return ServerInfo(
        num_active_requests=message.active_requests,
        is_paused=message.is_paused,
        uptime_s=message.uptime_seconds,
        server_type=message.server_type,
        dtype=message.model_dtype.removeprefix("torch."),
        block_size=message.block_size,
        max_num_seqs=message.max_num_seqs,
    )


def to_loads(message: pb.GetLoadsResponse) -> list[Load]:
    return [
        Load(
            num_running=rank.num_running_reqs,
            num_waiting=rank.num_waiting_reqs,
            max_num_seqs=rank.max_running_requests,
            kv_cache_usage=rank.token_usage,
            num_used_tokens=rank.num_used_tokens,
            max_num_tokens=rank.max_total_num_tokens,
            tokens_per_second=rank.gen_throughput,
            prefix_hit_rate=rank.cache_hit_rate,
        )
        for rank in message.loads
    ]
