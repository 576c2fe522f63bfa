"""Large binary files that are whole or absent."""

from __future__ import annotations

import gzip
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, cast

from headway.errors import UserError

COMPRESSION = 3  # of gzip: more costs more time than it saves room


@contextmanager
def binary_file_written_whole(path: Path, error: type[UserError] = UserError) -> Iterator[IO[bytes]]:
    """Yield a file beside ``path`` that takes its name only when the block ends well; compressed for names in .gz."""
    try:
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "wb") as file:
                if path.suffix == ".gz":
                    with gzip.GzipFile("", "wb", COMPRESSION, file, mtime=0) as compressed:
                        yield cast(IO[bytes], compressed)
                else:
                    yield file
            Path(name).chmod(0o644)
            Path(name).replace(path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
    except OSError as failure:
        raise error(
            f"{path} cannot be written", got=failure.strerror, fix="Check the folder and its rights."
        ) from None
