"""Archives made for tests, and what is found in files, folders and archives."""

from __future__ import annotations

import io
import tarfile
import time
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headway.errors import TraceError
from headway.interop.readers.document import Sources, head_of, read_document
from headway.interop.readers.formats import SNIFFED_BYTES

LIMIT_S, LIMIT_BYTES = 30, 400 * 2**20  # far above what any of this takes, far below what a bomb would


def found_in(source: Path, *, lenient: bool = False) -> tuple[dict[str, bytes], list[str]]:
    """What is in ``source``, by names relative to it, and what was left out."""
    with Sources(source, lenient=lenient) as sources:
        found = sources.find()
        data = {}
        for one in found:
            name = one.name.removeprefix(f"{source}").lstrip("/:")
            read = read_document(one, lenient=lenient)
            assert (read.name, read.lenient) == (one.name, lenient)
            assert head_of(one) == read.data[:SNIFFED_BYTES]
            data[name] = read.data + (f"!{read.ending}".encode() if read.ending else b"")
        return data, sources.left_out


def bounded(act: Callable[[], Any]) -> Any:
    """What ``act`` comes to, within bounds of memory and time."""
    tracemalloc.start()
    begin = time.process_time()
    try:
        return act()
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < LIMIT_BYTES
        assert time.process_time() - begin < LIMIT_S


def refusal(source: Path, *, lenient: bool = False) -> str:
    """The one line with which ``source`` is refused."""
    with pytest.raises(TraceError) as refused:
        bounded(lambda: found_in(source, lenient=lenient))
    assert "\n" not in str(refused.value)
    return str(refused.value)


def tar_of(path: Path, members: list[tuple[tarfile.TarInfo | str, bytes]], mode: str = "w") -> Path:
    with tarfile.open(path, mode) as archive:  # type: ignore[call-overload]
        for one, data in members:
            info = tarfile.TarInfo(one) if isinstance(one, str) else one
            info.size = info.size or len(data)
            archive.addfile(info, io.BytesIO(data))
    return path


def zip_of(
    path: Path, members: list[tuple[zipfile.ZipInfo | str, bytes]], packed: int = zipfile.ZIP_DEFLATED
) -> Path:
    with zipfile.ZipFile(path, "w", packed) as archive:
        for one, data in members:
            archive.writestr(one, data, packed)
    return path


def special(name: str, kind: bytes, link: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, link
    return info
