"""Entry points of installed packages: what is broken is left out with one warning, and named where it is needed."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from headway import plugins
from headway.cli.main import run
from headway.compression.registry import codecs
from headway.errors import PlanError, PluginError, TraceError
from headway.interop.readers.formats import readers
from headway.interop.readers.importing import import_trace
from headway.model import ModelSpec
from headway.passes.registry import passes
from headway.plan import Plan
from headway.strategies import registry
from headway.strategies.ddp.policy import DistributedDataParallelStrategy

Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Installs a package of a name, of modules and entry points, for this process."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv(plugins.WARNED_VARIABLE, "")
    monkeypatch.setattr(plugins, "_loaded", {})
    caches = (registry.plugins, passes, codecs, readers)

    def installed(package: str, entry_points: str, **modules: str) -> None:
        info = tmp_path / f"{package}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(entry_points)
        for name, text in modules.items():
            (tmp_path / f"{name}.py").write_text(text)
        for cached in caches:
            cached.cache_clear()

    yield installed
    for cached in caches:
        cached.cache_clear()


def plan_of(strategy: str, folder: Path) -> Path:
    path = folder / "plan.yaml"
    plan = Plan.data_parallel(DistributedDataParallelStrategy(), 2, ModelSpec(parameters=()))
    plan.save(path)
    path.write_text(path.read_text().replace("ddp:", f"{strategy}:"))
    return path


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("steep = no_such_module:PLUGIN", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("steep = raises:PLUGIN", "ZeroDivisionError"),
        ("steep = leaves:PLUGIN", "SystemExit"),
        ("steep = plain:PLUGIN", "is int, expected a StrategyPlugin"),
        ("ddp = plain:PLUGIN", "Headway itself has one of that name"),
        ("steep", "entry points cannot be listed"),
    ],
)
def test_a_broken_strategy_is_left_out_with_one_warning(
    install: Install, tmp_path: Path, capsys: pytest.CaptureFixture[str], line: str, why: str
) -> None:
    modules = {"raises": "1 / 0", "leaves": "raise SystemExit(3)", "plain": "PLUGIN = 3"}
    install("stranger", f"[headway.strategies]\n{line}\n", **modules)
    assert Plan.load(plan_of("ddp", tmp_path)).strategy.name == "ddp"
    warning = capsys.readouterr().err
    assert why in warning
    assert warning.count("\n") == 1
    assert run(["predict", "resnet50", "--cluster", "edr-100g-pcie", "--workers", "2"]) == 0
    assert capsys.readouterr().err == ""
    assert os.environ[plugins.WARNED_VARIABLE]  # what keeps processes that are started from saying it again


def test_every_group_and_one_warning_for_a_package(
    install: Install, capsys: pytest.CaptureFixture[str]
) -> None:
    groups = "".join(
        f"[headway.{group}]\nsteep = gone:X\n" for group in ("strategies", "passes", "codecs", "readers")
    )
    install("stranger", groups)
    assert "steep" not in {**registry.plugins(), **passes(), **codecs(), **readers()}
    warning = capsys.readouterr().err
    assert "the package stranger 1.0" in warning
    assert warning.count("\n") == 1
    assert run(["list", "plugins", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [row["state"] for row in rows if row["name"] == "steep"] == [
        "gone:X cannot be loaded: ModuleNotFoundError: No module named 'gone'"
    ] * 4


def test_what_needs_a_broken_plugin_is_refused_with_the_reason(install: Install, tmp_path: Path) -> None:
    install("stranger", "[headway.strategies]\nsteep = gone:X\n[headway.passes]\nflat = gone:X\n")
    with pytest.raises(PlanError, match=r"steep.*stranger 1.0.*gone.*Fix or uninstall"):
        Plan.load(plan_of("steep", tmp_path))
    with pytest.raises(PluginError, match=r"steep.*stranger 1.0.*gone"):
        registry.check_usable("steep")
    path = plan_of("ddp", tmp_path)
    path.write_text(path.read_text().replace("passes: []", "passes: [flat: {}]"))
    with pytest.raises(PlanError, match=r"flat \(headway.passes\) of the package stranger 1.0"):
        Plan.load(path)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("    ddp:", "    absent:"),
        ("passes: []", "passes: [absent: {}]"),
        ("wire: []", "wire: [{codec: absent}]"),
    ],
)
def test_a_plan_of_what_is_not_installed_says_that_a_package_may_be_missing(
    tmp_path: Path, before: str, after: str
) -> None:
    path = plan_of("ddp", tmp_path)
    text = path.read_text()
    assert before in text
    path.write_text(text.replace(before, after))
    with pytest.raises(
        PlanError, match=r"unknown \w+ 'absent'.*Install the package that has it, or remove it"
    ):
        Plan.load(path)


def test_a_class_that_lacks_methods_is_left_out_when_it_is_loaded(
    install: Install, capsys: pytest.CaptureFixture[str]
) -> None:
    for number, (group, base, lacking) in enumerate(
        (
            ("codecs", "Codec", "default_us, describe, exchanges, loses, reduce"),
            ("passes", "Pass", "apply, describe, rewrite"),
            ("strategies", "Strategy", "decide, describe"),
        )
    ):
        text = f"from headway import ext\nclass Steep(ext.{base}):\n    name = 'steep'\n"
        if group == "strategies":
            text += "from headway.strategies.ddp.plugin import PLUGIN as DDP\n"
            text += "class Plugin(type(DDP)):\n    policy = Steep\nPLUGIN = Plugin()\n"
        where = f"lacking{number}"
        named = "PLUGIN" if group == "strategies" else "Steep"
        install(f"stranger{number}", f"[headway.{group}]\nsteep = {where}:{named}\n", **{where: text})
        assert "steep" not in {**registry.plugins(), **passes(), **codecs()}
        assert f"TypeError: the class Steep lacks {lacking}" in capsys.readouterr().err


def test_two_packages_of_one_name_are_both_left_out(
    install: Install, capsys: pytest.CaptureFixture[str]
) -> None:
    install("one", "[headway.codecs]\nsteep = gone:X\n")
    install("other", "[headway.codecs]\nsteep = gone:X\n")
    codecs()
    warnings = capsys.readouterr().err
    assert "of the package one 1.0 is left out: the package other 1.0 uses the same name" in warnings
    assert "of the package other 1.0 is left out: the package one 1.0 uses the same name" in warnings


def test_only_the_first_rank_warns(
    install: Install, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    install("stranger", "[headway.strategies]\nsteep = gone:X\n")
    monkeypatch.setenv("RANK", "1")
    registry.plugins()
    assert capsys.readouterr().err == ""


def test_a_strategy_of_others_that_raises_is_left_out(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Raising(type(registry.plugin_named("ddp"))):  # type: ignore[misc]
        pass

    monkeypatch.setenv(plugins.WARNED_VARIABLE, "")
    monkeypatch.setitem(registry.plugins(), "raising", Raising())

    def question(plugin: object) -> int:
        return 1 // (not isinstance(plugin, Raising))

    assert "raising" not in dict(registry.ask(question))
    assert "ZeroDivisionError" in capsys.readouterr().err
    with pytest.raises(ZeroDivisionError):
        dict(registry.ask(lambda plugin: 1 // 0))


READER = """
from headway.ext import Reader, Reading
class Steep(Reader):
    name, title = "steep", "slopes"
    def recognises(self, name, head):
        {recognises}
    def read(self, document, companions=()):
        {read}
READER = Steep()
"""


@pytest.mark.parametrize(
    ("recognises", "read", "why"),
    [
        ("return 1 / 0", "return Reading()", "no file of a known format"),
        ("return True", "return 1 / 0", "steep of the package stranger 1.0 .* ZeroDivisionError"),
        ("return True", "return 3", "steep of the package stranger 1.0 .* it returned no Reading"),
        ("return True", "return Reading()", "no file could be read"),
    ],
)
def test_a_reader_of_others_that_fails_is_named(
    install: Install, tmp_path: Path, capsys: pytest.CaptureFixture[str], recognises: str, read: str, why: str
) -> None:
    text = READER.format(recognises=recognises, read=read)
    module = tmp_path.name  # another one in each test, as Python keeps those that it has loaded
    install("stranger", f"[headway.readers]\nsteep = {module}:READER\n", **{module: text})
    (tmp_path / "in.txt").write_text("slope")
    with pytest.raises(TraceError, match=why):
        import_trace(tmp_path / "in.txt", tmp_path / "out")
    assert ("ZeroDivisionError" in capsys.readouterr().err) == (recognises == "return 1 / 0")


def test_what_is_no_reader_is_left_out_and_named_where_it_is_asked_for(
    install: Install, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    install("stranger", "[headway.readers]\nsteep = no_reader:READER\n", no_reader="READER = 3")
    (tmp_path / "in.txt").write_text("slope")
    arguments = ["import", str(tmp_path / "in.txt"), "-o", str(tmp_path / "out"), "--format", "steep"]
    assert run(arguments) == 2
    warning, message = capsys.readouterr().err.splitlines()
    assert "READER is int, expected a Reader of that name" in warning
    assert "steep (headway.readers) of the package stranger 1.0 cannot be used" in message
