"""What another implementation of a job's optimizer does, measured: ``python -m headway.measuring.optimizers TRACE``.

TRACE is the recording of the job. Tensors of the sizes and types of its parameters are updated in turn by torch's own
choice of implementation and by the others, with as many threads as torch has here (OMP_NUM_THREADS). The median of the
rounds' ratios is what counts. It is written into TRACE, for ``headway optimize``.
"""

from __future__ import annotations

import inspect
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from headway import torch_private
from headway.errors import UnsupportedError, UserError
from headway.job import Job, MeasuredEffect
from headway.measuring.pass_runs import run_command_line
from headway.memory.pass_watch import Allocations
from headway.model import ModelSpec
from headway.passes.optimizer import IMPLEMENTATIONS, OptimizerImplementation, effect_name, switch

ROUNDS = 9
MOMENTUM = 0.9


def measured_optimizers(job: Job, device: torch.device, rounds: int = ROUNDS) -> dict[str, MeasuredEffect]:
    """The effects of all implementations that torch has of the optimizer of ``job`` on ``device``, by their names.

    Raises UnsupportedError where the job is cut into stages, or optimizers of several classes stepped, or others than
    torch's own.
    """
    names = job.optimizers.names
    if len(job.stages) > 1 or len(names) != 1 or not _is_torchs(names[0]):
        raise UnsupportedError(
            "this job's optimizer cannot be measured", got=", ".join(names) or "none known",
            expected="one class of torch.optim that has other implementations, and a model that every rank trains",
        )  # fmt: skip
    if why := job.refusals.get(OptimizerImplementation.name):
        raise UnsupportedError(
            "this job's optimizer has another implementation than torch's own choice", got=why,
            expected="a script that leaves it to torch", fix="Leave the option out, and record the job again.",
        )  # fmt: skip
    found = {}
    for implementation in IMPLEMENTATIONS:
        parameters = _parameters(job.model, device)
        stock, other = (_optimizer(names[0], parameters, job.model) for _ in range(2))
        try:
            switch(other, implementation)
        except UnsupportedError:  # torch has none, or none for this device
            continue
        _held_bytes(stock)
        held_bytes = _held_bytes(other)
        factor = statistics.median(_ratio(other, stock, device) for _ in range(rounds))
        found[effect_name(implementation, names[0])] = MeasuredEffect(factor, held_bytes)
    return found


def _is_torchs(name: str) -> bool:
    kind = getattr(torch.optim, name, None)
    return isinstance(kind, type) and "foreach" in inspect.signature(kind).parameters


def _parameters(model: ModelSpec, device: torch.device) -> list[nn.Parameter]:
    """As many of the same shapes and types, with gradients."""
    parameters = []
    for parameter in model.parameters:
        dtype = getattr(torch, parameter.dtype)
        parameters.append(nn.Parameter(torch.full(parameter.shape, 0.5, device=device, dtype=dtype)))
        parameters[-1].grad = torch.full_like(parameters[-1], 1e-3)
    return parameters


def _optimizer(name: str, parameters: list[nn.Parameter], model: ModelSpec) -> torch.optim.Optimizer:
    """One of that class. State of SGD, and more than one of RMSprop, says that they have momentum."""
    make: Any = getattr(torch.optim, name)
    least_bytes = {"SGD": 0, "RMSprop": model.size_bytes}.get(name)
    momentum = least_bytes is not None and model.optimizer_state_bytes > 1.5 * least_bytes
    made: torch.optim.Optimizer = make(parameters, lr=1e-3, **({"momentum": MOMENTUM} if momentum else {}))
    return made


def _held_bytes(optimizer: torch.optim.Optimizer) -> int:
    """What a step holds besides state, which the first one makes."""
    optimizer.step()
    watch = Allocations()
    with watch:
        optimizer.step()
    return watch.peak_bytes()


def _ratio(one: torch.optim.Optimizer, other: torch.optim.Optimizer, device: torch.device) -> float:
    other_ns = _step_ns(other, device)
    return _step_ns(one, device) / other_ns


def _step_ns(optimizer: torch.optim.Optimizer, device: torch.device) -> int:
    _wait_for(device)
    begin_ns = time.perf_counter_ns()
    optimizer.step()
    _wait_for(device)
    return max(1, time.perf_counter_ns() - begin_ns)


def _wait_for(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def main(arguments: Sequence[str]) -> int:
    """Measure for the trace that is named, and write it into its folder. Returns the exit status."""
    return run_command_line(arguments, __doc__, _measure)


def _measure(arguments: Sequence[str]) -> None:
    from headway.replayer.measured_effects import save_effects
    from headway.replayer.replayer import Replayer
    from headway.trace.folder import load_trace

    if len(arguments) != 1:
        raise UserError("one trace is measured for", got=f"{len(arguments)} arguments", expected="TRACE")
    trace = load_trace(arguments[0])
    device = torch_private.compute_device()
    effects = measured_optimizers(Replayer(trace).job, device)
    save_effects(trace, effects, str(device))
    for name, effect in effects.items():
        print(f"{name}: {effect.factor:.3g} times the time, {effect.held_bytes} bytes besides")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
