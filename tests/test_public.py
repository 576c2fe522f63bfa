"""The public surface is what is documented, and importing it stays light."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest
from tests import limits

import headway
from headway import errors

SIGNATURES = {
    "compression_state": "(model: nn.Module) -> dict[str, torch.Tensor]",
    "load_compression_state": "(model: nn.Module, state: Mapping[str, torch.Tensor]) -> None",
    "diagnose": "(trace: Trace | str | Path, cluster: Cluster | None = None) -> Diagnosis",
    "finish": "(model: nn.Module, *, timeout_s: float = 300.0) -> tuple[int, ...]",
    "load_trace": "(path: str | Path) -> Trace",
    "optimize": (
        "(trace: Trace | str | Path, *, others: Sequence[Trace | str | Path] = (), strategy: str | None = None, "
        "cluster: Cluster | None = None, "
        "memory_limit_bytes: int | None = None, follow_network: bool = False, allow: Collection[str] = (), "
        "budget_s: float | None = None) -> Optimized"
    ),
    "parallelize": (
        "(model: nn.Module, optimizer: Optimizer, plan: Plan | Strategy | None = None, *, "
        "loss_fn: Callable[..., Any] | None = None, example_batch: Any = None, mesh: DeviceMesh | None = None, "
        "**ddp_options: Any) -> nn.Module"
    ),
    "predict": (
        "(model: str, cluster: Cluster | str, *, strategies: Sequence[Strategy] = (), workers: Sequence[int] = (), "
        "device: str | None = None, optimizer: str = 'momentum', precision: str | None = None, "
        "batch: int | None = None, global_batch: int | None = None) -> list[Prediction]"
    ),
    "record": (
        "(folder: str | Path, model: Any = None, *, first_step: int = 5, stop_step: int = 25, "
        "detail: Detail = 'modules', clock_server: bool = True) -> Iterator[None]"
    ),
    "replay": (
        "(trace: Trace | str | Path, plan: Plan | Strategy | None = None, *, what_if: Iterable[str] = (), "
        "cluster: Cluster | None = None) -> Replayed"
    ),
    "strategy": "(name: str, **options: Any) -> Strategy",
}
VALUES = ("Cluster", "Diagnosis", "Optimized", "Plan", "Replayed", "Trace", "__version__")
ERRORS = (
    "ClusterError", "CommunicationError", "HeadwayError", "HeadwayWarning", "InternalError", "LabError", "LaunchError",
    "PlanError", "PluginError", "TraceError", "UnitError", "UnsupportedError", "UserError",
)  # fmt: skip


def test_everything_public_is_there_and_nothing_else() -> None:
    assert sorted(headway.__all__) == sorted([*SIGNATURES, *VALUES, *ERRORS])
    assert dir(headway) == sorted(headway.__all__)
    for name in headway.__all__:
        assert getattr(headway, name) is not None
        if name not in ("__version__", *ERRORS):
            assert len(getattr(headway, name).__doc__) > 40, name


def test_every_error_is_public() -> None:
    defined = {name for name, value in vars(errors).items() if isinstance(value, type) and name[0] != "_"}
    assert {name for name in defined if issubclass(getattr(errors, name), Exception)} == set(ERRORS)


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures_change_on_purpose(name: str) -> None:
    found = inspect.signature(getattr(headway, name))
    assert str(found).replace("'", "") == SIGNATURES[name].replace("'", "")


def test_importing_headway_does_not_import_torch() -> None:
    code = "import sys, headway; sys.exit('torch' in sys.modules)"
    assert (
        subprocess.run([sys.executable, "-c", code], check=False, timeout=limits.stretched(60)).returncode
        == 0
    )


EXTRAS = ("msgspec", "scipy", "google.protobuf", "perfetto", "bokeh", "pyroute2", "sklearn")
ONLY_WITH_EXTRAS = ("headway.interop.readers.", "headway.demo.train_digits")


def test_without_extras_only_the_rooms_that_need_them_are_shut() -> None:
    code = f"""
import importlib, pkgutil, sys
for name in {EXTRAS}:
    sys.modules[name] = None
import headway
for module in pkgutil.walk_packages(headway.__path__, "headway.", onerror=lambda name: None):
    try:
        importlib.import_module(module.name)
    except ImportError as failure:
        print(module.name, failure)
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        check=True,
        capture_output=True,
        text=True,
        timeout=limits.stretched(120),
    )
    shut = done.stdout.splitlines()
    assert [line for line in shut if not line.startswith(ONLY_WITH_EXTRAS)] == []
    assert any("msgspec" in line for line in shut), "nothing was missing, so nothing was tested"
