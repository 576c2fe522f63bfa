from __future__ import annotations

import json
import os
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest
from pydantic import BaseModel, ConfigDict

from headway import files
from headway.cluster import Cluster
from headway.errors import PlanError, TraceError, UserError


class Small(BaseModel):
    model_config = ConfigDict(extra="forbid")
    count: int


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("count: 1\ncolour: red", "unknown key colour"),
        ("{}", "count is missing"),
        ("count: many", "count"),
        ("count: [", "not valid YAML at line"),
        ("- 1", "not a mapping"),
        ("!!python/object/apply:os.system [true]", "not valid YAML"),
        ("count: 2026-02-30", "not valid YAML"),
        ("count: !!bool maybe", "not valid YAML"),
        ("count: !!int ''", "not valid YAML"),
        (f"count: {'9' * 5000}", "a number of 5000 characters"),
    ],
)
def test_yaml_that_does_not_fit_is_one_line(text: str, said: str) -> None:
    with pytest.raises(PlanError, match=said) as caught:
        files.parse_yaml(text, Small, PlanError, "plan p.yaml")
    assert "\n" not in str(caught.value)


def test_foreign_text_in_an_error_stays_on_its_line() -> None:
    error = UserError("bad name", got="a\nheadway: all is well\x1b[31m")
    assert "\n" not in str(error)
    assert "\x1b" not in str(error)


def test_a_folder_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(RuntimeError), files.folder_written_whole(out) as beside:
        (beside / "half").write_text("half")
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []
    with files.folder_written_whole(out) as beside:
        (beside / "whole").write_text("whole")
        assert not out.exists()
    assert (out / "whole").read_text() == "whole"


def test_what_exists_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("precious")
    with pytest.raises(TraceError, match="already exists"), files.folder_written_whole(tmp_path, TraceError):
        pass


def test_a_text_is_written_whole_and_nothing_is_left_beside_it(tmp_path: Path) -> None:
    files.write_text(tmp_path / "a", "text")
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    with pytest.raises(UserError, match="cannot be written"):
        files.write_text(tmp_path / "missing" / "a", "text")


def test_a_device_and_a_link_are_written_through(tmp_path: Path) -> None:
    pipe, link, kept = tmp_path / "pipe", tmp_path / "link", tmp_path / "kept"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    files.write_text(pipe, "into the pipe")
    assert os.read(reader, 100) == b"into the pipe"
    os.close(reader)
    assert pipe.is_fifo()
    link.symlink_to(kept)
    files.write_text(link, "into the file")
    assert link.is_symlink()
    assert kept.read_text() == "into the file"
    with pytest.raises(UserError, match="cannot be written"):
        files.write_text(tmp_path, "into a folder")


def test_where_nothing_can_be_written_is_said_before(tmp_path: Path) -> None:
    files.check_writable(tmp_path / "file")
    files.check_writable(Path(os.devnull))
    with pytest.raises(PlanError, match="no folder"):
        files.check_writable(tmp_path / "none" / "file", PlanError)


def test_reading_is_bounded(tmp_path: Path) -> None:
    (tmp_path / "big").write_text("x" * 100)
    with pytest.raises(TraceError, match="too large"):
        files.read_text(tmp_path / "big", TraceError, "file", limit_bytes=10)


def test_json_documents_carry_no_nan() -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        files.dump_json(files.document("x", value=float("nan")))


def test_a_folder_is_removed_while_others_write_into_it(tmp_path: Path) -> None:
    stop = threading.Event()

    def write() -> None:
        while not stop.is_set():
            with suppress(FileNotFoundError):
                Path(tmp_path, "shared", str(time.monotonic_ns())).write_text("late")

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for _ in range(50):
            Path(tmp_path, "shared").mkdir()
            time.sleep(0.002)
            files.remove_folder(tmp_path / "shared")
            assert list(tmp_path.iterdir()) == []
    finally:
        stop.set()
        writer.join()


BOMB = "a: &a [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]\n" + "".join(
    f"{chr(98 + n)}: &{chr(98 + n)} [{', '.join(['*' + chr(97 + n)] * 10)}]\n" for n in range(8)
)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (BOMB, "stands for more than"),
        ("key: &a [*a]\n", "stands for more than"),
        ("key: 1\nother: 2\nkey: 3\n", "has the key 'key' twice, again at line 3"),
        ("#" * (files.MAX_YAML_BYTES + 1), "is too large"),
        ("hosts: " + "1:" * 200_000 + "1", "has a number of 400001 characters at line 1"),
        ("hosts: 0x" + "f" * 500_000, "has a number of 500002 characters"),
        ("hosts: 12:30", "has '12:30' at line 1, which is a number in base 60: write it in quotes"),
        ("hosts: 1:1.5", "a number in base 60"),
        ("hosts: !!timestamp foo", "is not valid YAML"),
        ("hosts: !!float ''", "is not valid YAML"),
        ("hosts: !!python/object:os.system 3", "is not valid YAML"),
    ],
)
def test_yaml_that_nobody_means_is_refused_before_it_is_built(text: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        files.parse_yaml(text, Cluster, UserError, "it")


def test_json_shows_in_a_terminal_what_it_says() -> None:
    data = {"name": "a\u202eb\x9b31m\x7f\u2028\u200bé"}
    text = files.dump_json(data)
    assert json.loads(text) == data
    assert all(character.isprintable() or character == "\n" for character in text)
    assert "é" in text


def test_what_killed_processes_left_is_removed_and_nothing_else(tmp_path: Path) -> None:
    with files.temporary_folder("headway-x-", tmp_path) as held:
        assert held.stat().st_mode & 0o777 == 0o700
        abandoned, younger, other = (
            tmp_path / name for name in ("headway-x-1", "headway-x-2", "headway-y-3")
        )
        for each in (abandoned, younger, other):
            each.mkdir()
            (each / "secret").touch()
        for each in (abandoned, other):
            (each / files.LOCK_FILE).touch()
        (tmp_path / "headway-x-link").symlink_to(other)
        with files.temporary_folder("headway-x-", tmp_path) as second:
            assert held.exists()
            assert not abandoned.exists()
            assert younger.exists()  # its maker has not come to lock it
            assert (other / "secret").exists()
        assert not second.exists()
    assert not held.exists()


def test_aliases_and_merged_keys_mean_what_they_mean_in_yaml() -> None:
    text = """
hosts:
  - &first {name: a, workers: 1, up_gbps: 1, down_gbps: 1}
  - {<<: *first, name: b, workers: 2}
latency_us: 0
"""
    assert [host.workers for host in files.parse_yaml(text, Cluster, UserError, "it").hosts] == [1, 2]


def test_what_is_no_file_is_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (Path("/dev/zero"), tmp_path / "pipe"):
        with pytest.raises(UserError, match="is not a file"):
            files.read_text(path, UserError, "it")
