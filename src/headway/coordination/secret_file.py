"""The file that holds the secret of a job: one line, readable by its owner only."""

from __future__ import annotations

import logging
import os
import secrets
import stat
from contextlib import suppress
from pathlib import Path

from headway import files
from headway.errors import UserError

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
