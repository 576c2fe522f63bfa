from __future__ import annotations

import os
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

from headway.errors import LabError
from headway.lab import state
from headway.lab.processes import members, start_time

SLEEP = [sys.executable, "-c", "print(1, flush=True); import time; time.sleep(60)"]


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))


@pytest.fixture
def lab_id() -> str:
    return f"lab-test-{secrets.token_hex(4)}"


@pytest.fixture
def sleeper(lab_id: str) -> Iterator[subprocess.Popen[bytes]]:
    yield from _sleeper({"HEADWAY_LAB_ID": lab_id})


@pytest.fixture
def stranger(lab_id: str) -> Iterator[subprocess.Popen[bytes]]:
    yield from _sleeper({"HEADWAY_LAB_ID": lab_id + "0", "OTHER": lab_id})


def _sleeper(env: dict[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(SLEEP, env=os.environ | env, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process
        process.kill()


def _ended() -> state.Process:
    process = subprocess.Popen(["true"])
    found = state.Process(pid=process.pid, start_time=start_time(process.pid) or 0)
    process.wait()
    return found


def _record(lab_id: str, launcher: state.Process, **changes: object) -> state.Record:
    record = state.Record(
        id=lab_id,
        mode="loopback",
        hosts=2,
        workers=2,
        command=("python", "train.py"),
        started=datetime.now(UTC),
        launcher=launcher,
        orchestrator=_ended(),
        pid_namespace=state.pid_namespace(),
    ).model_copy(update=changes)
    state.write(record)
    return record


def _ourselves() -> state.Process:
    found = state.Process.of(os.getpid())
    assert found is not None
    return found


def test_a_record_comes_back(lab_id: str) -> None:
    record = _record(lab_id, _ourselves())
    (lab,) = state.labs()
    assert lab.record == record
    assert lab.state == "running"
    assert state.folder().stat().st_mode & 0o777 == 0o700
    state.remove(lab_id)
    assert state.labs() == []


def test_a_pid_that_was_reused_is_not_the_launcher(lab_id: str) -> None:
    ourselves = _ourselves()
    _record(lab_id, ourselves.model_copy(update={"start_time": ourselves.start_time - 1}))
    assert state.labs()[0].state == "leftover"


def test_clean_ends_only_the_dead_labs_processes(
    lab_id: str, sleeper: subprocess.Popen[bytes], stranger: subprocess.Popen[bytes]
) -> None:
    _record(lab_id, _ended())
    assert members(lab_id) == [sleeper.pid]
    cleaned, stuck = state.clean()
    assert [lab.pids for lab in cleaned] == [(sleeper.pid,)]
    assert stuck == []
    assert sleeper.wait(10) == -9
    assert stranger.poll() is None
    assert state.labs() == []


def test_clean_removes_the_dead_labs_control_group_and_no_other(lab_id: str, tmp_path: Path) -> None:
    group, other = tmp_path / f"headway-{lab_id}", tmp_path / f"headway-{lab_id}0"
    for folder in (group, other):
        (folder / "rank0" / "nested").mkdir(parents=True)
    _record(lab_id, _ended(), group=group)
    assert [lab.record.id for lab in state.clean()[0]] == [lab_id]
    assert not group.exists()
    assert (other / "rank0" / "nested").exists()


def test_a_record_that_names_a_foreign_control_group_is_passed_over(lab_id: str, tmp_path: Path) -> None:
    (tmp_path / "headway-lab-other").mkdir()
    _record(lab_id, _ended(), group=tmp_path / "headway-lab-other")
    assert state.labs() == []
    assert state.clean() == ([], [])
    assert (tmp_path / "headway-lab-other").exists()


def test_clean_leaves_a_running_lab(lab_id: str, sleeper: subprocess.Popen[bytes]) -> None:
    _record(lab_id, _ourselves())
    assert state.clean() == ([], [])
    assert sleeper.poll() is None
    assert len(state.labs()) == 1


def test_labs_of_another_process_namespace_are_not_judged(
    lab_id: str, sleeper: subprocess.Popen[bytes]
) -> None:
    _record(lab_id, _ended(), pid_namespace="pid:[1]")
    assert state.labs()[0].state == "elsewhere"
    assert state.clean() == ([], [])
    assert sleeper.poll() is None


def test_an_orchestrator_is_known_by_pid_and_start(lab_id: str, stranger: subprocess.Popen[bytes]) -> None:
    orchestrator = state.Process.of(stranger.pid)
    assert orchestrator is not None
    other = orchestrator.model_copy(update={"start_time": orchestrator.start_time + 1})
    _record(lab_id, _ended(), orchestrator=other)
    assert state.labs()[0].pids == ()
    _record(lab_id, _ended(), orchestrator=orchestrator)
    assert state.labs()[0].pids == (stranger.pid,)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"id": "x"}', "a: &a [*a]"])
def test_files_that_are_not_records_are_passed_over(text: str) -> None:
    (state.folder() / "x.json").write_text(text)
    assert state.labs() == []
    assert state.clean() == ([], [])
    assert (state.folder() / "x.json").exists()


def test_a_folder_others_may_write_is_refused(tmp_path: Path) -> None:
    (tmp_path / "headway").mkdir()
    (tmp_path / "headway").chmod(0o777)
    with pytest.raises(LabError, match="not private to you"):
        state.labs()


def test_a_name_that_another_user_has_taken_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    taken = tmp_path / f"headway-{os.getuid()}"
    taken.mkdir()
    taken.chmod(0o777)
    assert state.folder() == tmp_path / f"headway-{os.getuid()}-2" / "labs"
    assert state.labs() == []
    for number in range(2, 10):
        (tmp_path / f"headway-{os.getuid()}-{number}").mkdir(exist_ok=True)
        (tmp_path / f"headway-{os.getuid()}-{number}").chmod(0o777)
    with pytest.raises(LabError, match="Set XDG_RUNTIME_DIR"):
        state.folder()


def test_a_folder_that_is_a_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "headway").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(LabError, match="not private to you"):
        state.folder()
