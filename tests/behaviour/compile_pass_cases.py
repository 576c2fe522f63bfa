"""Ranks whose modules run compiled, by a plan, and a single process that does what they do together."""

from __future__ import annotations

from typing import Any

import torch
from tests.behaviour.pass_cases import STRATEGIES, model, momentum, parameters_of, train, trained_alone
from torch import nn

from headway.passes import compile
from headway.passes.compile import Compile

EXPECTED_GRAPHS = 2  # of the first block, whose input needs no gradient, and of the others, which are alike


class CallsByName(nn.Module):
    """Calls forwards and no modules, so that no hook of a module runs."""

    def __init__(self) -> None:
        super().__init__()
        self.body = model(plain=True)

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        for each in self.body:
            given = each.forward(given)
        return given


def trained(rank: int, world_size: int) -> dict[str, Any]:
    """Parameters after some steps under each strategy, looked at in between, and of the single process."""
    compile.BACKEND = "aot_eager"
    found: dict[str, Any] = {"alone": trained_alone(model(plain=True), world_size)}
    for name, strategy in STRATEGIES.items():
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        inner, by_name = model(plain=True), CallsByName()
        blocks, some = Compile(modules=("0", "1", "2")), Compile(modules=("body.0", "body.2"))
        train(inner, momentum(inner.parameters()), strategy, rank, world_size, blocks, evaluates=True)
        found[name] = parameters_of(inner)
        found[f"{name}: graphs"] = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        train(by_name, momentum(by_name.parameters()), strategy, rank, world_size, some)
        found[f"{name}: by name"] = parameters_of(by_name)
    return found
