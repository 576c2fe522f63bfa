"""TLS from a job's shared secret, and the file that holds it."""

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
_KEY_BYTES = 48  # 128 bits more than the order has, so that every key is as likely as another
_PURPOSE = b"headway coordinator: authority of certificates, 1"
# Clocks of hosts differ, and a secret's life is that of its job: certificates say nothing about time.
_FROM, _UNTIL = datetime(2000, 1, 1, tzinfo=UTC), datetime(9999, 12, 31, tzinfo=UTC)


# TLS from a shared secret: who knows it is an authority of certificates, and trusts those of that authority only.
#
# The authority's key (ECDSA on P-256) is derived from the secret by HKDF-SHA-256; each process draws a key of its own,
# has the authority sign it for its side, and forgets the authority's. So both ends of a TLS connection prove that they
# know the secret, nobody can read or change what they send, and who learns the secret later cannot read what was sent.


class Identity(NamedTuple):
    """What one process shows, and what it trusts, as PEM."""

    key: bytes
    certificate: bytes
    authority: bytes


def server_credentials(secret: bytes) -> grpc.ServerCredentials:
    """Of a coordinator; only workers that know the secret get through. Raises UserError without cryptography."""
    import grpc

    pem = identity(secret, server=True)
    return grpc.ssl_server_credentials([(pem.key, pem.certificate)], pem.authority, require_client_auth=True)


def client_credentials(secret: bytes) -> grpc.ChannelCredentials:
    """Of a worker. Raises UserError without cryptography."""
    import grpc

    pem = identity(secret, server=False)
    return grpc.ssl_channel_credentials(pem.authority, pem.key, pem.certificate)


def identity(secret: bytes, *, server: bool) -> Identity:
    """A new identity of one side. Raises UserError without cryptography."""
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
"""Who talks to either end could try out weak secrets without asking again."""
MAX_FILE_BYTES = 4096
OWNER_ONLY = 0o600

_log = logging.getLogger("headway")


def new_secret() -> str:
    """A secret for one job, as text."""
    return secrets.token_hex(SECRET_BYTES)


def write_secret(path: Path) -> str:
    """Write a new secret into a new file of mode 600. Raises UserError where it cannot be, or there is one."""
    secret = new_secret()
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, OWNER_ONLY)
        with os.fdopen(handle, "w") as file:
            file.write(secret + "\n")
    except OSError as failure:
        raise UserError(f"the secret cannot be written to {path}", got=failure.strerror) from None
    return secret


def read_secret(path: Path) -> bytes:
    """The secret in a file. Raises UserError where there is none, or one that could be guessed."""
    secret = files.read_text(path, UserError, "the secret", MAX_FILE_BYTES).strip()
    with suppress(OSError):
        if stat.S_IMODE(path.stat().st_mode) & 0o077:
            _log.warning("the secret in %s can be read by others: chmod 600 it", path)
    return checked_secret(secret, str(path))


def checked_secret(secret: str, where: str) -> bytes:
    """``secret`` as bytes. Raises UserError where it could be guessed."""
    if len(secret) < MIN_CHARACTERS:
        raise UserError(
            f"the secret in {where} is too short", got=f"{len(secret)} characters",
            expected=f"at least {MIN_CHARACTERS} random ones",
            fix="Write one with: headway coordinate --new-secret FILE.",
        )  # fmt: skip
    return secret.encode()
