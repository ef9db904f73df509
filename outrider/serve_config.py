"""Options of `outrider serve`: those of a verifier, with the gateway's address, key and certificate."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, Field

from verifier_svc.front.config import VerifierConfig

# Of the verifier, which only the gateway talks to.
EXCLUDED = ("skip_tokenizer_init", "uds", "tls_client_ca")
_OF_THE_GATEWAY = (*EXCLUDED, "model", "host", "port", "tls_cert", "tls_key", "api_key_file", "gateway_metrics_port")


class ServeConfig(VerifierConfig):
    """What to serve over HTTP, where, and to whom.

    Raises:
        InvalidArgumentError: a value is out of range, or an option needs another one.
        UnknownOptionError: an option that does not exist; names the nearest one that does.
    """

    host: str = Field(default="127.0.0.1", min_length=1)
    """Address that HTTP is served on; 0.0.0.0 is every one of this machine."""
    port: int = Field(default=8000, ge=1, le=65535)
    """Port that HTTP is served on."""
    tls_cert: Path | None = None
    """PEM file of the certificate chain for HTTPS; needs --tls-key."""
    api_key_file: Path | None = None
    """File with one key; clients need it as 'Authorization: Bearer KEY'."""
    gateway_metrics_port: int = Field(default=0, ge=0, le=65535)
    """Port of the gateway's Prometheus metrics, on 127.0.0.1; 0 takes a free one."""

    @property
    def scheme(self) -> str:
        return "http" if self.tls_cert is None else "https"

    @property
    def verifier_flags(self) -> list[str]:
        """What the verifier's command line has to say to be like this."""
        names = [name for name in VerifierConfig.model_fields if name not in _OF_THE_GATEWAY]
        return flags_of(self, [name for name in names if name in self.model_fields_set])


def flags_of(config: BaseModel, names: list[str]) -> list[str]:
    """The flags that give these fields their values; those that are None have none."""
    flags: list[str] = []
    for name, value in config.model_dump(mode="json", include=set(names)).items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            flags.append(f"--{flag}" if value else f"--no-{flag}")
        elif value is not None:
            # One argument: a value may begin with a dash.
            flags.append(f"--{flag}={value}")
    return flags
