"""Objects that a forward passes on, found in what it was given."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from headway.strategies.pipeline.tracing import objects_in


class _Cache:
    def __init__(self) -> None:
        self.states: list[torch.Tensor] = []


def test_objects_are_found_in_nested_containers_and_tensors_are_none() -> None:
    first, second = _Cache(), _Cache()
    given = ({"cache": first, "x": torch.zeros(1)}, [second, nn.ReLU(), len, 3, "text"])
    found = list(objects_in(given))
    assert len(found) == 2
    assert {id(each) for each in found} == {id(first), id(second)}


def test_a_container_that_contains_itself_is_looked_at_once() -> None:
    cache = _Cache()
    given: list[Any] = [cache]
    given.append(given)
    assert list(objects_in({"it": given})) == [cache]
