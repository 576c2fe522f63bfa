"""What is averaged of a worker, by policy, and copies of it in flat buffers.

    parameters   those that require a gradient, or have been averaged before they were frozen: always
    buffers      running means and variances of normalisation layers: "averaged", or "local". All other buffers stay as
                 they are: counts of batches are of this worker's own batches, masks and tables are no statistics
    moments      the optimizer's state of a parameter that has the parameter's shape, such as momenta: "local" or
                 "averaged". Step counts stay this worker's own: they correct its own moments' bias

The whole model, of which workers end with one, is all its parameters and statistics, averaged, and all other buffers as
one worker has them.

A mean is computed in float32, or in float64 where the tensor is.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn
from torch.optim import Optimizer

from headway import torch_private
from headway.errors import UnsupportedError, UserError

Policy = Literal["local", "averaged"]

STATISTICS = ("running_mean", "running_var")
NEVER_NEGATIVE = frozenset(
    ("running_var", "exp_avg_sq", "max_exp_avg_sq", "square_avg", "acc_delta", "sum", "exp_inf")
)
"""What a later step may make less than the change that a late mean brings: then it is left as it is."""
AS_IT_IS = torch.uint8
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True, eq=False)
class Averaged:
    """One tensor that is averaged. ``tensor`` is None where this worker has none yet: it counts as zeros.

    One whose ``wire`` is bytes (``AS_IT_IS``) is not averaged: all take it as one worker has it.
    """

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

    def __init__(self, tensors: Sequence[Averaged]) -> None:
        self.tensors = tensors
        self.digest = hashlib.sha256(
            "\n".join(f"{each.name} {each.numel} {each.wire}" for each in self.tensors).encode()
        ).hexdigest()

        self.sizes: dict[torch.dtype, int] = {}
        for each in self.tensors:
            self.sizes[each.wire] = self.sizes.get(each.wire, 0) + each.numel

    @property
    def parameters(self) -> set[str]:
        """The names of the parameters among them."""
        return {each.name.removeprefix("parameter/") for each in self.tensors if each.is_parameter}

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
                elif each.wire is AS_IT_IS:
                    part.copy_(each.tensor.reshape(-1).view(AS_IT_IS))
                else:
                    part.view(each.tensor.shape).copy_(each.tensor)

    def write(self, flat: Flat) -> None:
        """Copy ``flat`` into the tensors."""
        with torch.no_grad():
            for each, part in self._parts(flat):
                if each.tensor is None:
                    continue
                if each.wire is AS_IT_IS:  # a copy begins where its own type may begin
                    part = part.clone().view(each.tensor.dtype)
                each.tensor.copy_(part.view(each.tensor.shape))

    def add(self, change: Flat) -> None:
        """Add ``change`` to the tensors, but to no element that would become negative and never is.

        All moments of such an element are left as they are: a first moment without the second one that it came with
        would make the next step huge.
        """
        with torch.no_grad():
            left = self._would_be_negative(change)
            for each, part in self._parts(change):
                if each.tensor is None:
                    continue
                added = part.view(each.tensor.shape).to(each.tensor.device)
                if (own := left.get(_owner(each))) is not None:
                    added = torch.where(own, 0, added)
                each.tensor.add_(added)

    def _would_be_negative(self, change: Flat) -> Mapping[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = {}
        for each, part in self._parts(change):
            if each.tensor is not None and each.never_negative:
                negative = each.tensor + part.view(each.tensor.shape).to(each.tensor.device) < 0
                owner = _owner(each)
                found[owner] = found[owner] | negative if owner in found else negative
        return found

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


def training_layout(
    module: nn.Module,
    optimizer: Optimizer | None,
    *,
    buffers: Policy,
    moments: Policy,
    earlier: Collection[str] = (),
) -> Layout:
    """What is averaged while ``module`` trains, with parameters that were averaged ``earlier`` and are frozen now."""
    return Layout([
        *_parameters(module, lambda name, parameter: parameter.requires_grad or name in earlier),
        *(_statistics(module) if buffers == "averaged" else ()),
        *(_moments(module, optimizer) if moments == "averaged" and optimizer is not None else ()),
    ])  # fmt: skip


def whole_layout(module: nn.Module, *, buffers: Policy) -> Layout:
    """The whole model, of which all workers end with the same."""
    statistics = list(_statistics(module)) if buffers == "averaged" else []
    others = _others(module, {each.name.removeprefix("buffer/") for each in statistics})
    return Layout(
        [*_parameters(module, lambda _, parameter: can_be_averaged(parameter)), *statistics, *others]
    )


def _wire(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _owner(each: Averaged) -> str:
    """What an element's tensors have in common: moments their parameter."""
    return each.name.rpartition("/")[0] if each.name.startswith("moment/") else each.name


def can_be_averaged(parameter: nn.Parameter) -> bool:
    """Whether it is dense and whole, of a floating-point dtype."""
    return (
        type(parameter) is nn.Parameter
        and parameter.layout is torch.strided
        and parameter.dtype in DTYPES
        and not parameter.is_meta
    )


def _parameters(module: nn.Module, which: Callable[[str, nn.Parameter], bool]) -> Iterator[Averaged]:
    for name, parameter in module.named_parameters():
        if which(name, parameter):
            own = parameter.detach()
            yield Averaged(f"parameter/{name}", own, own.numel(), _wire(own.dtype), is_parameter=True)


def _statistics(module: nn.Module) -> Iterator[Averaged]:
    for name, buffer in module.named_buffers():
        kind = name.rpartition(".")[2]
        if kind in STATISTICS and buffer.is_floating_point():
            yield Averaged(
                f"buffer/{name}", buffer, buffer.numel(), _wire(buffer.dtype), never_negative=kind in NEVER_NEGATIVE
            )  # fmt: skip


def _others(module: nn.Module, averaged: Collection[str]) -> Iterator[Averaged]:
    """Saved buffers that are not averaged: counts, codebooks, what a script keeps there."""
    for name, buffer in torch_private.persistent_buffers(module):
        if name not in averaged and buffer.numel() and buffer.layout is torch.strided and not buffer.is_meta:
            size_bytes = buffer.numel() * buffer.element_size()
            yield Averaged(f"{buffer.dtype}/{name}", buffer, size_bytes, AS_IT_IS)


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
