"""The package that docs/extending.md builds does all that the page says, as it stands there."""

from __future__ import annotations

import importlib.util
import inspect
import json
import os
import re
import shlex
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from tests.answers.asked import JOB, written
from tests.commands import SCRIPTS, run

from headway import ext
from headway.cli.main import run as headway
from headway.compression.registry import codecs, proposed
from headway.ext import testing
from headway.interop.readers.formats import readers
from headway.passes.registry import passes
from headway.replayer.replayer import Replayer
from headway.strategies import registry
from headway.trace.folder import load_trace

PAGE = Path(__file__).parents[2] / "docs" / "extending.md"
TEXT = PAGE.read_text()
CACHES = (registry.plugins, passes, codecs, proposed, readers)
TRAIN = f"""
import os, runpy, sys
sys.argv += ["--losses", os.environ["LOSSES"]]
runpy.run_path({str(SCRIPTS / "train_small.py")!r}, run_name="__main__")
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with the page's package, installed here and in every process that is started."""
    blocks = re.findall(r"^```(?:python|toml)\n# (\S+)\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)
    for name, text in blocks:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "train.py").write_text(TRAIN)
    project = tomllib.loads((tmp_path / "pyproject.toml").read_text())["project"]
    info = tmp_path / f"{project['name']}-{project['version']}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    )
    groups = (
        f"[{group}]\n" + "".join(f"{name} = {value}\n" for name, value in those.items())
        for group, those in project["entry-points"].items()
    )
    (info / "entry_points.txt").write_text("".join(groups))
    known = os.environ.get("PYTHONPATH", "")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(tmp_path), known])))
    monkeypatch.setenv("PATH", os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("LOSSES", str(tmp_path / "losses.json"))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    for cached in CACHES:
        cached.cache_clear()
    yield tmp_path
    for cached in CACHES:
        cached.cache_clear()
    for name in [name for name in sys.modules if name == "even" or name.startswith("even.")]:
        del sys.modules[name]


def commands() -> list[str]:
    """The page's commands, in their order."""
    return re.findall(r"^    ((?:headway|python) .*)$", TEXT, re.MULTILINE)


def asked(part: str) -> list[str]:
    """The words of the only command of the page that has ``part``."""
    (found,) = (line for line in commands() if part in line)
    return shlex.split(found)


def in_process(part: str, capsys: pytest.CaptureFixture[str], *more: str) -> str:
    _, *words = asked(part)
    assert headway([*words, *more]) == 0, capsys.readouterr()
    return capsys.readouterr().out


def with_ranks(part: str) -> None:
    done = run(asked(part), 300)
    assert done.returncode == 0, done.stderr


def test_the_page_s_commands_search_and_export(package: Path, capsys: pytest.CaptureFixture[str]) -> None:
    predicted = json.loads(in_process("headway predict", capsys, "--json"))["predictions"]
    assert {each["strategy"] for each in predicted} == {"even:buckets=8"}

    written(replace(JOB, gbps=0.3), package / "trace")
    found = json.loads(in_process("plan.yaml --strategy even", capsys, "--json"))
    (best, *_) = (each for each in found["plans"] if each["name"].startswith("even"))
    assert not [each for each in found["plans"] if "signs" in each["name"]], "not without its permission"
    replayed = json.loads(in_process("headway replay trace", capsys, "--json"))
    assert replayed["predicted_ms"] == pytest.approx(best["predicted_ms"])
    assert "bucket_cap_mb=" in in_process("headway settings", capsys)
    assert headway(["settings", "plan.yaml", "--for", "megatron", "--trace", "trace"]) == 2
    assert "Megatron has no settings for this plan" in capsys.readouterr().err

    # The codec is proposed to those who permit it, and they are told what that is.
    said = json.loads(in_process("--allow one-bit", capsys, "--json"))
    assert [each for each in said["plans"] if "signs" in each["name"]]
    told = " ".join(in_process("--allow one-bit", capsys).split())
    assert "one-bit: gradients are sent as signs" in told
    assert "do not wait for each other" not in told
    assert headway(["optimize", "trace", "-o", "never.yaml", "--allow", "two-bits"]) == 2
    assert "or one-bit" in capsys.readouterr().err


@pytest.mark.processes
@pytest.mark.timeout(900)
def test_ranks_train_under_the_page_s_plan_and_are_replayed(
    package: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In a script that knows nothing of it, recognised, and replayed as it was recorded."""
    with_ranks("-o trace --")
    losses = json.loads((package / "losses.json").read_text())["losses"]
    in_process("plan.yaml --strategy even", capsys)
    with_ranks("-o again --")
    assert json.loads((package / "losses.json").read_text())["losses"] == pytest.approx(losses, rel=1e-5)
    again = load_trace(package / "again")
    assert "even" in again.manifest.ranks[0].strategy
    assert Replayer(again).replay().strategy.name == "even"
    in_process("headway replay again", capsys)


def test_the_page_s_own_tests_hold(package: Path) -> None:
    """All but the one that starts ranks."""
    spec = importlib.util.spec_from_file_location("even_tests", package / "tests" / "test_even.py")
    assert spec is not None
    assert spec.loader is not None
    tests = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tests)
    for waits in (False, True):
        tests.test_strategy(waits)
        tests.test_codec(waits)
    tests.test_pass()
    tests.test_reader()


def test_the_page_s_reader_imports_logs(package: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (package / "logs").mkdir()
    for rank, late_us in enumerate((0, 40)):
        lines = [
            f"step {step} {step * 1000 + late_us} {step * 1000 + 900 + late_us}\n"
            f"backward {step} {step * 1000 + late_us} {step * 1000 + 300 + late_us}\n"
            f"collective {step} {step * 1000 + 300 + late_us} {step * 1000 + 800 + late_us}\n"
            for step in range(3)
        ]
        (package / "logs" / f"rank{rank}.log").write_text("# lines of even\n" + "".join(lines))
    in_process("headway import", capsys)
    trace = load_trace(package / "imported")
    assert (trace.manifest.framework, trace.world_size, len(trace.manifest.steps)) == ("even", 2, 3)
    assert "logs of even (package even 1.0)" in in_process("headway list readers", capsys)
    assert headway(["diagnose", "imported"]) == 0


@pytest.mark.exhaustive
@pytest.mark.processes
@pytest.mark.timeout(900)
def test_the_page_s_own_tests_hold_in_a_process_of_their_own(package: Path) -> None:
    done = run([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(package / "tests")], 600)
    assert done.returncode == 0, done.stdout


@pytest.mark.exhaustive
@pytest.mark.processes
@pytest.mark.timeout(900)
def test_the_page_s_pass_is_measured_by_the_page_s_command(
    package: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with_ranks("-o trace --")
    with_ranks("pass_runs")
    assert 'threads {"count":1} forward' in (package / "trace" / "measured.json").read_text().replace(
        "\\", ""
    )
    (strategy, *_) = Replayer(load_trace(package / "trace")).job.measured
    assert strategy.startswith("threads")


def test_a_plug_in_for_another_version_is_refused(package: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = package / "even" / "strategy.py"
    code.write_text(code.read_text().replace("api_version = 1", "api_version = 99"))
    assert headway(asked("headway predict")[1:]) == 2
    assert "headway.ext" in capsys.readouterr().err


def test_the_documented_names_are_those_that_there_are() -> None:
    for module in (ext, testing):
        assert sorted(module.__all__) == sorted(set(module.__all__))
        for name in module.__all__:
            named = getattr(module, name)
            assert named.__doc__ or not (inspect.isclass(named) or inspect.isfunction(named)), name
    text = (PAGE.parent / "api.md").read_text()
    assert "::: headway.ext\n" in text
    assert f"`headway.ext.API_VERSION`, now {ext.API_VERSION}:" in text
    others = re.findall(r"from headway\.(?!ext\b)\S+ import", TEXT)
    assert not others, "the page imports nothing else"
