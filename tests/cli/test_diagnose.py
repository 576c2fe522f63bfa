"""headway diagnose with a baseline, a threshold and as Markdown: what is printed, and the exit status."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from tests.synthetic import SyntheticJob, write_trace

from headway.cli.main import run
from headway.diagnosis.breakdown import PARTS

JOB = SyntheticJob(steps=12, world_size=2, jitter=0.02)


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("traces")
    write_trace(JOB, folder / "before")
    write_trace(replace(JOB, seed=1), folder / "same")
    write_trace(replace(JOB, forward_ms=14.0), folder / "slower")
    write_trace(replace(JOB, forward_ms=6.0), folder / "faster")
    write_trace(replace(JOB, steps=1, forward_ms=14.0), folder / "short")
    return folder


def said(traces: Path, new: str, *arguments: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    status = run(["diagnose", str(traces / new), "--baseline", str(traces / "before"), *arguments])
    output = capsys.readouterr()
    assert output.err in ("", "Diagnosing …\n")  # which a busy machine takes long enough for
    return status, output.out


@pytest.mark.parametrize(
    ("new", "arguments", "status", "first"),
    [
        ("before", (), 0, "No change beyond noise"),
        ("same", (), 0, "No change beyond noise"),
        ("same", ("--threshold", "0"), 0, "No change beyond noise"),
        ("slower", (), 1, "Slower by 12 %"),
        ("slower", ("--threshold", "10"), 1, "Slower by 12 %"),
        ("slower", ("--threshold", "15"), 0, "Slower by 12 %"),
        ("faster", (), 0, "Faster by 12 %"),
        ("short", (), 0, "Cannot compare a single step"),
    ],
)
def test_the_status_tells_whether_it_became_slower(
    traces: Path,
    new: str,
    arguments: tuple[str, ...],
    status: int,
    first: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for style in ((), ("--markdown",), ("--json",)):
        found, text = said(traces, new, *arguments, *style, capsys=capsys)
        assert found == status
        if style == ("--json",):
            assert json.loads(text)["baseline"]["sentence"].startswith(first)
            assert json.loads(text)["baseline"]["regressed"] is bool(status)
        else:
            mark = f"**{'❌' if status else '✅'} " if style else ""
            assert text.splitlines()[0].startswith(f"{mark}{first}")


def test_one_document_with_the_baseline_in_it(traces: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, text = said(traces, "slower", "--threshold", "2.5", "--json", capsys=capsys)
    document = json.loads(text)
    assert document["kind"] == "diagnosis"
    baseline = document["baseline"]
    assert set(baseline) == {
        "sentence", "regressed", "baseline_step_ms", "change", "noise_ms", "baselines", "threshold", "parts_ms",
        "new_causes", "gone_causes",
    }  # fmt: skip
    assert baseline["threshold"] == pytest.approx(0.025)
    assert baseline["change"] == pytest.approx(
        document["step_ms"] / baseline["baseline_step_ms"] - 1, abs=1e-6
    )
    assert set(baseline["parts_ms"]) == set(PARTS)
    assert run(["diagnose", str(traces / "slower"), "--json"]) == 0
    assert "baseline" not in json.loads(capsys.readouterr().out)


def test_several_baselines_show_how_much_runs_differ(
    traces: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, text = said(traces, "slower", "--baseline", str(traces / "same"), "--json", capsys=capsys)
    several = json.loads(text)["baseline"]
    assert several["baselines"] == 2
    assert several["regressed"] is bool(status)
    assert "With a single baseline" not in several["sentence"]


def test_the_next_command_is_named(traces: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["diagnose", str(traces / "same")]) == 0
    assert (
        capsys.readouterr().out.splitlines()[-1] == f"Next: headway optimize {traces / 'same'} -o plan.yaml"
    )


def test_markdown_without_a_baseline(traces: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["diagnose", str(traces / "slower"), "--markdown"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("**Nothing stands out: computation is ")
    assert text.endswith("|\n")
    assert "change" not in text


@pytest.mark.parametrize("style", [(), ("--markdown",), ("--json",)])
def test_a_bad_baseline_is_one_line(
    traces: Path, tmp_path: Path, style: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    shutil.copytree(traces / "before", tmp_path / "cut")
    broken = tmp_path / "cut" / "rank-00001.parquet"
    broken.write_bytes(broken.read_bytes()[:100])
    (tmp_path / "file").write_text("no trace")
    for name, complaint in (
        ("no", "trace not found"),
        ("empty", "the folder is empty"),
        ("cut", "rank-00001.parquet is damaged or truncated"),
        ("file", "trace not found"),
    ):
        baseline = str(tmp_path / name)
        assert run(["diagnose", str(traces / "before"), "--baseline", baseline, *style]) == 2
        output = capsys.readouterr()
        assert output.out == ""
        (line,) = output.err.splitlines()
        assert line.startswith("headway: ")
        assert complaint in line
        assert name in line


@pytest.mark.parametrize("threshold", ["-1", "nan", "inf", "5%", ""])
def test_a_threshold_is_a_number_of_percent(
    traces: Path, threshold: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = str(traces / "before")
    assert run(["diagnose", before, "--baseline", before, "--threshold", threshold, "--json"]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert len(output.err.splitlines()) == 1
    assert "--threshold" in output.err


def test_one_form_at_a_time(traces: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["diagnose", str(traces / "before"), "--json", "--markdown"]) == 2
    assert capsys.readouterr().err.startswith("headway: --json and --markdown cannot be combined.")
