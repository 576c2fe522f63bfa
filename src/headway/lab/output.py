"""Ranks' output, line by line."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Literal

LONGEST_LINE_BYTES = 2**20
Stream = Literal["stdout", "stderr"]
OnLine = Callable[[int, Stream, str], None]


class Lines:
    """Cuts a stream of bytes into lines; a line without end is cut at 1 MiB."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def feed(self, data: bytes) -> list[str]:
        """Take ``data``; returns the lines that are now whole, without their ends."""
        self._rest += data
        *whole, rest = self._rest.split(b"\n")
        self._rest = bytearray(rest)
        if len(self._rest) > LONGEST_LINE_BYTES:
            whole.append(self._rest)
            self._rest = bytearray()
        return [_text(line) for line in whole]

    def end(self) -> list[str]:
        """The last line, where it did not end."""
        rest, self._rest = self._rest, bytearray()
        return [_text(rest)] if rest else []


def _text(line: bytes | bytearray) -> str:
    return line.decode("utf-8", errors="replace")


def printer(*, prefix: bool) -> OnLine:
    """Print lines to this process's own stdout and stderr, with ``[rank N]`` before them."""

    def show(rank: int, stream: Stream, line: str) -> None:
        file = sys.stdout if stream == "stdout" else sys.stderr
        file.write(f"[rank {rank}] {line}\n" if prefix else f"{line}\n")
        file.flush()

    return show
