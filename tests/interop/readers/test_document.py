"""What is found in files and folders, and what of it is refused."""

from __future__ import annotations

import gzip
import os
import random
from pathlib import Path
from typing import IO, Any

import pytest
from tests.interop.readers.storing import bounded, found_in, refusal, zip_of

from headway.errors import TraceError
from headway.interop.readers.document import Found, Sources, head_of, read_document, shown
from headway.trace.rank_columns import SMALL_BYTES


def test_a_file_plain_and_compressed(tmp_path: Path) -> None:
    data = os.urandom(100) * 5000
    for name, stored in (
        ("plain", data),
        ("one.gz", gzip.compress(data)),
        ("several.gz", gzip.compress(data[:7]) + gzip.compress(b"") + gzip.compress(data[7:]) + bytes(5000)),
        ("compressed without the ending", gzip.compress(data)),
    ):
        path = tmp_path / name
        path.write_bytes(stored)
        assert found_in(path) == ({"": data}, [])


def test_a_folder_with_folders_without_what_is_hidden_in_the_order_of_numbers(tmp_path: Path) -> None:
    for name in (
        "rank10.json",
        "rank9.json",
        "b/c/deep.json",
        ".hidden.json",
        ".git/config",
        "a/b.gz",
        "empty",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(
            gzip.compress(b"packed") if name.endswith(".gz") else name[:-2].encode()
        )
    (tmp_path / "empty").write_bytes(b"")
    (tmp_path / "b" / "c" / "up").symlink_to(tmp_path)
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "gone").symlink_to(tmp_path / "nowhere")
    os.mkfifo(tmp_path / "pipe")  # which nobody writes to
    data, left_out = found_in(tmp_path)
    assert list(data) == ["a/b.gz", "b/c/deep.json", "empty", "rank9.json", "rank10.json"]
    assert data["a/b.gz"] == b"packed"
    assert not left_out


@pytest.mark.parametrize("lenient", [False, True])
def test_what_holds_nothing(tmp_path: Path, lenient: bool) -> None:
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    for name in ("no", "folder", "pipe", "n" * 300):
        assert "nothing to import" in refusal(tmp_path / name, lenient=lenient) or name.startswith("nn")


def test_compressed_bombs_are_refused(tmp_path: Path) -> None:
    zeros = gzip.compress(bytes(SMALL_BYTES), 9)
    (tmp_path / "bomb.gz").write_bytes(zeros + zeros)
    assert "is too large when unpacked" in refusal(tmp_path / "bomb.gz")
    (tmp_path / "streams.gz").write_bytes(gzip.compress(b"") * 200_000)
    assert "more than 100000 compressed streams" in str(found_in_one(tmp_path / "streams.gz"))
    nested = gzip.compress(gzip.compress(bytes(2**28), 9) * 3, 9)
    for name, members in {
        "member.zip": [("rank0.json", bytes(SMALL_BYTES + 1))],
        "nested.zip": [("rank0.json.gz", zeros + zeros)],
        "many.zip": [(f"rank{rank}.json", bytes(2**20)) for rank in range(65)],
    }.items():
        path = zip_of(tmp_path / name, members)  # type: ignore[arg-type]
        assert path.stat().st_size < 2**20
        for lenient in (False, True):
            said = refusal(path, lenient=lenient)
            assert "is too large when unpacked" in said
    (tmp_path / "padding.gz").write_bytes(gzip.compress(b"x") + bytes(30 * 2**20))
    assert bounded(
        lambda: found_in(zip_of(tmp_path / "p.zip", [("p.gz", (tmp_path / "padding.gz").read_bytes())]))
    )
    (tmp_path / "twice.tgz").write_bytes(nested)
    assert refusal(tmp_path / "twice.tgz")


def found_in_one(path: Path) -> str:
    """What is wrong with the end of the one document in ``path``."""
    with Sources(path) as sources:
        (one,) = sources.find()
        return str(bounded(lambda: read_document(one).ending))


def test_truncated_and_damaged_files_say_so_and_keep_their_beginning(tmp_path: Path) -> None:
    data = random.Random(1).randbytes(200_000)
    packed = gzip.compress(data)
    flipped = bytearray(packed)
    flipped[-20] ^= 0xFF
    for name, stored, ending, least in (
        ("a.gz", packed[: len(packed) // 2], "truncated", 90_000), ("b.gz", packed[:-4], "truncated", 200_000),
        ("c.gz", bytes(flipped), "damaged", 199_000), ("d.gz", packed + b"rubbish", "damaged", 200_000),
    ):  # fmt: skip
        (tmp_path / name).write_bytes(stored)
        with Sources(tmp_path / name) as sources:
            (one,) = sources.find()
            read = read_document(one)
        assert ending in read.ending
        assert len(read.data) >= least
        assert read.data[:least] == data[:least]
    for stored in (packed[:5], b"\x1f\x8b\x08rubbish and more"):
        (tmp_path / "nothing.gz").write_bytes(stored)
        with (
            Sources(tmp_path / "nothing.gz") as sources,
            pytest.raises(TraceError, match=r"nothing.gz cannot be read"),
        ):
            head_of(sources.find()[0])


@pytest.mark.parametrize(
    "failure",
    [PermissionError(13, "Permission denied"), RuntimeError("it is encrypted"), NotImplementedError("method 9"),
     OverflowError("too far"), ValueError("a name"), EOFError()],
)  # fmt: skip
def test_what_cannot_be_opened(failure: Exception) -> None:
    def refuse() -> IO[bytes]:
        raise failure

    for read in (head_of, read_document):
        with pytest.raises(TraceError, match=r"rank0\.json cannot be read; got \w"):
            read(Found("rank0.json", 10, refuse))


def test_folders_that_cannot_be_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "locked").mkdir()
    (tmp_path / "rank0").write_bytes(b"x")
    listed = os.scandir

    def scandir(path: Any) -> Any:
        if str(path).endswith("locked"):
            raise PermissionError(13, "Permission denied", str(path))
        return listed(path)

    monkeypatch.setattr(os, "scandir", scandir)
    assert "cannot be read; got Permission denied" in refusal(tmp_path)
    data, (said,) = found_in(tmp_path, lenient=True)
    assert data == {"rank0": b"x"}
    assert said.endswith("locked cannot be read: Permission denied.")


def test_names_that_are_no_text(tmp_path: Path) -> None:
    path = tmp_path / os.fsdecode(b"rank\xff0")
    path.write_bytes(b"x")
    with Sources(tmp_path) as sources:
        (one,) = sources.find()
        assert one.name.endswith(r"rank\udcff0")
        assert read_document(one).data == b"x"
    assert shown("r\u00e4nk") == "r\u00e4nk"
