"""Accelerate is met half imported, in versions that lack what is replaced, and more than once."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from headway.strategies.live import accelerate


def test_the_method_is_replaced_once_it_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = ModuleType("accelerate.accelerator")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    accelerate.install()  # while Accelerate imports torch
    module.Accelerator = SimpleNamespace()
    accelerate.install()
    assert not vars(module.Accelerator), "an older version"

    def stock(*_: Any, **__: Any) -> None:
        raise AssertionError("plain parameters pass by")

    module.Accelerator._clip_grad_norm_dtensor_aware = stock
    accelerate.install()
    replaced = module.Accelerator._clip_grad_norm_dtensor_aware
    accelerate.install()
    assert module.Accelerator._clip_grad_norm_dtensor_aware is replaced is not stock
    assert replaced(None, iter([]), 1.0) == 0
