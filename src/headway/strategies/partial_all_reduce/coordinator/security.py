"""Mutual TLS derived from a job's shared secret, and the file that holds the secret."""

from __future__ import annotations

import logging
import os
import secrets
import stat
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from headway import files
from headway.errors import UserError
from headway.strategies.partial_all_reduce.coordinator.transport import SERVER_NAME, missing

if TYPE_CHECKING:
    import grpc
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec


# The order of P-256 (FIPS 186-4, D.1.2.3); a key is one less than it at most.
_ORDER = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551
_KEY_BYTES = 48  # 128 bits more than the order, so that keys are uniform
_PURPOSE = b"headway coordinator: authority of certificates, 1"
# Clocks of hosts differ, and a secret lives as long as its job, so certificates do not expire.
_FROM, _UNTIL = datetime(2000, 1, 1, tzinfo=UTC), datetime(9999, 12, 31, tzinfo=UTC)


# Mutual TLS from a shared secret: the key of a certificate authority (ECDSA on P-256) is derived from the secret with
# HKDF-SHA-256. Each process generates its own key, signs it with the authority's key and discards the latter. So both
# ends prove that they know the secret, traffic is private, and a secret that leaks later does not expose past traffic.


class Identity(NamedTuple):
    """Key and certificate of a process and the authority that it trusts, as PEM."""

    key: bytes
    certificate: bytes
    authority: bytes


def server_credentials(secret: bytes) -> grpc.ServerCredentials:
    """Return credentials of a coordinator. Raises UserError if cryptography is missing."""
    import grpc

    pem = identity(secret, server=True)
    return grpc.ssl_server_credentials([(pem.key, pem.certificate)], pem.authority, require_client_auth=True)


def client_credentials(secret: bytes) -> grpc.ChannelCredentials:
    """Return credentials of a worker. Raises UserError if cryptography is missing."""
    import grpc

    pem = identity(secret, server=False)
    return grpc.ssl_channel_credentials(pem.authority, pem.key, pem.certificate)


def identity(secret: bytes, *, server: bool) -> Identity:
    """Create an identity for one side. Raises UserError if cryptography is missing."""
    try:
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ec
    except ImportError:
        raise missing("cryptography, for a secret,") from None
    authority_key = _authority_key(secret)
    key = ec.generate_private_key(ec.SECP256R1())
    pem = serialization.Encoding.PEM
    return Identity(
        key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()),
        _certificate(key.public_key(), authority_key, server=server).public_bytes(pem),
        _authority(authority_key).public_bytes(pem),
    )


def _authority_key(secret: bytes) -> ec.EllipticCurvePrivateKey:
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    material = HKDF(hashes.SHA256(), _KEY_BYTES, salt=None, info=_PURPOSE).derive(secret)
    return ec.derive_private_key(int.from_bytes(material) % (_ORDER - 1) + 1, ec.SECP256R1())


def _authority(key: ec.EllipticCurvePrivateKey) -> x509.Certificate:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes

    builder = _builder(key.public_key(), _name("headway-authority"))
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    return builder.sign(key, hashes.SHA256())


def _certificate(
    public: ec.EllipticCurvePublicKey, authority_key: ec.EllipticCurvePrivateKey, *, server: bool
) -> x509.Certificate:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.x509.oid import ExtendedKeyUsageOID

    name = SERVER_NAME if server else "headway-worker"
    usage = ExtendedKeyUsageOID.SERVER_AUTH if server else ExtendedKeyUsageOID.CLIENT_AUTH
    builder = _builder(public, _name(name))
    builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
    builder = builder.add_extension(x509.ExtendedKeyUsage([usage]), critical=True)
    builder = builder.add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
    return builder.sign(authority_key, hashes.SHA256())


def _builder(public: ec.EllipticCurvePublicKey, subject: x509.Name) -> x509.CertificateBuilder:
    from cryptography import x509

    builder = x509.CertificateBuilder().subject_name(subject).issuer_name(_name("headway-authority"))
    builder = builder.public_key(public).serial_number(x509.random_serial_number())
    return builder.not_valid_before(_FROM).not_valid_after(_UNTIL)


def _name(text: str) -> x509.Name:
    from cryptography import x509
    from cryptography.x509.oid import NameOID

    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


SECRET_BYTES = 32
MIN_CHARACTERS = 32
"""Weak secrets could be guessed offline."""
MAX_FILE_BYTES = 4096
OWNER_ONLY = 0o600

_log = logging.getLogger("headway")


def new_secret() -> str:
    """Create a secret for one job, as text."""
    return secrets.token_hex(SECRET_BYTES)


def write_secret(path: Path) -> str:
    """Write a new secret to a new file of mode 600. Raises UserError if it exists or cannot be written."""
    secret = new_secret()
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, OWNER_ONLY)
        with os.fdopen(handle, "w") as file:
            file.write(secret + "\n")
    except OSError as failure:
        raise UserError(f"the secret cannot be written to {path}", got=failure.strerror) from None
    return secret


def read_secret(path: Path) -> bytes:
    """Read a secret from a file. Raises UserError if it is missing or too short."""
    secret = files.read_text(path, UserError, "the secret", MAX_FILE_BYTES).strip()
    with suppress(OSError):
        if stat.S_IMODE(path.stat().st_mode) & 0o077:
            _log.warning("the secret in %s is readable by other users: run chmod 600 on it", path)
    return checked_secret(secret, str(path))


def checked_secret(secret: str, where: str) -> bytes:
    """Return ``secret`` as bytes. Raises UserError if it is too short."""
    if len(secret) < MIN_CHARACTERS:
        raise UserError(
            f"the secret in {where} is too short", got=f"{len(secret)} characters",
            expected=f"at least {MIN_CHARACTERS} random characters",
            fix="Create one with: headway coordinate --new-secret FILE.",
        )  # fmt: skip
    return secret.encode()
