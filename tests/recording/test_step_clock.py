"""A step is one iteration of the loop, whichever optimizers it steps, and how often."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from headway.recording.step_clock import StepClock


def optimizer_of(*models: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for model in models for p in model.parameters()], lr=0.1)


def counted(clock: StepClock, loop: list[torch.optim.Optimizer], iterations: int) -> list[int]:
    """How many steps are counted in each iteration."""
    return [sum(clock.counts(optimizer) for optimizer in loop) for _ in range(iterations)]


@pytest.mark.parametrize("recorded", ["critic", "generator"])
@pytest.mark.parametrize("critic_steps", [1, 5])
def test_of_two_models_the_one_that_steps_least_counts(recorded: str, critic_steps: int) -> None:
    models = {"critic": nn.Linear(2, 2), "generator": nn.Linear(2, 2)}
    optimizers = {name: optimizer_of(model) for name, model in models.items()}
    clock = StepClock()
    clock.model_is(models.pop(recorded))
    clock.another_is(*models.values())
    found = counted(clock, [optimizers["critic"]] * critic_steps + [optimizers["generator"]], 4)
    assert found[1:] == [1, 1, 1]


def test_one_optimizer_of_both_counts_at_once() -> None:
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    clock = StepClock()
    clock.model_is(first)
    clock.another_is(second)
    assert counted(clock, [optimizer_of(first, second)], 3) == [1, 1, 1]


def test_a_model_that_is_never_stepped_is_not_waited_for_long() -> None:
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    clock = StepClock()
    clock.model_is(first)
    clock.another_is(second)
    optimizer = optimizer_of(first)
    assert sum(counted(clock, [optimizer], 110)) >= 10


def test_an_optimizer_of_nothing_wrapped_does_not_count() -> None:
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    clock = StepClock()
    clock.model_is(model)
    assert counted(clock, [optimizer_of(other), optimizer_of(model)], 2) == [1, 1]


def test_all_optimizers_of_the_model_are_known_though_the_steps_of_one_count() -> None:
    model, other = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), nn.Linear(2, 2)
    own, strange = [optimizer_of(part) for part in model], optimizer_of(other)
    clock = StepClock()
    clock.model_is(model)
    assert counted(clock, [strange, *own], 2) == [1, 1]
    assert set(clock.optimizers) == set(own)
    clock.forget()
    assert clock.optimizers == []


def test_optimizers_of_what_was_trained_before_are_not_the_models() -> None:
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    before, own = optimizer_of(other), optimizer_of(model)
    clock = StepClock()
    counted(clock, [before], 2)  # nothing is wrapped yet
    clock.model_is(model)
    counted(clock, [before, own], 2)
    assert clock.optimizers == [own]
