from __future__ import annotations

import pytest

from headway.lab.session import LONGEST_LINE_BYTES, Lines, printer


def test_lines_are_whole_whatever_the_pieces() -> None:
    lines = Lines()
    assert lines.feed(b"on") == []
    assert lines.feed(b"e\ntwo\nth") == ["one", "two"]
    assert lines.feed("é\n".encode()[:2]) == []
    assert lines.feed(b"\n") == ["thé"]
    assert lines.end() == []


def test_a_last_line_without_end_is_kept_and_bad_bytes_are_shown() -> None:
    lines = Lines()
    assert lines.feed(b"a\xff") == []
    assert lines.end() == ["a\ufffd"]


def test_a_line_without_end_is_bounded() -> None:
    (line,) = Lines().feed(b"x" * (LONGEST_LINE_BYTES + 1))
    assert len(line) == LONGEST_LINE_BYTES + 1


def test_printing(capsys: pytest.CaptureFixture[str]) -> None:
    printer(prefix=True)(1, "stdout", "hello")
    printer(prefix=False)(1, "stderr", "bare")
    assert capsys.readouterr() == ("[rank 1] hello\n", "bare\n")
