from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from headway.errors import UnsupportedError
from headway.job import Job, OptimizerUse
from headway.measuring.optimizers import measured_optimizers
from headway.passes.optimizer import OptimizerImplementation
from headway.strategies.data_parallel.module_spec import model_spec

CPU = torch.device("cpu")


def job(*names: str, state: int = 0) -> Job:
    spec = model_spec(nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 4)))
    spec = spec.model_copy(update={"optimizer_state_bytes": state * spec.size_bytes})
    return replace(Job.of(spec, 2), optimizers=OptimizerUse(names, 1))


def test_every_implementation_that_torch_has_is_measured() -> None:
    found = measured_optimizers(job("AdamW", state=2), CPU, rounds=2)
    assert set(found) == {"optimizer foreach AdamW", "optimizer fused AdamW"}
    assert all(each.factor > 0 for each in found.values())
    size_bytes = job().model.size_bytes
    assert found["optimizer foreach AdamW"].held_bytes >= size_bytes, "all denominators at once"
    assert found["optimizer fused AdamW"].held_bytes < size_bytes / 10
    assert set(measured_optimizers(job("RMSprop", state=1), CPU, rounds=2)) == {"optimizer foreach RMSprop"}


def test_what_is_measured_is_what_a_replay_takes() -> None:
    measured = replace(job("SGD", state=1), measured=measured_optimizers(job("SGD", state=1), CPU, rounds=2))
    for name, effect in measured.measured.items():
        written = {"implementation": "fused" if "fused" in name else "foreach"}
        assert OptimizerImplementation.model_validate(written)._effect(measured) == effect


@pytest.mark.parametrize(
    "names", [(), ("SGD", "AdamW"), ("LBFGS",), ("Mine",), ("lr_scheduler",), ("Optimizer",)]
)
def test_what_is_not_torchs_own_is_refused(names: tuple[str, ...]) -> None:
    with pytest.raises(UnsupportedError, match="cannot be measured"):
        measured_optimizers(job(*names), CPU)
