"""Options of `outrider verifier`: those of its engine and those of its front."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import Field

from common.config import Bytes, EngineConfig
from common.errors import InvalidArgumentError
from common.rpc.server import ServerLimits, TlsFiles


class VerifierConfig(EngineConfig):
    """What a verifier serves, where, and to whom.

    Raises:
        InvalidArgumentError: a value is out of range, or an option needs another one.
        UnknownOptionError: an option that does not exist; names the nearest one that does.
    """

    host: str = Field(default="127.0.0.1", min_length=1)
    """Address to listen on; 0.0.0.0 is every one of this machine."""
    port: int = Field(default=50051, ge=0, le=65535)
    """Port to listen on; 0 takes a free one."""
    uds: Path | None = None
    """Listen on this Unix socket as well."""
    served_model_name: str | None = Field(default=None, min_length=1)
    """Name that clients know the model by; default: MODEL as it was given."""
    tls_cert: Path | None = None
    """PEM file of the server's certificate chain; needs --tls-key."""
    tls_key: Path | None = None
    """PEM file of the certificate's key."""
    tls_client_ca: Path | None = None
    """PEM file of the authority that signs client certificates: clients without one are refused (mutual TLS)."""
    api_key_file: Path | None = None
    """File with one key a line; calls need one as 'authorization: Bearer KEY', health checks excepted."""
    request_timeout: float = Field(default=3600.0, gt=0.0)
    """Seconds after which a request ends with DEADLINE_EXCEEDED, whatever its own deadline is."""
    engine_timeout: float = Field(default=300.0, gt=0.0)
    """Seconds without a word from an engine that has work, after which health checks fail until it speaks again."""
    shutdown_timeout: float = Field(default=30.0, ge=0.0)
    """Seconds that requests which have started may take to finish after SIGTERM."""
    metrics_port: int | None = Field(default=None, ge=0, le=65535)
    """Port of the Prometheus metrics, at /metrics; 0 takes a free one; without it there is none."""
    metrics_host: str = Field(default="127.0.0.1", min_length=1)
    """Address of the Prometheus metrics; everybody who reaches it can read them."""
    otlp_endpoint: str | None = None
    """Where OpenTelemetry spans go, http://HOST:PORT of a collector (OTLP over gRPC); needs the extra otel."""
    max_message_bytes: Bytes = Field(default=64 << 20, ge=1 << 10, lt=1 << 31)
    """Largest gRPC message; '64M' is understood."""
    max_connections: int = Field(default=1024, ge=1)
    """Connections at the same time; more are closed."""
    max_concurrent_streams: int = Field(default=4096, ge=1)
    """Calls at the same time on one connection."""

    def __init__(self, **values: Any) -> None:
        super().__init__(**values)
        if (self.tls_cert is None) != (self.tls_key is None):
            missing = "tls_key" if self.tls_key is None else "tls_cert"
            raise InvalidArgumentError(missing, None, "a file: --tls-cert and --tls-key go together")
        if self.tls_client_ca is not None and self.tls_cert is None:
            raise InvalidArgumentError("tls_cert", None, "a file, as --tls-client-ca needs TLS")

    @property
    def name(self) -> str:
        """What clients know the model by."""
        return self.served_model_name or self.model

    @property
    def engine_options(self) -> dict[str, Any]:
        """The fields of `EngineConfig`, for the engine process.

        The front counts outputs and refuses what goes beyond `capacity`. The engine's own bound is above that: a burst
        reaches its queue before any row takes from it.
        """
        fields = self.model_dump(mode="json", include=set(EngineConfig.model_fields))
        return fields | {"max_num_waiting": self.capacity}

    @property
    def capacity(self) -> int:
        """Outputs that run or wait at the same time."""
        return self.max_num_seqs + self.max_num_waiting

    @property
    def tls(self) -> TlsFiles | None:
        if self.tls_cert is None or self.tls_key is None:
            return None
        return TlsFiles(self.tls_cert, self.tls_key, self.tls_client_ca)

    @property
    def limits(self) -> ServerLimits:
        return ServerLimits(
            max_message_bytes=self.max_message_bytes,
            max_connections=self.max_connections,
            max_concurrent_streams=self.max_concurrent_streams,
            # Every output has a place, and probes and questions about the load still get through beside them.
            max_concurrent_calls=2 * self.capacity + 256,
        )
