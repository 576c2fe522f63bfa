"""What a wrapped model may be told, and which models it takes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from headway.errors import UnsupportedError, UserError

JOIN_LIMIT_S = 300.0


@dataclass(frozen=True, slots=True)
class Progress:
    """How far training has come, for a learning rate: ``iteration`` counts this worker's own steps, ``group_iteration``
    is the mean of those that the members of its last group had made."""

    iteration: int
    group_iteration: float


LearningRate = Callable[[Progress], float]


def check_options(staleness: int, moments: str, buffers: str, initial: str, time_limit_s: float) -> None:
    """Raise UnsupportedError or UserError for options that a wrapped model does not have."""
    if staleness not in (0, 1):
        raise UnsupportedError(
            "a mean may be none or one step old", got=f"staleness={staleness}", expected="0 or 1"
        )
    for name, value, allowed in (
        ("moments", moments, ("local", "averaged")),
        ("buffers", buffers, ("local", "averaged")),
        ("initial", initial, ("peer", "own")),
    ):
        if value not in allowed:
            raise UserError(f"{name} cannot be that", got=value, expected=" or ".join(allowed))
    if not 0 < time_limit_s < float("inf"):
        raise UserError("time_limit_s must be positive", got=time_limit_s)


def check_bare(module: nn.Module) -> None:
    """Raise UnsupportedError for a model that is wrapped for several processes: the coordinator would count each."""
    if isinstance(module, nn.parallel.DistributedDataParallel):
        raise UnsupportedError(
            "workers of several processes are not supported: the model is wrapped for them already",
            got=type(module).__name__, expected="one process a worker",
            fix="Pass its .module; workers of a host's processes are made by headway.parallelize, with within_hosts.",
        )  # fmt: skip
