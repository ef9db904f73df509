"""Servers as clients see them: keys, TLS, errors as statuses, addresses."""

from __future__ import annotations

import asyncio
import datetime
import ipaddress
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from grpc_health.v1 import health_pb2, health_pb2_grpc

from common.errors import InvalidArgumentError, ResourceExhaustedError
from common.rpc.server import ServerLimits, TlsFiles, build_server, listen_tcp, listen_uds, read_api_keys

UNAUTHENTICATED = grpc.StatusCode.UNAUTHENTICATED
METHOD = "/test.Service/Call"
STREAM = "/test.Service/Stream"


class Handler(grpc.GenericRpcHandler):
    """Methods that do what the request says."""

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        if handler_call_details.method == METHOD:
            return grpc.unary_unary_rpc_method_handler(self.call)  # type: ignore[arg-type]
        if handler_call_details.method == STREAM:
            return grpc.unary_stream_rpc_method_handler(self.stream)  # type: ignore[arg-type]
        return None

    async def call(self, request: bytes, context: Any) -> bytes:
        self._raise(request)
        return request

    async def stream(self, request: bytes, context: Any) -> Any:
        yield b"first"
        self._raise(request)

    def _raise(self, request: bytes) -> None:
        if request == b"argument":
            raise InvalidArgumentError("field", 3, "at most 2")
        if request == b"full":
            raise ResourceExhaustedError("no room")
        if request == b"bug":
            raise KeyError("secret prompt")


def serve(
    client: Callable[[str], Awaitable[None]],
    *,
    api_keys: tuple[str, ...] = (),
    tls: TlsFiles | None = None,
    limits: ServerLimits | None = None,
) -> None:
    """Run `client(address)` against a server."""

    async def run() -> None:
        server = build_server(limits or ServerLimits(), api_keys=api_keys)
        server.add_generic_rpc_handlers((Handler(),))
        health = health_pb2_grpc.HealthServicer()

        async def check(request: Any, context: Any) -> health_pb2.HealthCheckResponse:
            return health_pb2.HealthCheckResponse(status=health_pb2.HealthCheckResponse.SERVING)

        health.Check = check  # type: ignore[method-assign]
        health_pb2_grpc.add_HealthServicer_to_server(health, server)
        port = listen_tcp(server, "127.0.0.1", 0, tls)
        await server.start()
        try:
            async with asyncio.timeout(30):
                await client(f"127.0.0.1:{port}")
        finally:
            await server.stop(None)

    asyncio.run(run())


async def call(channel: grpc.aio.Channel, request: bytes = b"x", *metadata: tuple[str, str]) -> bytes:
    return await channel.unary_unary(METHOD)(request, metadata=metadata, timeout=10)


async def status(channel: grpc.aio.Channel, request: bytes = b"x", *metadata: tuple[str, str]) -> grpc.StatusCode:
    try:
        await call(channel, request, *metadata)
    except grpc.aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK


def test_keys() -> None:
    async def client(address: str) -> None:
        async with grpc.aio.insecure_channel(address) as channel:
            for key in ("one", "two"):
                for scheme in ("Bearer", "bearer"):
                    assert await call(channel, b"x", ("authorization", f"{scheme} {key}")) == b"x"
            for wrong in ("Bearer three", "Bearer ", "Bearer onetwo", "one", "Basic one", ""):
                assert await status(channel, b"x", ("authorization", wrong)) is UNAUTHENTICATED
            assert await status(channel) is UNAUTHENTICATED
            with pytest.raises(grpc.aio.AioRpcError, match="a key is needed"):
                async for _ in channel.unary_stream(STREAM)(b"x", timeout=10):
                    pass
            health: Any = health_pb2_grpc.HealthStub(channel)
            await health.Check(health_pb2.HealthCheckRequest(), timeout=10)

    serve(client, api_keys=("one", "two"))


def test_errors_become_statuses() -> None:
    async def client(address: str) -> None:
        async with grpc.aio.insecure_channel(address) as channel:
            for request, code, words in (
                (b"argument", grpc.StatusCode.INVALID_ARGUMENT, "field = 3: expected at most 2"),
                (b"full", grpc.StatusCode.RESOURCE_EXHAUSTED, "no room"),
                (b"bug", grpc.StatusCode.INTERNAL, "internal error: KeyError"),
            ):
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await call(channel, request)
                assert (caught.value.code(), caught.value.details()) == (code, words)
                stream = channel.unary_stream(STREAM)(request, timeout=10)
                assert await stream.read() == b"first"
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await stream.read()
                assert (caught.value.code(), caught.value.details()) == (code, words)
            assert await call(channel) == b"x"

    serve(client)


def test_message_limit() -> None:
    async def client(address: str) -> None:
        async with grpc.aio.insecure_channel(address) as channel:
            assert await status(channel, bytes(1000)) is grpc.StatusCode.OK
            assert await status(channel, bytes(3000)) is grpc.StatusCode.RESOURCE_EXHAUSTED

    serve(client, limits=ServerLimits(max_message_bytes=2000))


def test_key_file(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("# ours\none\n\n  two  \n")
    assert read_api_keys(path) == ["one", "two"]
    path.write_text("# none\n")
    with pytest.raises(InvalidArgumentError, match="at least one key"):
        read_api_keys(path)
    with pytest.raises(InvalidArgumentError, match="can be read"):
        read_api_keys(tmp_path / "missing")


@dataclass(frozen=True)
class Certificates:
    folder: Path

    def tls(self, *, mutual: bool = False) -> TlsFiles:
        return TlsFiles(
            self.folder / "server.pem", self.folder / "server.key", self.folder / "ca.pem" if mutual else None
        )

    def credentials(self, client: str | None = None, ca: str = "ca") -> grpc.ChannelCredentials:
        read = {name: (self.folder / name).read_bytes() for name in (f"{ca}.pem",)}
        if client is None:
            return grpc.ssl_channel_credentials(read[f"{ca}.pem"])
        key, chain = ((self.folder / f"{client}.{end}").read_bytes() for end in ("key", "pem"))
        return grpc.ssl_channel_credentials(read[f"{ca}.pem"], key, chain)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    """An authority with certificates of a server and a client, and another authority with a client of its own."""
    folder = tmp_path_factory.mktemp("certificates")
    for authority, names in (("ca", ("server", "client")), ("other", ("stranger",))):
        ca_key = ec.generate_private_key(ec.SECP256R1())
        ca = _certificate(authority, ca_key, authority, ca_key, is_authority=True)
        _write(folder / authority, ca, ca_key)
        for name in names:
            key = ec.generate_private_key(ec.SECP256R1())
            _write(folder / name, _certificate(name, key, authority, ca_key), key)
    return Certificates(folder)


def _certificate(
    name: str,
    key: ec.EllipticCurvePrivateKey,
    issuer: str,
    issuer_key: ec.EllipticCurvePrivateKey,
    is_authority: bool = False,
) -> x509.Certificate:
    now = datetime.datetime.now(datetime.UTC)
    hour = datetime.timedelta(hours=1)
    alternatives = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
    return (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]))
        .issuer_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, issuer)]))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - hour)
        .not_valid_after(now + hour)
        .add_extension(x509.SubjectAlternativeName(alternatives), critical=False)
        .add_extension(x509.BasicConstraints(ca=is_authority, path_length=None), critical=True)
        .sign(issuer_key, hashes.SHA256())
    )


def _write(stem: Path, certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> None:
    encoding, plain = serialization.Encoding.PEM, serialization.NoEncryption()
    stem.with_suffix(".pem").write_bytes(certificate.public_bytes(encoding))
    stem.with_suffix(".key").write_bytes(key.private_bytes(encoding, serialization.PrivateFormat.PKCS8, plain))


def test_tls(certificates: Certificates) -> None:
    async def client(address: str) -> None:
        async with grpc.aio.secure_channel(address, certificates.credentials()) as channel:
            assert await call(channel) == b"x"
        for credentials in (certificates.credentials(ca="other"), None):
            channel = (
                grpc.aio.insecure_channel(address)
                if credentials is None
                else grpc.aio.secure_channel(address, credentials)
            )
            async with channel:
                assert await status(channel) is grpc.StatusCode.UNAVAILABLE

    serve(client, tls=certificates.tls())


def test_mutual_tls(certificates: Certificates) -> None:
    async def client(address: str) -> None:
        for name, code in (("client", "OK"), ("stranger", "UNAVAILABLE"), (None, "UNAVAILABLE")):
            async with grpc.aio.secure_channel(address, certificates.credentials(name)) as channel:
                assert (await status(channel)).name == code

    serve(client, tls=certificates.tls(mutual=True))


def test_tls_files_that_do_not_serve(certificates: Certificates, tmp_path: Path) -> None:
    async def run(tls: TlsFiles) -> None:
        server = build_server(ServerLimits())
        try:
            listen_tcp(server, "127.0.0.1", 0, tls)
        finally:
            await server.stop(None)

    good = certificates.tls()
    (tmp_path / "text").write_text("no certificate")
    with pytest.raises(InvalidArgumentError, match=r"tls_key = .*can be read"):
        asyncio.run(run(TlsFiles(good.cert, tmp_path / "missing")))
    with pytest.raises(InvalidArgumentError, match=r"tls_cert = .*a PEM file"):
        asyncio.run(run(TlsFiles(tmp_path / "text", good.key)))


def test_addresses_that_cannot_be_bound(tmp_path: Path) -> None:
    async def run() -> None:
        server = build_server(ServerLimits())
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            with pytest.raises(InvalidArgumentError, match=r"port = .*Address already in use"):
                listen_tcp(server, "127.0.0.1", taken.getsockname()[1])
        with pytest.raises(InvalidArgumentError, match=r"host = 'no.such.host.invalid'"):
            listen_tcp(server, "no.such.host.invalid", 1)
        (tmp_path / "file").write_text("")
        with pytest.raises(InvalidArgumentError, match=r"uds = .*no socket"):
            listen_uds(server, tmp_path / "file")
        with pytest.raises(InvalidArgumentError, match=r"uds = .*can be bound"):
            listen_uds(server, tmp_path / "missing" / "socket")
        await server.stop(None)

    asyncio.run(run())
