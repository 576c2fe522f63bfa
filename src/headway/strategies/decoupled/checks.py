"""What of a model or of DistributedDataParallel the decoupled all-reduce refuses, and what is trained."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import pairwise
from typing import Any, NoReturn

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from headway import torch_private
from headway.errors import UnsupportedError, UserError
from headway.scheduling.buckets import BucketSchedule
from headway.strategies.decoupled import deferred
from headway.strategies.live.module_spec import check_dense_gradients

DEVICE_TYPES = ("cpu", "cuda")
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


def refuse(what: str, fix: str = "Use stock DDP.") -> NoReturn:
    """Raise UnsupportedError for ``what``."""
    raise UnsupportedError(f"{what} is not supported by the decoupled all-reduce", fix=fix)


def refuse_options(**options: Any) -> None:
    """Raise UnsupportedError for the first option that was given a value."""
    for name, value in options.items():
        if value is not None and value is not False and value != []:
            refuse(f"{name}={value if isinstance(value, bool | int | list) else '…'}")


def check_module(module: nn.Module, mine: Collection[int] = ()) -> None:
    """Raise UnsupportedError, naming the module or parameter, unless ``module`` can be trained rightly.

    Parameters of the identities ``mine`` may be deferred already.
    """
    for name, child in module.named_modules():
        where = name or type(child).__name__
        if isinstance(child, DistributedDataParallel):
            raise UnsupportedError("the model is already wrapped", got=where, fix="Wrap the bare module.")
        if torch_private.is_compiled(child) and not torch_private.has_compiled_forward(child):
            raise UnsupportedError(
                "modules that are compiled in place are not supported", got=where,
                fix="Compile with model = torch.compile(model) before wrapping, or use stock DDP.",
            )  # fmt: skip
        if isinstance(child, torch.jit.ScriptModule):
            raise UnsupportedError("TorchScript modules are not supported", got=where, fix="Use stock DDP.")
    check_dense_gradients(module, "Leave out sparse=True, or use stock DDP.")
    if torch_private.ddp_ignores_parameters(module):
        raise UnsupportedError(
            "parameters that DDP is told to ignore are not supported", fix="Use stock DDP."
        )
    trainable = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
    if not trainable:
        raise UserError("the model has no parameter that requires a gradient", fix="Use it unwrapped.")
    device = trainable[0][1].device
    for name, parameter in module.named_parameters():
        if parameter.device.type not in DEVICE_TYPES:
            raise UnsupportedError(
                "a parameter's device is not supported", got=f"{name} on {parameter.device}",
                expected=" or ".join(DEVICE_TYPES), fix="Use stock DDP.",
            )  # fmt: skip
        if parameter.requires_grad and parameter.device != device:
            raise UnsupportedError(
                "the trainable parameters are on several devices",
                got=f"{trainable[0][0]} on {device}, {name} on {parameter.device}",
                fix="Put the model on one device in each process, or use stock DDP.",
            )
    for name, parameter in trainable:
        if id(parameter) not in mine:
            _check_parameter(name, parameter)
    _check_memory(trainable)


def _check_memory(trainable: Sequence[tuple[str, nn.Parameter]]) -> None:
    """Refuse parameters that are written where another one lies: an update of both would lose one of them."""
    with torch_private.without_subclass_dispatch():
        spans = sorted(
            (p.data_ptr(), p.data_ptr() + _extent_bytes(p), name) for name, p in trainable if p.numel()
        )
    for (_, end, name), (start, _, other) in pairwise(spans):
        if start < end:
            raise UnsupportedError(
                "two parameters share memory without being one", got=f"{name} and {other}",
                fix="Tie modules by assigning the Parameter itself: head.weight = embedding.weight.",
            )  # fmt: skip


def _extent_bytes(parameter: nn.Parameter) -> int:
    reach = sum((size - 1) * stride for size, stride in zip(parameter.shape, parameter.stride(), strict=True))
    return (reach + 1) * parameter.element_size()


def check_casts(schedule: BucketSchedule, device: torch.device) -> None:
    """Raise UnsupportedError for a schedule that casts gradients of a model on ``device``, unless that is the CPU."""
    if schedule.halves is not None and device.type != "cpu":
        raise UnsupportedError(
            "the decoupled all-reduce casts gradients on the CPU alone", got=f"wire, and a model on {device}",
            fix="Leave out wire, or use ddp.",
        )  # fmt: skip


def check_device_ids(device: torch.device, device_ids: Any, output_device: Any) -> bool:
    """Whether inputs are to be moved to ``device``: as under DDP, where ``device_ids`` names it.

    Raises UnsupportedError where these name anything but the parameters' own device.
    """
    named = list(device_ids or [])
    for what, values in (
        ("device_ids", named),
        ("output_device", [] if output_device is None else [output_device]),
    ):
        if values and (
            device.type != "cuda" or [torch_private.device_index(v) for v in values] != [device.index]
        ):
            raise UnsupportedError(
                f"{what} names a device that the parameters are not on", got=f"{values}, parameters on {device}",
                expected=f"{device.index}" if device.type == "cuda" else "None",
                fix="Move the model to that device before wrapping it.",
            )  # fmt: skip
    return bool(named)


def trainable_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters of ``module`` that require a gradient, by name; shared ones once."""
    return {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}


def _check_parameter(name: str, parameter: nn.Parameter) -> None:
    if deferred.entry_of(parameter) is not None:
        raise UnsupportedError(
            "a parameter is part of another wrapped model", got=name, fix="Wrap one of them."
        )
    if type(parameter) is not nn.Parameter:
        raise UnsupportedError(
            "subclasses of Parameter are not supported", got=f"{name}, a {type(parameter).__name__}",
            expected="torch.nn.Parameter", fix="Use stock DDP.",
        )  # fmt: skip
    if parameter.dtype not in DTYPES or parameter.layout is not torch.strided:
        raise UnsupportedError(
            "a parameter's dtype or layout is not supported", got=f"{name}, {parameter.dtype}, {parameter.layout}",
            expected="a dense tensor of a floating-point dtype", fix="Use stock DDP.",
        )  # fmt: skip
    if torch_private.steps_in_backward(parameter):
        raise UnsupportedError(
            "an optimizer inside backward is not supported", got=name, fix="Use stock DDP."
        )


def trainable_now(module: nn.Module, compiled: Collection[int]) -> frozenset[int]:
    """The identities of all parameters of ``module`` that require a gradient.

    Raises UnsupportedError for modules that were compiled since: ``compiled`` are the identities of earlier ones.
    """
    found: set[int] = set()
    with torch_private.without_subclass_dispatch():
        for child in module.modules():
            if torch_private.is_compiled(child) and id(child) not in compiled:
                raise UnsupportedError(
                    "a module was compiled after it was wrapped", got=type(child).__name__,
                    fix="Compile with model = torch.compile(model) before wrapping, or use stock DDP.",
                )  # fmt: skip
            found.update(
                id(p)
                for p in torch_private.own_parameters(child).values()
                if p is not None and p.requires_grad
            )
    return frozenset(found)


class TrainedSet:
    """The modules and parameters in ``module`` now, which parameters require a gradient, and what is compiled."""

    def __init__(self, module: nn.Module) -> None:
        self._modules = list(module.modules())
        self._seen = self._now()

    def changed(self, module: nn.Module) -> bool:
        """Whether ``module`` is another, or any parameter or module in it has come, gone, been frozen or unfrozen, or
        compiled in place since.
        """
        return module is not self._modules[0] or self._now() != self._seen

    def _now(self) -> tuple[list[int], list[bool], list[int], list[tuple[Any, ...]]]:
        own = [torch_private.own_parameters(each).values() for each in self._modules]
        parameters = [p for those in own for p in those if p is not None]
        parts = [id(part) for each in self._modules for part in torch_private.own_modules(each).values()]
        marks = [torch_private.compilation_marks(each) for each in self._modules]
        with torch_private.without_subclass_dispatch():
            return [id(p) for p in parameters], [p.requires_grad for p in parameters], parts, marks
