"""Without the packages in ``contrib/``, what they bring is refused in one line that says how to install them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.metadata import EntryPoints
from pathlib import Path
from typing import Any

import pytest

import headway
from headway import plugins
from headway.cli.main import run
from headway.errors import PluginError
from headway.interop.readers.formats import readers
from headway.model import ModelSpec
from headway.plan import Plan
from headway.strategies import registry
from headway.strategies.ddp.policy import DistributedDataParallelStrategy

ROOT = Path(__file__).parents[1]
FIXTURES = ROOT / "contrib" / "headway-readers" / "tests" / "fixtures"
CACHES = (readers, registry.plugins)


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No package has entry points."""

    def none(**_group: Any) -> EntryPoints:
        return EntryPoints()

    monkeypatch.setattr(plugins, "entry_points", none)
    monkeypatch.setattr(plugins, "_loaded", {})
    for cached in CACHES:
        cached.cache_clear()
    yield
    for cached in CACHES:
        cached.cache_clear()


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("file", "options"),
    [
        ("jax/single.xplane.pb", ()),
        ("tensorflow/loop0.xplane.pb", ()),
        ("jax/single.trace.json.gz", ()),
        ("jax/single.perfetto_trace.json.gz", ()),
        ("mxnet/module/rank0_server.json", ()),
        ("mxnet/horovod/worker0.json", ()),
        ("horovod/arrivals.json", ()),
        ("horovod/make.py", ("--format", "horovod")),
    ],
)
def test_a_recording_that_another_package_reads_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], file: str, options: tuple[str, ...]
) -> None:
    assert run(["import", str(FIXTURES / file), "-o", str(tmp_path / "out"), *options]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith(
        "is in the package headway-readers, which is not installed. In a clone of Headway: "
        "pip install ./contrib/headway-readers"
    )


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("name", ["local-sgd", "asynchronous-parameter-server"])
def test_a_strategy_of_another_package_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    plan = tmp_path / "plan.yaml"
    Plan.data_parallel(DistributedDataParallelStrategy(), 2, ModelSpec(parameters=())).save(plan)
    plan.write_text(plan.read_text().replace("ddp:", f"{name}:"))
    predict = ["predict", "resnet50", "--cluster", "edr-100g-pcie", "--workers", "2", "--strategy", name]
    for arguments in (predict, ["settings", str(plan), "--for", "ddp"]):
        assert run(arguments) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert f"{name} is in the package headway-baselines, which is not installed" in line
        assert "pip install ./contrib/headway-baselines" in line
    with pytest.raises(PluginError, match="headway-baselines"):
        headway.strategy(name)


def test_nothing_but_messages_knows_of_them() -> None:
    source = Path(headway.__file__).parent
    naming = {
        str(path.relative_to(source))
        for path in source.rglob("*.py")
        if re.search(r"headway[-_](readers|baselines)", path.read_text("utf-8"))
    }
    assert naming == {"plugins.py"}
