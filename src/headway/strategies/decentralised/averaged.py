"""What is averaged of a worker, by policy, and copies of it in flat buffers.

    parameters   those that require a gradient: always
    buffers      running means and variances of normalisation layers: "averaged", or "local". All other buffers stay as
                 they are: counts of batches are of this worker's own batches, masks and tables are no statistics
    moments      the optimizer's state of a parameter that has the parameter's shape, such as momenta: "local" or
                 "averaged". Step counts stay this worker's own: they correct its own moments' bias

A mean is computed in float32, or in float64 where the tensor is.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn
from torch.optim import Optimizer

from headway.errors import UnsupportedError, UserError

Policy = Literal["local", "averaged"]

STATISTICS = ("running_mean", "running_var")
NEVER_NEGATIVE = frozenset(
    ("running_var", "exp_avg_sq", "max_exp_avg_sq", "square_avg", "acc_delta", "sum", "exp_inf")
)
"""What a later step may make less than the change that a late mean brings: it is not let below zero."""
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True, eq=False)
class Averaged:
    """One tensor that is averaged. ``tensor`` is None where this worker has none yet: it counts as zeros."""

    name: str
    tensor: torch.Tensor | None
    numel: int
    wire: torch.dtype
    is_parameter: bool = False
    never_negative: bool = False


def check_module(module: nn.Module) -> None:
    """Raise UnsupportedError, naming the module or parameter, unless means of ``module`` are what a user expects."""
    for name, child in module.named_modules():
        if isinstance(child, nn.SyncBatchNorm) and child.process_group is None:
            raise UnsupportedError(
                "SyncBatchNorm over all workers would have each forward wait for all of them", got=name,
                fix="Use BatchNorm; its statistics are averaged with the parameters.",
            )  # fmt: skip
    trainable = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
    if not trainable:
        raise UserError("the model has no parameter that requires a gradient", fix="Use it unwrapped.")
    for name, parameter in trainable:
        if type(parameter) is not nn.Parameter or parameter.layout is not torch.strided:
            raise UnsupportedError(
                "a parameter of this kind cannot be averaged", got=f"{name}, a {type(parameter).__name__}",
                expected="dense, whole parameters; none of FSDP or DTensor",
            )  # fmt: skip
        if parameter.dtype not in DTYPES:
            raise UnsupportedError(
                "a parameter's dtype cannot be averaged", got=f"{name}, {parameter.dtype}",
                expected="a floating-point dtype",
            )  # fmt: skip


class Layout:
    """Which tensors of a worker are averaged, in the order in which they lie in flat buffers, as they are now.

    ``digest`` is the same on two workers where that order, all names and all sizes are.
    """

    def __init__(
        self, module: nn.Module, optimizer: Optimizer | None, *, buffers: Policy, moments: Policy
    ) -> None:
        self.tensors: Sequence[Averaged] = [
            *_parameters(module),
            *(_statistics(module) if buffers == "averaged" else ()),
            *(_moments(module, optimizer) if moments == "averaged" and optimizer is not None else ()),
        ]
        self.digest = hashlib.sha256(
            "\n".join(f"{each.name} {each.numel} {each.wire}" for each in self.tensors).encode()
        ).hexdigest()

        self.sizes: dict[torch.dtype, int] = {}
        for each in self.tensors:
            self.sizes[each.wire] = self.sizes.get(each.wire, 0) + each.numel

    def empty(self, device: torch.device | str = "cpu") -> Flat:
        """A flat buffer for all of them."""
        return Flat(
            [torch.empty(self.sizes[wire], dtype=wire, device=device) for wire in sorted(self.sizes, key=str)]
        )

    def fits(self, flat: Flat) -> bool:
        """Whether ``flat`` has room for these tensors, and for no more."""
        return {whole.dtype: whole.numel() for whole in flat.wholes} == self.sizes

    def read(self, flat: Flat) -> None:
        """Copy the tensors into ``flat``."""
        with torch.no_grad():
            for each, part in self._parts(flat):
                if each.tensor is None:
                    part.zero_()
                else:
                    part.view(each.tensor.shape).copy_(each.tensor)

    def write(self, flat: Flat) -> None:
        """Copy ``flat`` into the tensors."""
        with torch.no_grad():
            for each, part in self._parts(flat):
                if each.tensor is not None:
                    each.tensor.copy_(part.view(each.tensor.shape))

    def add(self, change: Flat) -> None:
        """Add ``change`` to the tensors; those that are never negative stay so."""
        with torch.no_grad():
            for each, part in self._parts(change):
                if each.tensor is None:
                    continue
                each.tensor.add_(part.view(each.tensor.shape).to(each.tensor.device))
                if each.never_negative:
                    each.tensor.clamp_(min=0)

    def distance(self, own: Flat, mean: Flat) -> tuple[float, float]:
        """The Euclidean norms of what the parameters of ``own`` differ by from those of ``mean``, and of the latter."""
        apart = size = 0.0
        for (each, mine), (_, common) in zip(self._parts(own), self._parts(mean), strict=True):
            if each.is_parameter:
                apart += float(torch.dist(mine, common)) ** 2
                size += float(torch.linalg.vector_norm(common)) ** 2
        return apart**0.5, size**0.5

    def _parts(self, flat: Flat) -> Iterator[tuple[Averaged, torch.Tensor]]:
        wholes = {whole.dtype: whole for whole in flat.wholes}
        places = dict.fromkeys(wholes, 0)
        for each in self.tensors:
            place = places[each.wire]
            yield each, wholes[each.wire][place : place + each.numel]
            places[each.wire] = place + each.numel


@dataclass(frozen=True, slots=True)
class Flat:
    """All averaged tensors, one after the other: one buffer for each dtype that means are computed in."""

    wholes: Sequence[torch.Tensor]

    @property
    def size_bytes(self) -> int:
        """Of all buffers."""
        return sum(whole.numel() * whole.element_size() for whole in self.wholes)

    def copy_(self, other: Flat) -> None:
        """Take over the values of ``other``."""
        for mine, theirs in zip(self.wholes, other.wholes, strict=True):
            mine.copy_(theirs)

    def subtract_(self, other: Flat) -> None:
        """Subtract the values of ``other``."""
        for mine, theirs in zip(self.wholes, other.wholes, strict=True):
            mine.sub_(theirs)


def _wire(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _parameters(module: nn.Module) -> Iterator[Averaged]:
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            own = parameter.detach()
            yield Averaged(f"parameter/{name}", own, own.numel(), _wire(own.dtype), is_parameter=True)


def _statistics(module: nn.Module) -> Iterator[Averaged]:
    for name, buffer in module.named_buffers():
        kind = name.rpartition(".")[2]
        if kind in STATISTICS and buffer.is_floating_point():
            yield Averaged(
                f"buffer/{name}", buffer, buffer.numel(), _wire(buffer.dtype), never_negative=kind in NEVER_NEGATIVE
            )  # fmt: skip


def _moments(module: nn.Module, optimizer: Optimizer) -> Iterator[Averaged]:
    trainable = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
    found = {
        (name, key): value
        for name, parameter in trainable
        for key, value in optimizer.state.get(parameter, {}).items()
        if isinstance(value, torch.Tensor) and value.shape == parameter.shape and value.dtype in DTYPES
    }
    # A parameter of one element has a step count of its shape: that is none of its moments.
    keys = sorted({key for _, key in found if key != "step"})
    for name, parameter in trainable:
        for key in keys:
            value = found.get((name, key))
            wire = _wire(parameter.dtype if value is None else value.dtype)
            yield Averaged(
                f"moment/{name}/{key}", value, parameter.numel(), wire, never_negative=key in NEVER_NEGATIVE
            )  # fmt: skip
