"""Stock DistributedDataParallel, live, with the buckets of a plan, sent as it says."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from headway import torch_private
from headway.compression.cast import Cast, is_only_cast
from headway.compression.codec import FLOATS
from headway.errors import UnsupportedError, UserError
from headway.strategies.ddp.compressed import Compressing, send_bucket
from headway.strategies.ddp.policy import DistributedDataParallelStrategy
from headway.strategies.live.channels import retirement
from headway.strategies.live.checksum import checksum
from headway.strategies.live.module_spec import check_dense_gradients
from headway.strategies.live.stock import bucket_options, keep_compiled_parts, named_buckets
from headway.strategies.plugin import InForce

_SENT_AS = "_headway_sent_as"
_COMPRESSING = "_headway_compressing"


def check_wire(module: nn.Module, strategy: DistributedDataParallelStrategy) -> None:
    """Raise UnsupportedError for a module whose gradients could not be sent as ``strategy`` says."""
    if not any(strategy.wire):
        return
    trained = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
    for name, parameter in trained:
        if str(parameter.dtype).removeprefix("torch.") not in FLOATS:
            raise UnsupportedError(
                "only floating-point gradients can be compressed",
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


def install_wire(wrapped: DistributedDataParallel, strategy: DistributedDataParallelStrategy) -> None:
    """Have ``wrapped`` send its buckets as ``strategy`` says. Collective.

    Raises UnsupportedError where ``check`` does, and for DDP's own mixed precision, which has a hook of its own.
    """
    check_wire(wrapped.module, strategy)
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


def installed_wire(wrapped: DistributedDataParallel) -> list[dict[str, Any] | None] | None:
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


def options(strategy: DistributedDataParallelStrategy) -> dict[str, Any]:
    """The arguments of DistributedDataParallel that ``strategy`` decides. Raises as ``bucket_options``."""
    return bucket_options(strategy.bucket_cap_mb, strategy.bucket_caps_mb)


def wrap(
    module: nn.Module, strategy: DistributedDataParallelStrategy, **ddp_options: Any
) -> DistributedDataParallel:
    """Wrap ``module`` in stock DDP; what ``strategy`` decides goes before the same option in ``ddp_options``.

    Raises UnsupportedError where its gradients cannot be sent as ``strategy`` says.
    """
    check_wire(module, strategy)
    wrapped = DistributedDataParallel(module, **{**ddp_options, **options(strategy)})
    take_over(wrapped, strategy, ddp_options)
    return wrapped


def take_over(
    wrapped: DistributedDataParallel, strategy: DistributedDataParallelStrategy, given: Mapping[str, Any]
) -> None:
    """Do what ``strategy`` decides besides ``options``, for a model that a script has just wrapped with ``given``."""
    keep_compiled_parts(wrapped, given)
    if strategy.wire:
        install_wire(wrapped, strategy)


def in_force(wrapped: nn.Module) -> InForce | None:
    """What DDP does for a model that it wraps."""
    if not isinstance(wrapped, DistributedDataParallel):
        return None
    caps_mb = torch_private.ddp_bucket_caps_mb(wrapped)
    in_force: dict[str, Any] = (
        {"bucket_caps_mb": caps_mb}
        if caps_mb
        else {"bucket_cap_mb": torch_private.ddp_bucket_cap_mb(wrapped)}
    )
    if (sent_as := installed_wire(wrapped)) is not None:
        in_force["wire"] = sent_as
    return InForce(in_force, named_buckets(wrapped))


KEPT, REMEMBERED, WORLD_SIZE = "kept.", "remembered.", "world_size"


def compression_state(model: nn.Module) -> dict[str, torch.Tensor]:
    """What this rank keeps of gradients that were not sent, and what codecs remember, by the names of parameters.

    It is this rank's own: save it for each rank, with the model and the optimizer, between two steps. A job that goes
    on without it loses what one step has left out, and no more. Raises UserError for a model that sends its gradients
    as they are.
    """
    compressing = _compressing(model)
    compressing.forget_what_was_skipped()
    state = {WORLD_SIZE: torch.tensor(compressing.world_size)}
    state |= {KEPT + compressing.names[key]: own for key, own in compressing.feedback.kept().items()}
    memory = compressing.feedback.memory
    return state | {REMEMBERED + compressing.names[key]: own.clone() for key, own in memory.items()}


def load_compression_state(model: nn.Module, state: Mapping[str, torch.Tensor]) -> None:
    """Go on from ``state``, which ``compression_state`` gave the same rank of a job of as many ranks. Collective.

    Raises UserError, on all ranks, where it does not fit the model or the number of ranks, or where ranks remember
    different things: they would part.
    """
    compressing = _compressing(model)
    key_of = {name: key for key, name in enumerate(compressing.names)}
    sizes = {name: p.numel() for name, p in _inner(model).named_parameters() if name in key_of}
    problem = _misfit(state, sizes, compressing.world_size)
    kept = {key_of[name]: own for name, own in _below(KEPT, state).items() if not problem}
    memory = {key_of[name]: own for name, own in _below(REMEMBERED, state).items() if not problem}
    own = checksum(memory[key] for key in sorted(memory))
    # The largest and the smallest of each in one: negated, the one is the other.
    told = torch.tensor([bool(problem), own, -own], dtype=torch.int64)
    dist.all_reduce(told, dist.ReduceOp.MAX, group=compressing.group)
    if bool(told[0]):
        raise UserError(
            "the state of compression does not fit", got=problem or "that of another rank does not"
        )
    if int(told[1]) != -int(told[2]):
        raise UserError(
            "the states of compression are of different steps, or of different ranks' jobs",
            expected="what all ranks saved after the same step",
        )
    compressing.feedback.restore(kept, memory)


def _misfit(state: Mapping[str, torch.Tensor], sizes: Mapping[str, int], world_size: int) -> str:
    of = state.get(WORLD_SIZE)
    if of is None or int(of) != world_size:
        return (
            f"the state of a job of {'unknown' if of is None else int(of)} ranks, this one has {world_size}"
        )
    kept, names = _below(KEPT, state), {*_below(KEPT, state), *_below(REMEMBERED, state)}
    unknown = sorted(names - sizes.keys())
    if unknown:
        return f"a state for {unknown[0]}, which the model does not train"
    wrong = [name for name, own in kept.items() if own.numel() != sizes[name]]
    return f"{kept[wrong[0]].numel()} elements for {wrong[0]}, which has {sizes[wrong[0]]}" if wrong else ""


def _below(prefix: str, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name.removeprefix(prefix): own for name, own in state.items() if name.startswith(prefix)}


def _inner(model: nn.Module) -> nn.Module:
    inner = model.module
    assert isinstance(inner, nn.Module)
    return inner


def _compressing(model: nn.Module) -> Compressing:
    found = compressing_of(model)
    if found is None:
        raise UserError(
            "the model sends its gradients as they are", got=type(model).__name__,
            expected="a model wrapped by a plan with wire, on the CPU, of more than one rank",
        )  # fmt: skip
    return found
