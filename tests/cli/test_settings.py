from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.answers.asked import JOB, written
from tests.synthetic import SyntheticJob, write_trace

from headway.cli.main import run
from headway.cli.settings import NAMES
from headway.plan import Plan, Prediction
from headway.strategies.registry import policy_named
from headway.trace.folder import load_trace


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return write_trace(SyntheticJob(world_size=2, steps=2), tmp_path / "trace")


def planned(trace: Path, name: str, **options: object) -> Path:
    path = trace.parent / f"{name}.yaml"
    Plan.data_parallel(policy_named(name)(**options), 2, load_trace(trace).model).save(path)
    return path


def test_the_first_line_answers_and_the_file_follows(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = planned(trace, "ddp", bucket_caps_mb=[0.5, 1])
    assert run(["settings", str(plan), "--for", "ddp"]) == 0
    said = capsys.readouterr()
    first, *rest = said.out.splitlines()
    assert first == "DDP can run this plan: bucket_cap_mb_list with caps for 2 buckets."
    assert "ARGUMENTS = {'bucket_cap_mb_list': [0.5, 1.0]}" in rest
    assert said.err == ""


def test_what_is_lacking_is_said_before_what_is_to_be_done(
    trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = planned(trace, "decoupled")
    assert run(["settings", str(plan), "--for", "megatron", "--trace", str(trace)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("Megatron can run this plan in part: ")
    assert lines[1].startswith("Left out: ")
    assert lines[-1].startswith("--overlap-grad-reduce --ddp-bucket-size 1048576")
    assert run(["settings", str(plan), "--for", "nccl"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert (
        said[0] == "NCCL can carry out this plan's collectives: ring for reducescatter, ring for allgather."
    )
    assert said[1].startswith("Note: ")
    assert said[-1] == "export NCCL_ALGO='reducescatter:ring;allgather:ring'"


def test_the_plan_of_optimize_is_enough(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace, path = written(JOB, tmp_path / "trace"), tmp_path / "plan.yaml"
    assert run(["optimize", str(trace), "-o", str(path), "--strategy", "decoupled"]) == 0
    assert "\ntrace: trace\n" in path.read_text()
    for tool in NAMES:
        assert run(["settings", str(path), "--for", tool]) == 0
    plan = Plan.load(path)
    plan.model_copy(update={"parallel": {"data": policy_named("ddp")()}}).save(path)
    capsys.readouterr()
    for tool in ("ddp", "deepspeed", "megatron", "nccl", "rccl"):
        assert run(["settings", str(path), "--for", tool]) == 0
    assert "NCCL can carry out this plan's collectives: nothing needs to be set" in capsys.readouterr().out

    # Both are moved together; then the trace is gone, and another one is there in its place.
    moved = tmp_path / "moved"
    moved.mkdir()
    trace.rename(moved / "trace")
    path = path.rename(moved / "plan.yaml")
    megatron = ["settings", str(path), "--for", "megatron"]
    assert run(megatron) == 0
    (moved / "trace").rename(moved / "elsewhere")
    capsys.readouterr()
    assert run(megatron) == 2
    assert "not found" in (error := capsys.readouterr().err)
    assert "Add --trace TRACE." in error
    write_trace(SyntheticJob(world_size=4, steps=2), moved / "trace")
    assert run(megatron) == 2
    assert "another model" in capsys.readouterr().err
    assert run([*megatron, "--trace", str(moved / "elsewhere")]) == 0


def test_files_are_written_into_a_new_folder(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan, out = planned(trace, "decoupled"), tmp_path / "out"
    arguments = ["settings", str(plan), "--for", "fsdp2", "--trace", str(trace), "-o", str(out)]
    assert run([*arguments, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert set(said) == {
        "headway", "kind", "tool", "complete", "gist", "lacks", "cautions", "use", "arguments", "environment", "files",
        "path",
    }  # fmt: skip
    assert (said["kind"], said["tool"], said["path"]) == ("settings", "FSDP2", str(out))
    assert {path.name: path.read_text() for path in out.iterdir()} == said["files"]
    assert run(arguments) == 2
    assert "already exists" in capsys.readouterr().err


def test_rules_are_carried_over(trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan, theirs = planned(trace, "ddp"), tmp_path / "theirs.csv"
    theirs.write_text("allreduce,0,65536,tree,ll,2,1,8\n")
    arguments = ["settings", str(plan), "--for", "rccl", "--as-replayed", "--append", str(theirs)]
    assert run(arguments) == 0
    assert capsys.readouterr().out.endswith("allreduce,0,65536,tree,ll,2,1,8\n")
    theirs.write_text("allreduce,0,65536,trees,ll,2,1,8\n")
    assert run([*arguments, "-o", str(tmp_path / "out")]) == 2
    assert "line 1" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_refusals_are_one_line_and_status_2(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ddp, decoupled = str(planned(trace, "ddp")), str(planned(trace, "decoupled"))
    groups = str(planned(trace, "partial-all-reduce", group_size=2))
    other = write_trace(SyntheticJob(world_size=4, steps=2), tmp_path / "other")
    out = tmp_path / "out"
    damaged = tmp_path / "damaged.yaml"
    damaged.write_text("format: 2\n")
    for arguments, complaint in (
        ([ddp, "--for", "horovod"], "not one of"),
        ([str(tmp_path / "no"), "--for", "ddp"], "not found"),
        ([str(damaged), "--for", "ddp"], "missing"),
        ([groups, "--for", "ddp"], "DDP has no settings for this plan"),
        ([ddp, "--for", "fsdp2"], "FSDP2 has no settings for this plan"),
        ([ddp, "--for", "nccl", "-o", str(out)], "needs no files"),
        ([decoupled, "--for", "fsdp2"], "Add --trace TRACE."),
        ([decoupled, "--for", "fsdp2", "--trace", str(tmp_path / "no")], "not found"),
        ([decoupled, "--for", "fsdp2", "--trace", str(other)], "another world size"),
        ([decoupled, "--for", "ddp", "--channels", "4"], "--channels cannot be used with --for ddp"),
        ([decoupled, "--for", "nccl", "--append", ddp], "--channels too"),
        ([decoupled, "--for", "nccl", "--channels", "0"], "--channels"),
        ([decoupled, "--for", "nccl", "-o", str(out)], "Remove -o."),
        ([decoupled, "--for", "megatron", "--trace", str(trace), "-o", str(out)], "needs no files"),
    ):
        assert run(["settings", *arguments]) == 2, arguments
        (line,) = capsys.readouterr().err.strip().splitlines()
        assert line.startswith("headway: ")
        assert complaint in line, arguments
        assert not out.exists()
    assert run(["settings", ddp]) == 2
    assert "--for" in capsys.readouterr().err


@pytest.mark.parametrize("options", [{}, {"bucket_cap_mb": 5}])
def test_of_the_recorded_plan_there_is_nothing_to_change(
    options: dict[str, float], trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = planned(trace, "ddp", **options)
    plan = Plan.load(path)
    expected = Prediction(step_ms=1.0, baseline_ms=1.0, uncertainty_ms=0.1, recorded=plan.digest)
    plan.model_copy(update={"prediction": expected}).save(path)
    assert run(["settings", str(path), "--for", "ddp"]) == 0
    said = capsys.readouterr().out
    if options:  # it may have been headway run that applied them
        assert "only if headway run applied it while recording. Wrap the model with wrap()" in said
    else:
        assert said.splitlines()[1:] == ["Nothing to change: this is what was recorded."]
    assert run(["settings", str(path), "--for", "ddp", "-o", str(trace.parent / "out")]) == 0
    assert [each.name for each in (trace.parent / "out").iterdir()] == ["ddp_settings.py"]
