"""``headway import`` and what follows it, as people call them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.interop.readers.kineto_documents import document, job_events

from headway.cli.main import run
from headway.interop.readers.importing import Imported

KINETO = Path(__file__).parents[1] / "interop" / "readers" / "fixtures" / "kineto"
EVIL = "<script>alert(1)<script>[bold red]x[]\x1b[31m\u202e*_|`@all"


@pytest.fixture
def recordings(tmp_path: Path) -> Path:
    folder = tmp_path / "in"
    folder.mkdir()
    for path in KINETO.glob("rank*.gz"):
        shutil.copy(path, folder)
    return folder


def test_the_first_line_answers(recordings: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    (recordings / "notes.txt").write_text("mine")
    assert run(["import", str(recordings), "-o", str(out)]) == 0
    said = capsys.readouterr()
    lines = said.out.splitlines()
    assert lines[0] == f"Imported 3 steps of 2 of 2 ranks (pytorch) into {out}; next: headway diagnose {out}"
    assert lines[1].startswith("Note: Collectives have no sequence numbers")
    assert lines[-1] == f"Left out, of unknown format: 1 file ({recordings / 'notes.txt'})"
    assert said.err == ""


def test_nothing_but_the_answer_where_stderr_is_no_terminal(recordings: Path, tmp_path: Path) -> None:
    """In a process of its own: progress is drawn by who holds the terminal."""
    code = "import sys; from headway.cli.main import main; main(sys.argv[1:])"
    command = [sys.executable, "-c", code, "import", str(recordings), "-o", str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.startswith(b"Imported 3 steps")


def test_json_is_one_document(recordings: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    (recordings / "notes.txt").write_text("mine")
    assert run(["import", str(recordings), "-o", str(out), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert set(said) == {
        "headway", "kind", "path", "framework", "world_size", "ranks", "servers", "steps", "formats", "left_out",
        "dropped_events", "notes",
    }  # fmt: skip
    assert (said["kind"], said["path"], said["framework"]) == ("import", str(out), "pytorch")
    assert (said["world_size"], said["ranks"], said["servers"], said["steps"]) == (2, [0, 1], [], [2, 3, 4])
    assert (said["formats"], said["dropped_events"]) == ({"kineto": 2}, 0)
    assert said["left_out"] == [str(recordings / "notes.txt")]
    assert said["notes"] == json.loads((out / "manifest.json").read_text())["notes"]


def test_refusals_are_one_line_and_status_2(
    recordings: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    taken = tmp_path / "taken"
    taken.write_text("mine")
    (tmp_path / "empty").mkdir()
    (tmp_path / "notes.txt").write_text("mine")
    for arguments, complaint in (
        ([str(recordings), "-o", str(taken)], "the output already exists"),
        ([str(recordings), "-o", str(taken / "below")], "cannot be written"),
        ([str(tmp_path / "no"), "-o", str(tmp_path / "new")], "nothing to import"),
        ([str(tmp_path / "empty"), "-o", str(tmp_path / "new")], "contains no file"),
        ([str(tmp_path / "notes.txt"), "-o", str(tmp_path / "new")], "no file of a known format"),
        (
            [str(recordings), "-o", str(tmp_path / "new"), "--format", "etl"],
            "no such format; got etl; expected auto, f",
        ),
        ([str(recordings), "-o", str(tmp_path / "new"), "--format", "chakra"], "rank0.json.gz"),
        ([str(recordings), "-o", str(tmp_path / ("n" * 300))], "cannot be written"),
        ([str(recordings)], "Missing option"),
    ):
        assert run(["import", *arguments]) == 2, arguments
        said = capsys.readouterr()
        (line,) = said.err.strip().splitlines()
        assert line.startswith("headway: ")
        assert complaint in line
        assert said.out == ""
    assert taken.read_text() == "mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "in", "notes.txt", "taken"]


def test_without_the_library_that_decodes(
    recordings: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "msgspec", None)
    assert run(["import", str(recordings), "-o", str(tmp_path / "out")]) == 2
    assert "pip install 'msgspec" in capsys.readouterr().err


def test_many_notes_are_not_all_shown(
    recordings: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from headway.interop.readers import importing

    imported = importing.import_trace

    def chatty(*arguments: Any, **options: Any) -> Imported:
        done = imported(*arguments, **options)
        notes = tuple(f"note {number}" for number in range(25))
        return Imported(done.manifest.model_copy(update={"notes": notes}), done.formats, done.left_out)

    monkeypatch.setattr(importing, "import_trace", chatty)
    assert run(["import", str(recordings), "-o", str(tmp_path / "out")]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "and 5 more notes (--json lists all)"


def test_an_imported_trace_is_replayed_as_it_was_recorded_and_takes_no_plan(
    recordings: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, whole = str(tmp_path / "one"), str(tmp_path / "out")
    assert run(["import", str(recordings / "rank0.json.gz"), "-o", one]) == 0
    assert run(["import", str(recordings), "-o", whole]) == 0
    capsys.readouterr()
    for trace, lacking in ((whole, 1), (one, 2)):
        assert run(["replay", trace, "--what-if", "bandwidth=0.5x", "--json"]) == 0
        document = json.loads(capsys.readouterr().out)
        assert len(document["notes"]) == lacking
        assert document["step_ms"] > document["reproduced_step_ms"]
        assert document["peak_bytes"] == {"0": None, "1": None}
    assert run(["replay", one]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "Note: The trace has no parameter names" in said
    assert "Note: Only 1 of 2 ranks were recorded" in said
    assert run(["optimize", whole]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.startswith("headway: no plan can be applied to a trace without parameter names")


@pytest.fixture
def hostile(tmp_path: Path) -> Path:
    """Two ranks whose names of files, hosts, groups and operators are written to harm who looks at them."""
    folder = tmp_path / "hostile"
    folder.mkdir()
    for rank in range(2):
        events = job_events(late_us=3000 * rank)
        for event in events:
            event["name"] += EVIL if event["name"].startswith("aten") else ""
        told = {"backend": EVIL, "pg_config": [{"pg_name": EVIL, "ranks": [0, 1]}]}
        data = document(events, rank=rank, host_name=f"host{rank}{EVIL}", distributed=told)
        (folder / f"rank{rank}{EVIL}.json").write_bytes(data)
        (folder / f"again{rank}{EVIL}.json").write_bytes(data[:-9])
    (folder / f"notes{EVIL}").write_text("mine")
    (folder / os.fsdecode(b"\xff\xfe.txt")).write_text("mine")
    return folder


def harmless(text: str, *, data: bool = False) -> None:
    """No control characters but ends of lines; ``data`` may hold marks of direction, which JSON does not escape."""
    assert [one for one in text if ord(one) < 32 and one != "\n"] == []
    assert data or "\u202e" not in text


def test_names_cannot_harm_who_reads_them(
    hostile: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = str(tmp_path / "trace")
    assert run(["import", str(hostile), "-o", str(tmp_path / "strict")]) == 2
    harmless(capsys.readouterr().err)
    assert run(["import", str(hostile), "-o", trace, "--lenient"]) == 0
    said = capsys.readouterr()
    harmless(said.out + said.err)
    assert "2 recordings claim rank" in said.out
    assert "again0<script>" in said.out
    assert "[bold red]" in said.out  # as it is, no markup
    assert run(["import", str(hostile), "-o", str(tmp_path / "json"), "--lenient", "--json"]) == 0
    text = capsys.readouterr().out
    harmless(text, data=True)
    assert any(EVIL in name for name in json.loads(text)["left_out"])
    for options in ([], ["--markdown"], ["--json"], ["--html", str(tmp_path / "page.html")]):
        assert run(["diagnose", trace, *options]) == 0
        said = capsys.readouterr()
        harmless(said.out + said.err, data="--json" in options)
        if "--markdown" in options:
            assert "<script>" not in said.out.replace("\\<script\\>", "")
            assert "@all" not in said.out
    page = (tmp_path / "page.html").read_text()
    assert "alert(1)" in page
    assert "<script>alert" not in page
    assert not [one for one in page if ord(one) < 32 and one not in "\n\r\t"]
    assert run(["export", trace, "--to", "chakra", "-o", str(tmp_path / "chakra")]) == 0
    said = capsys.readouterr()
    harmless(said.out + said.err)
