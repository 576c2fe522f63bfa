"""Work of our own is the same whatever modes its caller has put in force."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from headway import torch_private

MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "none": nullcontext,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "inference mode": torch.inference_mode,
    "gradients": torch.enable_grad,
}


@pytest.mark.parametrize("name", MODES)
def test_it_is_invisible(name: str) -> None:
    given = torch.ones(4, 4, requires_grad=True)
    with MODES[name]():
        with torch_private.without_user_modes():
            made = given @ given
            assert not torch.is_grad_enabled()
        assert torch.is_grad_enabled() == (name not in ("inference mode",))
        assert torch.is_autocast_enabled("cpu") == (name == "autocast")
        assert torch.is_inference_mode_enabled() == (name == "inference mode")
    assert made.dtype == torch.float32
    assert not made.is_inference()
    assert not made.requires_grad


def test_modes_are_not_told_of_it() -> None:
    seen: list[str] = []

    class Dispatched(torch_private.DispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    class Called(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    given = torch.ones(4)
    dispatched: Any = Dispatched
    with dispatched(), Called():
        with torch_private.without_user_modes():
            _ = given + given
        assert not seen
        _ = given + given
    assert seen
