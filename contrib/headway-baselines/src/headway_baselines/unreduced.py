"""UnreducedDataParallel: in the place of DistributedDataParallel, a wrapper that reduces no gradients."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NoReturn, Self

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from headway import torch_private
from headway.errors import UnsupportedError, UserError
from headway.scheduling.schedule import Schedule
from headway.strategies.base import Strategy
from headway.strategies.decoupled.checks import check_device_ids
from headway.strategies.live import averaged, replicas
from headway.strategies.live.channels.wiring import wiring_of
from headway.strategies.live.existing_group import existing_group
from headway.strategies.live.module_spec import model_spec
from headway.strategies.live.stepping import Stepping, weakly

WITHOUT_EFFECT = frozenset((
    "dim", "broadcast_buffers", "bucket_cap_mb", "bucket_cap_mb_list", "find_unused_parameters", "check_reduction",
    "gradient_as_bucket_view", "static_graph", "skip_all_reduce_unused_params", "batched_grad_copy",
    "forward_sync_buffers",
))  # fmt: skip
"""What is about gradients that are reduced, or buffers that are broadcast in each forward: neither happens."""


class UnreducedDataParallel(DistributedDataParallel):
    """``module`` as rank 0 has it, unless ``init_sync`` is False; gradients stay each rank's own.

    A base of wrappers, which ``called`` names in messages. They take the arguments of ``DistributedDataParallel``.
    ``decide`` says what is agreed on for so many ranks. Raises UnsupportedError for models and options that would
    train wrongly, UserError where there is no process group or where ranks do not agree on the model or the plan.
    """

    called: ClassVar[str]
    strategy: Strategy
    _stepping: Stepping

    def __init__(
        self,
        module: nn.Module,
        decide: Callable[[int], Schedule],
        *,
        device_ids: Any = None,
        output_device: Any = None,
        init_sync: bool = True,
        process_group: dist.ProcessGroup | None = None,
        **ddp_options: Any,
    ) -> None:
        nn.Module.__init__(self)
        check_options(ddp_options, self.called)
        check_module(module)
        group = existing_group(process_group)
        self.device = next(each for each in module.parameters() if each.requires_grad).device
        moves = check_device_ids(self.device, device_ids, output_device)
        self._wiring = wiring_of(self.device, group)
        self.schedule = decide(dist.get_world_size(group))
        replicas.check_agreement(model_spec(module), self.schedule, group, self._wiring.messages)
        if init_sync:
            replicas.broadcast(module.parameters(), group, self._wiring.messages)
            replicas.broadcast(module.buffers(), group, self._wiring.messages)
        self.module = module
        self.process_group = group
        self.device_ids = [self.device.index] if moves else None
        self.output_device = self.device.index if moves else None
        self.device_type = self.device.type
        self.require_backward_grad_sync = self.require_forward_param_sync = True
        self.find_unused_parameters = self.static_graph = self.gradient_as_bucket_view = False
        self.mixed_precision = None
        handle = module.register_load_state_dict_post_hook(_Loaded(weakref.ref(self)))
        weakref.finalize(self, handle.remove).atexit = False

    def loaded(self) -> None:
        """A state was loaded into the module, through this wrapper or without it. Nothing by default."""

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module."""
        if self.device_ids:
            inputs, kwargs = torch_private.move_inputs_like_ddp(inputs, kwargs, self.device)
        return self.module(*inputs, **kwargs)

    def finish(self) -> None:
        """Have all ranks hold one model. Collective."""
        raise NotImplementedError

    def updated_by(self, optimizer: Optimizer) -> None:
        """``optimizer`` is the model's: without this, it is found at its first step.

        Raises UserError where it updates nothing of the model.
        """
        self._stepping.bind_once(optimizer)

    def follow_steps(
        self,
        optimizer: Optimizer | None,
        bound: Callable[[Self, Optimizer], None],
        before: Callable[[Self], None],
        after: Callable[[Self], None],
    ) -> None:
        """Act on this wrapper when its optimizer is known, and around each step of it, for as long as it is held."""
        self._stepping = Stepping(self.module, weakly(self, bound), weakly(self, before), weakly(self, after))
        weakref.finalize(self, self._stepping.close).atexit = False
        if optimizer is not None:
            self._stepping.bind(optimizer)

    def compile(self, *_args: Any, **_kwargs: Any) -> None:
        """Raises UnsupportedError: what is inside is compiled, before it is wrapped."""
        raise UnsupportedError(
            f"a model under {self.called} cannot be compiled as a whole", got="compile() of the wrapper",
            fix="Compile with model = torch.compile(model) before wrapping.",
        )  # fmt: skip

    def join(self, *_args: Any, **_kwargs: Any) -> NoReturn:
        """Raises UnsupportedError."""
        self._refuse("join()")

    def register_comm_hook(self, state: object, hook: Any) -> NoReturn:
        """Raises UnsupportedError: no gradients are reduced."""
        self._refuse("register_comm_hook()")

    def _refuse(self, what: str) -> NoReturn:
        raise UnsupportedError(f"{what} is not supported by {self.called}", fix="Leave it out, or use ddp.")

    def _set_static_graph(self) -> None:
        """Nothing: no gradients are reduced."""

    def _get_ddp_logging_data(self) -> dict[str, Any]:
        group = self.process_group
        return {"world_size": dist.get_world_size(group), "rank": dist.get_rank(group)}

    def __reduce_ex__(self, _protocol: Any) -> Any:
        """A copy is an ordinary DistributedDataParallel: it takes no part in what this wrapper does."""
        return torch_private.pickle_as_stock_ddp(self)


class _Loaded:
    """Called after each ``load_state_dict()``. A copy of it, as part of a copied module, does nothing."""

    def __init__(self, wrapped: weakref.ref[UnreducedDataParallel] | None = None) -> None:
        self._wrapped = wrapped

    def __call__(self, *_args: Any) -> None:
        if self._wrapped is not None and (wrapped := self._wrapped()) is not None:
            wrapped.loaded()

    def __reduce__(self) -> tuple[Any, ...]:
        return _Loaded, ()


def check_module(module: nn.Module) -> None:
    """Raise UnsupportedError or UserError for a model that would be trained wrongly."""
    for name, child in module.named_modules():
        if isinstance(child, DistributedDataParallel):
            raise UnsupportedError(
                "the model is already wrapped", got=name or type(child).__name__, fix="Wrap the bare module.",
            )  # fmt: skip
    averaged.check_module(module)
    if torch_private.ddp_ignores_parameters(module):
        raise UnsupportedError("parameters that DDP is told to ignore are not supported", fix="Use ddp.")


def check_options(options: Mapping[str, Any], called: str) -> None:
    """Raise UnsupportedError for options of DistributedDataParallel that change what is trained."""
    for name, value in options.items():
        if name not in WITHOUT_EFFECT and value is not None and value is not False:
            raise UnsupportedError(f"{name} is not supported by {called}", fix="Leave it out, or use ddp.")


def refusal(wrapped: nn.Module, *, compiled_around: bool, called: str) -> str:
    """Why such a wrapper would refuse to take the place of a model's; "" where it would not."""
    if compiled_around:
        return "the model was compiled after it was wrapped"
    module = wrapped.module
    assert isinstance(module, nn.Module)
    try:
        check_module(module)
        check_options({"mixed_precision": getattr(wrapped, "mixed_precision", None)}, called)
    except UserError as refused:
        return str(refused).partition(". ")[0]
    return ""
