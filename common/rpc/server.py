"""The gRPC server that every service of ours starts with: its limits, its address, TLS and keys."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc
import grpc.aio

from common.errors import InvalidArgumentError
from common.rpc.interceptors import OPEN_METHODS, BearerKeyInterceptor, ErrorInterceptor

DEFAULT_MAX_MESSAGE_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """What peers may ask of a server."""

    max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES
    max_connections: int = 1024
    max_concurrent_streams: int = 4096
    """Calls of one connection at the same time."""
    max_concurrent_calls: int | None = None
    """Of all connections together; one more is refused with RESOURCE_EXHAUSTED."""


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files of a server; with `client_ca` it asks clients for a certificate (mutual TLS)."""

    cert: Path
    key: Path
    client_ca: Path | None = None


def build_server(
    limits: ServerLimits, *, api_keys: Sequence[str] = (), open_methods: Sequence[str] = OPEN_METHODS
) -> grpc.aio.Server:
    """A server with our interceptors that listens nowhere yet.

    Args:
        limits: of messages, connections and calls.
        api_keys: calls need one of them, if there are any.
        open_methods: beginnings of method paths that need no key.
    """
    interceptors: list[grpc.aio.ServerInterceptor] = []
    if api_keys:
        interceptors.append(BearerKeyInterceptor(api_keys, open_methods))
    interceptors.append(ErrorInterceptor())
    options = [
        # Without this two servers share a port in silence, and each gets some of the connections.
        ("grpc.so_reuseport", 0),
        ("grpc.max_receive_message_length", limits.max_message_bytes),
        ("grpc.max_send_message_length", limits.max_message_bytes),
        ("grpc.max_concurrent_streams", limits.max_concurrent_streams),
        ("grpc.max_allowed_incoming_connections", limits.max_connections),
        ("grpc.max_metadata_size", 16 << 10),
        # Routers ping idle workers; by default the server would answer the third ping with a disconnect.
        ("grpc.http2.max_ping_strikes", 0),
        ("grpc.http2.min_ping_interval_without_data_ms", 5000),
        ("grpc.keepalive_permit_without_calls", 1),
        # A peer that vanished without a word is noticed, and what it asked for is dropped.
        ("grpc.keepalive_time_ms", 20_000),
        ("grpc.keepalive_timeout_ms", 10_000),
    ]
    return grpc.aio.server(
        interceptors=interceptors, options=options, maximum_concurrent_rpcs=limits.max_concurrent_calls
    )


def listen_tcp(server: grpc.aio.Server, host: str, port: int, tls: TlsFiles | None = None) -> int:
    """Bind a TCP port; returns the real one where `port` is 0.

    Raises:
        InvalidArgumentError: the address cannot be bound, or a TLS file cannot be read or used.
    """
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    check_free(host, port)
    try:
        if tls is None:
            bound = server.add_insecure_port(address)
        else:
            bound = server.add_secure_port(address, _credentials(tls))
    except RuntimeError as error:
        raise InvalidArgumentError("port", address, f"an address that can be bound ({error})") from None
    if bound == 0:
        raise InvalidArgumentError("port", address, "an address that can be bound, and TLS files that fit together")
    return bound


def listen_uds(server: grpc.aio.Server, path: Path) -> None:
    """Bind a Unix socket. A socket that a dead process left behind is removed first.

    Raises:
        InvalidArgumentError: the path is in use or cannot be bound.
    """
    if path.exists():
        if not stat.S_ISSOCK(path.stat().st_mode):
            raise InvalidArgumentError("uds", str(path), "a path that is free; this is no socket")
        with socket.socket(socket.AF_UNIX) as probe:
            probe.settimeout(1.0)
            try:
                probe.connect(os.fspath(path))
            except (ConnectionRefusedError, TimeoutError):
                path.unlink(missing_ok=True)
            else:
                raise InvalidArgumentError("uds", str(path), "a path that no other process listens on")
    try:
        bound = server.add_insecure_port(f"unix:{path}")
    except RuntimeError as error:
        raise InvalidArgumentError("uds", str(path), f"a path that can be bound ({error})") from None
    if bound == 0:
        raise InvalidArgumentError("uds", str(path), "a path that can be bound")


def read_api_keys(path: Path) -> list[str]:
    """Keys of a file, one a line; empty lines and lines that begin with # do not count.

    Raises:
        InvalidArgumentError: it cannot be read, or has no keys.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgumentError("api_key_file", str(path), f"a file that can be read ({error})") from None
    keys = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
    if not keys:
        raise InvalidArgumentError("api_key_file", str(path), "a file with at least one key")
    return keys


def check_free(host: str, port: int) -> None:
    """Say plainly that a port is taken: gRPC's own message names a source file and an errno."""
    if port == 0:
        return
    try:
        infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise InvalidArgumentError("host", host, f"a name or address of this machine ({error.strerror})") from None
    for family, kind, protocol, _, address in infos[:1]:
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(address)
            except OSError as error:
                expected = f"an address that can be bound ({error.strerror})"
                raise InvalidArgumentError("port", f"{host}:{port}", expected) from None


def _credentials(tls: TlsFiles) -> grpc.ServerCredentials:
    key, cert = _read_pem("tls_key", tls.key), _read_pem("tls_cert", tls.cert)
    client_ca = None if tls.client_ca is None else _read_pem("tls_client_ca", tls.client_ca)
    return grpc.ssl_server_credentials([(key, cert)], client_ca, require_client_auth=client_ca is not None)


def _read_pem(field: str, path: Path) -> bytes:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise InvalidArgumentError(field, str(path), f"a file that can be read ({error.strerror})") from None
    if b"-----BEGIN " not in data:
        raise InvalidArgumentError(field, str(path), "a PEM file")
    return data
