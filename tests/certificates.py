"""Certificates for tests of TLS: an authority, a server at localhost and a client, good for an hour."""

from __future__ import annotations

import datetime
import ipaddress
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID


@dataclass(frozen=True, slots=True)
class Certificates:
    """PEM files."""

    ca: Path
    server_cert: Path
    server_key: Path
    client_cert: Path
    client_key: Path


def make_certificates(directory: Path) -> Certificates:
    """Write new ones to `directory`."""
    ca_key = ec.generate_private_key(ec.SECP256R1())
    ca_cert = _sign("test authority", ca_key.public_key(), None, ca_key)
    paths = {"ca": directory / "ca.pem"}
    paths["ca"].write_bytes(ca_cert.public_bytes(serialization.Encoding.PEM))
    for name in ("server", "client"):
        key = ec.generate_private_key(ec.SECP256R1())
        cert = _sign(f"test {name}", key.public_key(), ca_cert, ca_key)
        paths[f"{name}_cert"] = directory / f"{name}.pem"
        paths[f"{name}_cert"].write_bytes(cert.public_bytes(serialization.Encoding.PEM))
        paths[f"{name}_key"] = directory / f"{name}.key"
        paths[f"{name}_key"].write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
        )
    return Certificates(**paths)


def _sign(
    name: str, key: ec.EllipticCurvePublicKey, issuer: x509.Certificate | None, issuer_key: ec.EllipticCurvePrivateKey
) -> x509.Certificate:
    """`issuer` None: signed by itself, an authority."""
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.UTC)
    names = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject if issuer is None else issuer.subject)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(minutes=5))
        .not_valid_after(now + datetime.timedelta(hours=1))
        .add_extension(x509.BasicConstraints(ca=issuer is None, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .sign(issuer_key, hashes.SHA256())
    )
