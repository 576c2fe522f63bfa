"""The ways in which the tests of pipelined modules train: each takes a ``Step`` and returns what it was told."""

from __future__ import annotations

import torch
from tests.behaviour.pipelined_models import layers
from tests.behaviour.pipelined_step import Step
from torch import nn


def plainly(step: Step) -> list[float]:
    """Three steps."""
    losses = []
    for data, target in step.batches():
        step.optimizer.zero_grad()
        losses.append(step.train(data, target))
        step.optimizer.step()
    return losses


def clipped_by_torch(step: Step) -> list[float]:
    """By torch's own function, which is given a stage's parameters."""
    said = []
    for data, target in step.batches():
        step.optimizer.zero_grad()
        said.append(step.train(data, target))
        said.append(float(nn.utils.clip_grad_norm_((step.pipelined or step.model).parameters(), 0.05)))
        step.optimizer.step()
    return said


def clipped(step: Step) -> list[float]:
    said = []
    for data, target in step.batches():
        step.optimizer.zero_grad()
        said.append(step.train(data, target))
        said.append(step.clip(0.05))
        step.optimizer.step()
    return said


def accumulated(step: Step) -> list[float]:
    """Two batches' gradients an update."""
    losses = []
    for number, (data, target) in enumerate(step.batches(4)):
        losses.append(step.train(data, target))
        if number % 2:
            step.optimizer.step()
            step.optimizer.zero_grad()
    return losses


def scheduled(step: Step) -> list[float]:
    """A learning rate that falls."""
    falls = torch.optim.lr_scheduler.StepLR(step.optimizer, 1, gamma=0.5)
    losses = []
    for data, target in step.batches():
        step.optimizer.zero_grad()
        losses.append(step.train(data, target))
        step.optimizer.step()
        falls.step()
    return losses


def evaluated(step: Step) -> list[float]:
    """An evaluation between steps, with a batch of another size too; it changes nothing."""
    said = []
    for number, (data, target) in enumerate(step.batches()):
        step.optimizer.zero_grad()
        said.append(step.train(data, target))
        step.optimizer.step()
        said.append(step.evaluate(data))
        if number == 1:
            said.append(step.evaluate(torch.cat([data, -data, 2 * data])))
    return said


def evaluated_around(step: Step) -> list[float]:
    """An evaluation before the first step too, and between steps one that is split into fewer parts."""
    said = []
    for data, target in step.batches():
        said += [step.evaluate(data), step.evaluate(data[:9])]
        step.optimizer.zero_grad()
        said.append(step.train(data, target))
        step.optimizer.step()
    return said


def resumed(step: Step) -> list[float]:
    """The state of a model goes into it again."""
    losses = plainly(step)
    kept = step.whole_state()
    plainly(step)
    step.load(kept)
    return losses + plainly(step)


def from_a_checkpoint(step: Step) -> list[float]:
    """Another model goes on in another order, from the state of the model and the optimizer."""
    losses = plainly(step)
    kept, state = step.whole_state(), step.optimizer.state_dict()
    other = step.again(layers(seed=3), order="gpipe")
    other.load(kept)
    other.optimizer.load_state_dict(state)
    losses += plainly(other)
    step.load(other.whole_state())
    return losses


def clipped_by_value(step: Step) -> list[float]:
    losses = []
    for data, target in step.batches():
        step.optimizer.zero_grad()
        losses.append(step.train(data, target))
        step.clip_values(0.01)
        step.optimizer.step()
    return losses


def set_to_zero(step: Step) -> list[float]:
    """Gradients stay, as zeros."""
    losses = []
    for data, target in step.batches():
        step.optimizer.zero_grad(set_to_none=False)
        losses.append(step.train(data, target))
        step.optimizer.step()
    return losses


def in_parts(step: Step) -> list[float]:
    """Modules whose buffers are of what they see."""
    said = []
    for data, target in step.batches():
        step.optimizer.zero_grad()
        said.append(step.train_in_parts(data, target))
        step.optimizer.step()
        said.append(step.evaluate(data))
    return said


def in_bfloat16(step: Step) -> list[float]:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return plainly(step)
