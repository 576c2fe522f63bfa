"""What is found in archives, which are made here, and what of them is refused."""

from __future__ import annotations

import gzip
import io
import random
import struct
import tarfile
import zipfile
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.exhaustive import examples
from tests.interop.readers.damaging import damaged_bytes, refused
from tests.interop.readers.storing import found_in, refusal, special, tar_of, zip_of

from headway.interop.readers import document
from headway.interop.readers.document import Sources, head_of, read_document

MEMBERS: list[tuple[Any, bytes]] = [
    ("ranks/rank0.json", b"zero" * 99),
    ("ranks/rank10.json", b"ten"),
    ("rank2.gz", b""),
]


@pytest.mark.parametrize("kind", ["a.zip", "a.tar", "a.tar.gz", "A.TGZ"])
def test_archives_hold_documents(tmp_path: Path, kind: str) -> None:
    members = [*MEMBERS[:2], ("rank2.gz", gzip.compress(b"two" * 99))]
    random.Random(7).shuffle(members)
    path = tmp_path / kind
    if kind.endswith(".zip"):
        zip_of(path, members)
    else:
        tar_of(path, [(special("ranks", tarfile.DIRTYPE), b""), *members], "w" if kind == "a.tar" else "w:gz")
    data, left_out = found_in(path)
    assert list(data.items()) == [
        ("rank2.gz", b"two" * 99), ("ranks/rank0.json", b"zero" * 99), ("ranks/rank10.json", b"ten"),
    ]  # fmt: skip
    assert not left_out


CLIMBING = [
    "../out",
    "a/../../out",
    "/etc/passwd",
    "C:\\out",
    "c:/out",
    "..\\out",
    "\\\\host\\share",
    "a\\..\\..\\b",
]


@pytest.mark.parametrize("name", CLIMBING)
@pytest.mark.parametrize("kind", ["zip", "tar"])
def test_members_that_climb_out(tmp_path: Path, name: str, kind: str) -> None:
    members: list[tuple[Any, bytes]] = [("good", b"good"), (name, b"bad")]
    path = (zip_of if kind == "zip" else tar_of)(tmp_path / f"a.{kind}", members)
    assert "has a member that would unpack outside the archive's folder" in refusal(path)
    data, (said,) = found_in(path, lenient=True)
    assert data == {"good": b"good"}
    assert "would unpack outside" in said
    assert document.shown(name).replace("\\", "/").split("/")[-1] in said.replace("\\", "/")


def test_members_that_are_no_files(tmp_path: Path) -> None:
    kinds = {
        "symbolic": special("symbolic", tarfile.SYMTYPE, "/etc/passwd"),
        "hard": special("hard", tarfile.LNKTYPE, "good"),
        "device": special("device", tarfile.CHRTYPE), "pipe": special("pipe", tarfile.FIFOTYPE),
    }  # fmt: skip
    for name, info in kinds.items():
        path = tar_of(tmp_path / f"{name}.tar", [("good", b"good"), (info, b"")])
        assert f"is not a regular file; got {name}" in refusal(path)
        data, (said,) = found_in(path, lenient=True)
        assert (data, "not a regular file" in said) == ({"good": b"good"}, True)
    link = zipfile.ZipInfo("symbolic")
    link.external_attr = 0o120777 << 16
    path = zip_of(tmp_path / "link.zip", [("good", b"good"), (link, b"/etc/passwd")])
    assert "is not a regular file; got symbolic" in refusal(path)
    assert found_in(path, lenient=True)[0] == {"good": b"good"}


def test_a_zip_with_a_member_without_a_name(tmp_path: Path) -> None:
    path = zip_of(tmp_path / "a.zip", [("rank0", b"data")])
    path.write_bytes(path.read_bytes().replace(b"rank0", b"\0ank0"))  # names end at the first zero
    assert "a.zip is damaged" in refusal(path)


def test_members_of_a_zip_that_share_their_bytes_are_refused(tmp_path: Path) -> None:
    path = zip_of(tmp_path / "a.zip", [("r", bytes(2**20))])
    data = path.read_bytes()
    begin = data.index(b"PK\x01\x02")
    entry, end = data[begin : data.index(b"PK\x05\x06")], data[data.index(b"PK\x05\x06") :]
    count = 60
    ends = end[:8] + struct.pack("<HHL", count, count, count * len(entry)) + end[16:]
    path.write_bytes(data[:begin] + entry * count + ends)
    assert "its members overlap" in refusal(path)


@pytest.mark.parametrize("kind", ["tar", "tgz"])
def test_tars_that_are_larger_inside(tmp_path: Path, kind: str) -> None:
    mode = "w:gz" if kind == "tgz" else "w"
    huge = special("rank0.json", tarfile.REGTYPE)
    huge.size = 10**12
    sparse = special("rank0.json", tarfile.REGTYPE)
    sparse.pax_headers = {
        "GNU.sparse.size": str(10**13), "GNU.sparse.numblocks": "1", "GNU.sparse.map": "0,1",
        "GNU.sparse.realsize": str(10**13), "GNU.sparse.name": "rank0.json",
    }  # fmt: skip
    small = special("rank0.json", tarfile.REGTYPE)
    small.pax_headers = {"GNU.sparse.size": "50000000", "GNU.sparse.map": "0,1"}
    long_name = special("x" * 300, tarfile.REGTYPE)
    long_name.pax_headers = {"comment": "1" * 40_000_000}
    for number, (info, data, complaint) in enumerate(
        [
            (huge, b"x", "too large when unpacked"), (sparse, b"x", "too large when unpacked"),
            (small, b"x", "is not a regular file"), (long_name, b"x", "a header is too long"),
        ]
    ):  # fmt: skip
        path = tmp_path / f"{number}.{kind}"
        with tarfile.open(path, mode, format=tarfile.PAX_FORMAT) as archive:  # type: ignore[call-overload]
            if info is huge:
                archive.fileobj.write(info.tobuf() + data)
            else:
                info.size = len(data)
                archive.addfile(info, io.BytesIO(data))
        assert complaint in refusal(path), number
        if info is huge:
            assert complaint in refusal(path, lenient=True)


def test_headers_of_tars_that_never_end(tmp_path: Path) -> None:
    for number, body in enumerate([b"1" * 30_000, b"9" * 40 + b" path=x\n"]):
        header = special("a", tarfile.XHDTYPE)
        header.size = len(body)
        block = header.tobuf() + body + bytes(-len(body) % 512)
        path = tmp_path / f"{number}.tar"
        path.write_bytes(block * 300 + tarfile.TarInfo("rank0.json").tobuf() + bytes(1024))
        assert "is damaged" in refusal(path)
    negative = bytearray(tarfile.TarInfo("rank0.json").tobuf())
    negative[124:136] = b"\xff" * 10 + b"\xfc\x00"
    negative[148:156] = b"%06o\0 " % (sum(negative[:148]) + sum(negative[156:]) + 8 * 32)
    path = tmp_path / "negative.tar"
    path.write_bytes(tarfile.TarInfo("a").tobuf() + bytes(negative) + bytes(1024))
    assert "damaged" in refusal(path)


def test_truncated_archives_are_refused_or_read_as_far_as_they_go(tmp_path: Path) -> None:
    members: list[tuple[Any, bytes]] = [
        (f"rank{rank}", random.Random(rank).randbytes(5000)) for rank in range(4)
    ]
    for name, mode, cut in (("a.tar", "w", 13_000), ("a.tgz", "w:gz", 12_000), ("b.tar", "w", 5632)):
        path = tar_of(tmp_path / name, members, mode)
        whole = path.read_bytes()
        path.write_bytes(whole[:cut])
        if name != "b.tar":  # which ends where a member does
            assert "is damaged" in refusal(path)
        data, left_out = found_in(path, lenient=True)
        assert data["rank0"] == members[0][1]
        assert len(data) < 4
        assert bool(left_out) == (name != "b.tar")
        assert all(one.startswith(dict(members)[rank][:400]) for rank, one in data.items())
    spoilt = bytearray(whole)
    spoilt[2 * 5632 + 100] ^= 0xFF  # the header of the third
    path.write_bytes(spoilt)
    assert "no member begins at byte 11264" in refusal(path)
    assert list(found_in(path, lenient=True)[0]) == ["rank0", "rank1"]
    path = zip_of(tmp_path / "a.zip", members)
    path.write_bytes(path.read_bytes()[:-50])
    assert "is damaged" in refusal(path)
    assert "contains no readable file; left out: " in refusal(path, lenient=True)


def test_a_member_of_a_zip_whose_checksum_is_wrong(tmp_path: Path) -> None:
    data = random.Random(1).randbytes(200_000)
    path = zip_of(tmp_path / "a.zip", [("rank0", data)], zipfile.ZIP_STORED)
    stored = bytearray(path.read_bytes())
    stored[150_000] ^= 0xFF
    path.write_bytes(stored)
    with Sources(path) as sources:
        read = read_document(sources.find()[0])
    assert "Bad CRC-32" in read.ending
    assert read.data[:140_000] == data[:140_000]


def test_too_many_files_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(document, "MAX_DOCUMENTS", 3)
    path = tar_of(tmp_path / "a.tar", [(f"r{rank}", b"x") for rank in range(4)])
    assert "too many files; got more than 3" in refusal(path)
    (tmp_path / "folder").mkdir()
    for rank in range(4):
        (tmp_path / "folder" / f"{rank}").write_bytes(b"x")
    assert "too many files" in refusal(tmp_path / "folder")


ZIPPED, TARRED = io.BytesIO(), io.BytesIO()
with zipfile.ZipFile(ZIPPED, "w", zipfile.ZIP_DEFLATED) as _archive:
    _archive.writestr(zipfile.ZipInfo("rank0.json"), "zero" * 50, zipfile.ZIP_DEFLATED)
    _archive.writestr(zipfile.ZipInfo("ranks/rank1.json.gz"), gzip.compress(b"one" * 50, mtime=0))
with tarfile.open(fileobj=TARRED, mode="w:gz", format=tarfile.PAX_FORMAT) as _tar:
    for _name in ("rank0.json", "n" * 200):
        _info = tarfile.TarInfo(_name)
        _info.size = 300
        _tar.addfile(_info, io.BytesIO(b"x" * 300))


def everything(path: Path, lenient: bool) -> None:
    with Sources(path, lenient=lenient) as sources:
        for one in sources.find():
            head_of(one)
            read_document(one, lenient=lenient)


@settings(max_examples=examples(300))
@given(st.data())
def test_damaged_archives_are_refused_and_nothing_else_escapes(
    tmp_path_factory: pytest.TempPathFactory, draw: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("a")
    ending, stored = draw.draw(
        st.sampled_from([
            (".zip", ZIPPED.getvalue()), (".tgz", TARRED.getvalue()), (".tar", gzip.decompress(TARRED.getvalue())),
            (".gz", gzip.compress(b"document" * 99, mtime=0)),
        ])
    )  # fmt: skip
    path = folder / f"a{ending}"
    path.write_bytes(damaged_bytes(draw, stored))
    for lenient in (False, True):
        assert len(refused(partial(everything, path, lenient)).splitlines()) <= 1
