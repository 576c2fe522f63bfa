"""Hooks on optimizers' steps come and go in the middle of steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from headway.torch_private.optimizers import StepHook, after_every_step, before_every_step


def stepped(*args: Any) -> Any:
    parameter = torch.nn.Parameter(torch.zeros(1))
    parameter.grad = torch.ones(1)
    return torch.optim.SGD([parameter], lr=0.1).step(*args)


@pytest.mark.parametrize("add", [before_every_step, after_every_step])
def test_they_come_and_go_within_a_step(add: Any) -> None:
    seen: list[str] = []
    hooks: list[StepHook] = []

    def first(*_: Any) -> None:
        seen.append("first")
        hooks[0].remove()
        hooks[1].remove()
        hooks.append(add(lambda *_: seen.append("added")))

    behind = register_optimizer_step_post_hook(lambda *_: seen.append("of the script"))
    hooks += [add(first), add(lambda *_: seen.append("removed before its turn"))]
    try:
        stepped()
        assert sorted(seen) == ["first", "of the script"]
        stepped()
    finally:
        behind.remove()
        for hook in hooks:
            hook.remove()
    assert sorted(seen) == ["added", "first", "of the script", "of the script"]
    stepped()
    assert len(seen) == 4


def test_each_is_given_what_those_before_have_made_of_the_arguments() -> None:
    other = before_every_step(lambda _, args, kwargs: ((args[0], lambda: 2.0), kwargs))
    seen: list[Any] = []
    looks = before_every_step(lambda _, args, kwargs: seen.append(args[1]()))
    try:
        assert stepped() == 2.0
        assert seen == [2.0]
    finally:
        other.remove()
        looks.remove()
