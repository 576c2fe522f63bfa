"""DDP whose buckets are sent as something else than gradients are: on the CPU by channels, elsewhere by casting."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from headway import torch_private
from headway.compression.cast import Cast, is_only_cast
from headway.compression.codec import FLOATS
from headway.errors import UnsupportedError
from headway.strategies.ddp.compressed import Compressing, send_bucket
from headway.strategies.ddp.policy import DistributedDataParallelStrategy
from headway.strategies.live.channels import retirement
from headway.strategies.live.module_spec import check_dense_gradients

_SENT_AS = "_headway_sent_as"
_COMPRESSING = "_headway_compressing"


def check(module: nn.Module, strategy: DistributedDataParallelStrategy) -> None:
    """Raise UnsupportedError for a module whose gradients could not be sent as ``strategy`` says."""
    if not any(strategy.wire):
        return
    trained = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
    for name, parameter in trained:
        if str(parameter.dtype).removeprefix("torch.") not in FLOATS:
            raise UnsupportedError(
                "only gradients of real numbers can be sent as something else",
                got=f"{name}: {parameter.dtype}", expected=" or ".join(FLOATS), fix="Leave out wire.",
            )  # fmt: skip
    check_dense_gradients(module, "Leave out wire.")
    elsewhere = sorted({str(p.device) for _, p in trained if p.device.type != "cpu"})
    others = [each.describe() for each in strategy.wire if each is not None and not is_only_cast(each)]
    if elsewhere and others:
        raise UnsupportedError(
            "codecs that do more than cast are for parameters on the CPU",
            got=f"{others[0]}, parameters on {', '.join(elsewhere)}",
            expected="wire with a dtype alone", fix="Choose bfloat16 or float16.",
        )  # fmt: skip


def install(wrapped: DistributedDataParallel, strategy: DistributedDataParallelStrategy) -> None:
    """Have ``wrapped`` send its buckets as ``strategy`` says. Collective.

    Raises UnsupportedError where ``check`` does, and for DDP's own mixed precision, which has a hook of its own.
    """
    check(wrapped.module, strategy)
    if getattr(wrapped, "mixed_precision", None) is not None:
        raise UnsupportedError(
            "DDP with mixed_precision sends its buckets as that says", got="wire and mixed_precision",
            fix="Leave out one of them.",
        )  # fmt: skip
    dumped = strategy.model_dump(mode="json")["wire"]
    setattr(wrapped, _SENT_AS, dumped)
    torch_private.copy_without_hook(wrapped, _SENT_AS, _COMPRESSING)
    retirement.end_unused()
    if wrapped.process_group.size() == 1:
        return
    if any(p.device.type != "cpu" for p in wrapped.module.parameters() if p.requires_grad):
        wrapped.register_comm_hook((wrapped.process_group, strategy), _reduce)
        return
    compressing = Compressing(wrapped, strategy)
    setattr(wrapped, _COMPRESSING, compressing)
    wrapped.register_comm_hook(compressing, send_bucket)
    retirement.when_collected(wrapped, compressing.abandon)


def installed(wrapped: DistributedDataParallel) -> list[dict[str, Any] | None] | None:
    """The option ``wire`` of the strategy that ``install`` was given, if it was called."""
    sent_as: list[dict[str, Any] | None] | None = getattr(wrapped, _SENT_AS, None)
    return sent_as


def compressing_of(wrapped: nn.Module) -> Compressing | None:
    """What sends the buckets of ``wrapped``, where channels do."""
    found: Compressing | None = getattr(wrapped, _COMPRESSING, None)
    return found


def _reduce(
    state: tuple[dist.ProcessGroup, DistributedDataParallelStrategy], bucket: Any
) -> torch.futures.Future[Any]:
    group, strategy = state
    buffer: torch.Tensor = bucket.buffer().div_(state[0].size())  # before it is cast: fewer sums overflow
    wire = strategy.wire_of(bucket.index())
    assert wire is None or isinstance(wire, Cast)
    sent = buffer if wire is None else buffer.to(getattr(torch, wire.dtype))
    work = dist.all_reduce(sent, group=group, async_op=True)
    assert work is not None

    def received(done: torch.futures.Future[Any]) -> torch.Tensor:
        result: torch.Tensor = done.value()[0]
        return buffer if result.data_ptr() == buffer.data_ptr() else buffer.copy_(result)

    future: torch.futures.Future[Any] = work.get_future().then(received)
    return future


_reduce.__annotations__.clear()  # DDP compares them with types, and here they are names
