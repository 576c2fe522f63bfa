"""Large binary files that are whole or absent, compressed where their name asks for it."""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, cast

from headway import files

COMPRESSION = 3  # of gzip: more costs more time than it saves room


@contextmanager
def packed_file_written_whole(path: Path) -> Iterator[IO[bytes]]:
    """Yield a file that takes its name only when the block ends well; compressed for names in .gz."""
    with files.file_written_whole(path) as file:
        if path.suffix == ".gz":
            with gzip.GzipFile("", "wb", COMPRESSION, file, mtime=0) as compressed:
                yield cast(IO[bytes], compressed)
        else:
            yield file
