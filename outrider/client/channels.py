"""gRPC channels of a client: TLS, limits, and how fast a dead peer is noticed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from common.errors import InvalidArgumentError
from outrider.client.addresses import Address

MAX_MESSAGE_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class ChannelOptions:
    """How to reach the addresses."""

    api_key: str | None = None
    tls_ca: str | Path | None = None
    """PEM file; with it all addresses use TLS. `grpcs://` alone uses the system's certificates."""
    tls_cert: str | Path | None = None
    tls_key: str | Path | None = None
    keepalive_s: float = 10.0
    """A peer that has said nothing for this long while a call runs is asked for a sign of life, and given half as long
    to answer. Verifiers allow a ping every 5 seconds."""


class Channels:
    """A channel for each address, made when it is first needed; belongs to one event loop."""

    def __init__(self, options: ChannelOptions) -> None:
        self._options = options
        self._credentials = _credentials(options)
        self._channels: dict[str, grpc.aio.Channel] = {}
        key = options.api_key
        self.metadata: tuple[tuple[str, str], ...] = () if key is None else (("authorization", f"Bearer {key}"),)
        """For every call."""

    def get(self, address: Address) -> grpc.aio.Channel:
        channel = self._channels.get(address.target)
        if channel is None:
            settings = _settings(self._options)
            if self._credentials is None and not address.is_tls:
                channel = grpc.aio.insecure_channel(address.target, options=settings)
            else:
                credentials = self._credentials or grpc.ssl_channel_credentials()
                channel = grpc.aio.secure_channel(address.target, credentials, options=settings)
            self._channels[address.target] = channel
        return channel

    async def close(self) -> None:
        """Calls that still run end."""
        while self._channels:
            await self._channels.popitem()[1].close()


def _settings(options: ChannelOptions) -> list[tuple[str, Any]]:
    keepalive_ms = max(1, round(options.keepalive_s * 1000))
    return [
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        # Retries are ours: gRPC's own would send a request twice to the same place.
        ("grpc.enable_retries", 0),
        # A name with several addresses: the calls go round, and a dead one is left out.
        ("grpc.lb_policy_name", "round_robin"),
        # A name is looked up again when a connection to it is lost, at most this often (30 s by default).
        ("grpc.dns_min_time_between_resolutions_ms", 1000),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 2000),
        # A connection that does not come about fails after this, not after 20 s.
        ("grpc.min_reconnect_backoff_ms", 3000),
        ("grpc.keepalive_time_ms", keepalive_ms),
        ("grpc.keepalive_timeout_ms", max(1, keepalive_ms // 2)),
        # While a ping that measures bandwidth is unanswered, none for keepalive is sent. It has 60 s by default.
        ("grpc.http2.ping_timeout_ms", max(1, keepalive_ms // 2)),
        ("grpc.http2.max_pings_without_data", 0),
        # Two clients of a process stay apart: closing one must not cut the other off.
        ("grpc.use_local_subchannel_pool", 1),
    ]


def _credentials(options: ChannelOptions) -> grpc.ChannelCredentials | None:
    if (options.tls_cert is None) != (options.tls_key is None):
        missing = "tls_key" if options.tls_key is None else "tls_cert"
        raise InvalidArgumentError(missing, None, "tls_cert and tls_key together, or neither")
    if options.tls_ca is None and options.tls_cert is None:
        return None
    return grpc.ssl_channel_credentials(
        root_certificates=_read_pem("tls_ca", options.tls_ca),
        private_key=_read_pem("tls_key", options.tls_key),
        certificate_chain=_read_pem("tls_cert", options.tls_cert),
    )


def _read_pem(field: str, path: str | Path | None) -> bytes | None:
    if path is None:
        return None
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise InvalidArgumentError(field, str(path), f"a file that can be read ({error.strerror})") from None
    if b"-----BEGIN " not in data:
        raise InvalidArgumentError(field, str(path), "a PEM file")
    return data
