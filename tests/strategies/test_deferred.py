"""A deferred parameter notices every use, and is an ordinary one afterwards."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from headway.strategies.decoupled import deferred


class Entry:
    def __init__(self, parameter: nn.Parameter) -> None:
        self.parameter = parameter
        self.calls: list[str] = []

    def before_value(self) -> None:
        self.calls.append("value")
        self.parameter.__class__ = nn.Parameter

    def before_gradient_read(self) -> None:
        self.calls.append("read")

    def before_gradient_write(self) -> None:
        self.calls.append("write")


@pytest.fixture
def entry() -> Iterator[Entry]:
    parameter = nn.Parameter(torch.ones(2, 2))
    entry = Entry(parameter)
    deferred.register(parameter, entry)
    parameter.__class__ = deferred.DeferredParameter
    yield entry
    deferred.unregister(parameter)


VALUES: dict[str, Callable[[Any], Any]] = {
    "add": lambda p: p + 1,
    "in place": lambda p: p.data.add_(1),
    "data": lambda p: p.data,
    "set data": lambda p: setattr(p, "data", torch.zeros(2, 2)),
    "detach": lambda p: p.detach(),
    "linear": lambda p: nn.functional.linear(torch.ones(1, 2), p),
    "numpy": lambda p: p.detach().numpy(),
    "item": lambda p: p[0, 0].item(),
    "list": lambda p: p.tolist(),
    "iterate": list,
    "foreach": lambda p: torch._foreach_add([torch.ones(2, 2), p], 1.0),
    "nested": lambda p: torch.stack([p, p]),
    "keyword": lambda p: torch.add(torch.ones(2, 2), other=p),
    "repr": repr,
    "format": lambda p: f"{p}",
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
    "save": lambda p: torch.save(p, io.BytesIO()),
    "storage": lambda p: p.untyped_storage(),
    "pointer": lambda p: p.data_ptr(),
    "to": lambda p: p.to(torch.float64),
    "freeze": lambda p: p.requires_grad_(False),
    "compare": lambda p: bool((p == 1).all()),
    "equal": lambda p: torch.equal(torch.ones(2, 2), p),
    "out": lambda p: torch.add(torch.ones(2, 2), 1, out=p.data),
    "array": lambda p: __import__("numpy").asarray(p.detach()),
    "share": lambda p: p.is_shared() or p.share_memory_(),
}


@pytest.mark.parametrize("use", VALUES.values(), ids=VALUES.keys())
def test_uses_of_the_value_are_noticed(entry: Entry, use: Callable[[Any], Any]) -> None:
    result = use(entry.parameter)
    assert entry.calls[0] == "value"
    assert type(entry.parameter) is nn.Parameter
    assert type(result) is not deferred.DeferredParameter


def test_looking_at_the_gradient_is_told_apart(entry: Entry) -> None:
    assert entry.parameter.grad is None
    entry.parameter.grad = torch.ones(2, 2)
    entry.parameter.grad = None
    del entry.parameter.grad
    assert entry.calls == ["read", "write", "write", "write"]


def test_shapes_and_types_are_free(entry: Entry) -> None:
    p = entry.parameter
    assert (p.shape, p.dtype, p.requires_grad, p.is_leaf, p.numel(), p.dim()) == (
        (2, 2), torch.float32, True, True, 4, 2,
    )  # fmt: skip
    assert isinstance(p, nn.Parameter)
    assert hash(p) == id(p)
    assert entry.calls == []


@pytest.mark.parametrize("use", VALUES.values(), ids=VALUES.keys())
def test_a_value_is_used_freely_while_its_gradient_alone_is_in_flight(
    entry: Entry, use: Callable[[Any], Any]
) -> None:
    entry.parameter.__class__ = deferred.DeferredGradient
    result = use(entry.parameter)
    assert entry.calls == []
    assert isinstance(entry.parameter, nn.Parameter)
    assert result is entry.parameter or type(result) is not deferred.DeferredGradient


def test_a_gradient_in_flight_is_noticed_by_readers_and_writers(entry: Entry) -> None:
    entry.parameter.__class__ = deferred.DeferredGradient
    assert entry.parameter.grad is None
    entry.parameter.grad = torch.ones(2, 2)
    assert deferred.gradient_of(entry.parameter) is not None
    del entry.parameter.grad
    assert deferred.gradient_of(entry.parameter) is None
    assert entry.calls == ["read", "write", "write"]


def test_copies_do_not_wait_for_a_gradient(entry: Entry) -> None:
    entry.parameter.grad = torch.ones(2, 2)
    entry.calls.clear()
    entry.parameter.__class__ = deferred.DeferredGradient
    for copied in (copy.deepcopy(entry.parameter), copy.copy(entry.parameter), _pickled(entry.parameter)):
        assert type(copied) is nn.Parameter
        assert copied.grad is None
        assert torch.equal(copied, torch.ones(2, 2))
    assert entry.calls == []


def _pickled(parameter: nn.Parameter) -> Any:
    buffer = io.BytesIO()
    torch.save(parameter, buffer)
    buffer.seek(0)
    return torch.load(buffer)
