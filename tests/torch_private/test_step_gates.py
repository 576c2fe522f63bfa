"""A gate around steps decides whether they are made, whatever class an optimizer is of and whenever it was made."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = [pytest.mark.processes, pytest.mark.timeout(60)]

# In a process of its own: a gate stays for ever.
SCRIPT = """
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW
from headway.torch_private.optimizers import unhooked_step
from headway.torch_private.optimizers import gate_steps, is_in_gate
from headway.torch_private.optimizers import before_every_step

open_, hooked, asked = True, [], []

def parameter():
    made = nn.Parameter(torch.ones(2))
    made.grad = torch.ones(2)
    return made

def gate(optimizer, step, args, kwargs):
    asked.append(type(optimizer).__name__)
    return step(*args, **kwargs) if open_ else "left out"

class Own(SGD):
    def step(self, closure=None):
        super().step(closure)
        return "own"

early = SGD([parameter()], lr=1.0)
scheduled = AdamW([parameter()], lr=1.0)
taken = torch.optim.lr_scheduler.LambdaLR(scheduled, lambda _: 1.0)
gate_steps(gate)
gate_steps(gate)
before_every_step(lambda optimizer, *_: hooked.append(is_in_gate(optimizer)))
own, late = Own([parameter()], lr=1.0), Adam([parameter()], lr=1.0)
for each in (early, own, late):
    (mine,) = each.param_groups[0]["params"]
    open_ = False
    assert each.step() == "left out" and mine.tolist() == [1, 1] and not hooked, type(each)
    open_ = True
    assert each.step() == ("own" if each is own else None)
    assert torch.allclose(mine, torch.zeros(2), atol=1e-6)
    assert hooked and all(hooked), "hooks run in steps that are made"
    assert not is_in_gate(each)
    hooked.clear()
assert asked == ["SGD", "SGD", "Own", "Own", "Adam", "Adam"], asked
scheduled.step()
assert hooked == [False], "who holds a step already does not ask"
late_scheduled = Adam([parameter()], lr=1.0)
torch.optim.lr_scheduler.LambdaLR(late_scheduled, lambda _: 1.0)
open_ = False
assert late_scheduled.step() == "left out"
raw = unhooked_step(Adam)
hooked.clear()
raw(late_scheduled)
assert not hooked and asked[-1] == "Adam" and len(asked) == 7, "neither hooks nor gate"
"""


def test_every_step_asks() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], check=False, capture_output=True, text=True, timeout=50
    )
    assert done.returncode == 0, done.stderr
