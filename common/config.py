"""Configuration of the verifier's engine: one frozen tree, unknown names refused, defaults standing once."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from common.errors import InvalidArgumentError
from common.validation import to_outrider_error

MAX_SPECULATIVE_TOKENS = 16
BLOCK_SIZE = 16

_ADDRESS = re.compile(r"grpc://(?:[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\]):\d{1,5}")

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


def parse_bytes(value: object) -> object:
    """'512M', '4GiB' or a number -> bytes. Anything else is returned as it is, for the type check to refuse."""
    if not isinstance(value, str):
        return value
    match = re.fullmatch(r"\s*(\d{1,18}(?:\.\d{1,18})?)\s*([KMGT]?)(?:i?B)?\s*", value, re.IGNORECASE)
    if match is None:
        raise ValueError("a number of bytes, such as 4G or 512MiB")
    return int(float(match[1]) * _UNITS[match[2].upper()])


Bytes = Annotated[int, BeforeValidator(parse_bytes)]


def check_drafter(value: str) -> str:
    """Refuse anything but ngram, none and a list of addresses."""
    if value not in ("ngram", "none"):
        addresses = value.split(",")
        if not all(
            _ADDRESS.fullmatch(address) and 0 < int(address.rpartition(":")[2]) < 65536 for address in addresses
        ):
            raise ValueError("ngram, none or grpc://HOST:PORT[,grpc://HOST:PORT...]")
        if len(set(addresses)) < len(addresses):
            raise ValueError("each address once")
    return value


class EngineConfig(BaseModel):
    """What an engine serves and with which limits.

    Raises:
        InvalidArgumentError: a value is out of range; names the field, the value and the limit.
        UnknownOptionError: an option that does not exist; names the nearest one that does.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=(), use_attribute_docstrings=True)

    model: str = Field(min_length=1)
    """A Hugging Face model directory."""
    drafter: Annotated[str, AfterValidator(check_drafter)] = "ngram"
    """Where draft tokens come from: ngram, none, or drafters as grpc://HOST:PORT[,grpc://HOST:PORT...]."""
    draft_deadline: float = Field(default=2.0, ge=0, le=1000)
    """How long a step waits at most for the answer of a drafter, ms."""
    draft_transport: Literal["auto", "grpc", "shm"] = "auto"
    """How frames get to a drafter: auto is shared memory (shm) with one on this host if it works, and else grpc."""
    draft_shm_dir: str = Field(default="/dev/shm", min_length=1)
    """Directory for shared memory with drafters on this host, the same as theirs."""
    draft_fallback: Literal["ngram", "none"] = "ngram"
    """What drafts for rows that no drafter has a claim for."""
    num_speculative_tokens: int = Field(default=3, ge=0, le=MAX_SPECULATIVE_TOKENS)
    """K: at most this many draft tokens a row and step."""
    prompt_lookup_max: int = Field(default=5, ge=1, le=32)
    """Longest n-gram that the n-gram drafter looks for."""
    prompt_lookup_min: int = Field(default=2, ge=1, le=32)
    """Shortest n-gram that counts as a match."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Where the model runs."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """auto: float32 on a CPU, so that output does not depend on speculation."""
    max_model_len: int | None = Field(default=None, ge=2)
    """Longest prompt + output; None: what the model allows."""
    max_num_seqs: int = Field(default=64, ge=1, le=4096)
    """Rows: requests that run at the same time."""
    max_num_batched_tokens: int = Field(default=2048, ge=16)
    """Tokens of one step; longer prompts are prefilled in chunks of at most this."""
    max_num_waiting: int = Field(default=1024, ge=1)
    """Requests that wait for a row; one more is refused with RESOURCE_EXHAUSTED."""
    kv_cache_memory: Bytes = Field(default=1 << 30, ge=1)
    """Bytes of KV cache on a CPU; '512M' and '4G' are understood."""
    gpu_memory_utilization: float = Field(default=0.9, gt=0.0, lt=1.0)
    """Share of a GPU's memory that weights, activations and KV cache may take; the KV cache gets what is left."""
    max_token_row_memory: Bytes = Field(default=1 << 30, ge=1)
    """Bytes that the tokens of all rows may take, max_num_seqs x max_model_len x 4; n-grams are looked up there."""
    cuda_graphs: Literal["full", "piecewise", "none"] = "full"
    """full: a step on a GPU is one graph; piecewise: steps with prompts are one between attentions; none: no graphs."""
    max_prefill_beside_decode: int | None = Field(default=None, ge=16)
    """Prompt tokens of a step in which other rows decode, less what these take, but at least half of it; None: 256 on a
    GPU, and no bound of its own on a CPU."""
    product_chain: bool = True
    """On a Hopper GPU, run the products between two attentions as one kernel in steps of up to 16 tokens; False for
    engines that share a GPU, through MPS or in one process: this kernel must have all multiprocessors at once."""
    debug_step_path: bool = False
    """On a GPU, fail if handing over a step waits for the device or allocates memory."""
    enable_prefix_caching: bool = True
    """Keep the KV of prompts for later ones that begin alike."""
    async_scheduling: bool = True
    """Plan step N+1 before the outcome of step N is known."""
    skip_tokenizer_init: bool = False
    """Token ids in and out; no text, no stop strings."""
    num_threads: int | None = Field(default=None, ge=1, le=1024)
    """CPU threads of the forward pass; None: torch's default."""

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise to_outrider_error(error, type(self), values) from None
        if self.prompt_lookup_min > self.prompt_lookup_max:
            limit = f"at most prompt_lookup_max = {self.prompt_lookup_max}"
            raise InvalidArgumentError("prompt_lookup_min", self.prompt_lookup_min, limit)
        if self.max_num_batched_tokens < self.max_num_seqs:  # said before a model is loaded
            limit = f"at least max_num_seqs = {self.max_num_seqs}"
            raise InvalidArgumentError("max_num_batched_tokens", self.max_num_batched_tokens, limit)

    @property
    def drafter_addresses(self) -> tuple[str, ...]:
        """HOST:PORT of each remote drafter; none for ngram and none."""
        if "://" not in self.drafter:
            return ()
        return tuple(address.removeprefix("grpc://") for address in self.drafter.split(","))
