"""Configuration of a drafter: one frozen tree, unknown names refused."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from common.errors import InvalidArgumentError
from common.validation import to_outrider_error


class DrafterConfig(BaseModel):
    """What a drafter drafts with, where it listens, and what a verifier may ask of it.

    Raises:
        InvalidArgumentError: a value is out of range; names the field, the value and the limit.
        UnknownOptionError: an option that does not exist; names the nearest one that does.
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", protected_namespaces=(), use_attribute_docstrings=True, hide_input_in_errors=True
    )

    method: str = "ngram"
    """Draft method: ngram."""
    host: str = "127.0.0.1"
    """Address to listen on. The draft port trusts its peers: keep it off public addresses."""
    port: int = Field(default=50052, ge=0, le=65535)
    """Port to listen on; 0 takes a free one."""
    model: str | None = None
    """Model directory whose vocabulary verifiers must have; without it any vocabulary is served."""
    max_rows: int = Field(default=256, ge=1, le=1 << 16)
    """Requests of all verifiers at the same time."""
    max_model_len: int = Field(default=32768, ge=2, le=1 << 24)
    """Longest prompt + output of a row, tokens; longer rows get no drafts."""
    max_branch_len: int = Field(default=64, ge=1, le=1024)
    """Longest branch that a verifier may ask for, tokens."""
    max_verifiers: int = Field(default=64, ge=1, le=4096)
    """Verifiers connected at the same time."""
    metrics_port: int | None = Field(default=None, ge=0, le=65535)
    """Port of the Prometheus metrics, at /metrics; 0 takes a free one; without it there is none."""
    metrics_host: str = Field(default="127.0.0.1", min_length=1)
    """Address of the Prometheus metrics; everybody who reaches it can read them."""
    prompt_lookup_max: int = Field(default=5, ge=1, le=32)
    """Longest n-gram that the n-gram method looks for."""
    prompt_lookup_min: int = Field(default=2, ge=1, le=32)
    """Shortest n-gram that counts as a match."""
    shm_dir: str = "/dev/shm"
    """Directory for shared memory with verifiers on this host, the same as theirs; empty: gRPC alone."""
    num_threads: int = Field(default=1, ge=1)
    """CPU threads of the draft method."""

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise to_outrider_error(error, type(self), values) from None
        if self.prompt_lookup_min > self.prompt_lookup_max:
            limit = f"at most prompt_lookup_max = {self.prompt_lookup_max}"
            raise InvalidArgumentError("prompt_lookup_min", self.prompt_lookup_min, limit)

    @property
    def max_frame_tokens(self) -> int:
        """Tokens of one frame: 2 MiB of them, or one row if that is more."""
        return max(1 << 19, self.max_model_len)
