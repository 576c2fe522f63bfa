"""What the names of operations tell: the part of a step that they belong to, and the part of the model."""

from __future__ import annotations

import re

from headway.ext import Kind

_OPTIMIZERS = (
    r"optimi[sz]er\w*|optax\w*|adam\w*|nadam|sgd|rmsprop|adagrad|adadelta|adafactor|ftrl|lion|lamb|lars"
    r"|apply_gradients|apply_updates"
)
_OPTIMIZER = re.compile(rf"(?:^|[/(])(?:{_OPTIMIZERS})(?:_\d+)?(?:[/)]|$)", re.IGNORECASE)
_UPDATES = re.compile(r"^(?:Resource)?(?:Sparse)?Apply[A-Z]|^AssignSubVariableOp$")
_BACKWARD = re.compile(r"transpose\(|(?:^|/)(?:gradient_tape|gradients)/")
_FORWARD = re.compile(r"jvp\(")

# TensorFlow names an operation by its place in the graph and its type.
_OPERATION = re.compile(r"^([^:\s]+):([A-Za-z_]\w*)$")
_COLLECTIVE = re.compile(r"^Collective(Reduce|ReduceScatter|Gather|BcastSend|BcastRecv|AllToAll)(?:V[23])?$")
_COLLECTIVES = {
    "Reduce": "all_reduce", "ReduceScatter": "reduce_scatter", "Gather": "all_gather", "BcastSend": "broadcast",
    "BcastRecv": "broadcast", "AllToAll": "all_to_all", "NcclAllReduce": "all_reduce",
}  # fmt: skip
# Operations that run others, and last as long as these take.
CALLS = frozenset(
    {
        "PartitionedCall", "StatefulPartitionedCall", "RemoteCall", "SymbolicGradient", "While", "StatelessWhile", "If",
        "StatelessIf", "Case", "StatelessCase", "MapDefun",
    }
)  # fmt: skip
INPUT = ("IteratorGetNext", "IteratorGetNextSync", "IteratorGetNextAsOptional")

_WRAPPED = re.compile(r"^\w+\((.*)\)$")
_MACHINERY = re.compile(
    r"^(?:|shard_map|xla_pmap|pmap|while|body|cond|scan|checkpoint|remat\d?|rematted_computation|closed_call|core_call"
    r"|custom_(?:jvp|vjp)_call\w*|branch_\d+_fun|replica_\d+|gradient_tape|gradients)$"
)
_KERNEL = re.compile(r"^(?:nccl|rccl|msccl)", re.IGNORECASE)
_KERNELS = {
    "AllReduce": "all_reduce", "AllGather": "all_gather", "ReduceScatter": "reduce_scatter", "AllToAll": "all_to_all",
    "Broadcast": "broadcast", "Reduce": "reduce", "SendRecv": "permute",
}  # fmt: skip


def phase_of(path: str) -> str:
    """The part of a step that an operation belongs to by its path, or "" where that does not say.

    JAX differentiates what it calls jvp and transposes it for the backward; TensorFlow puts the backward under
    "gradient_tape"; optimizers are told by their names.
    """
    place, kind = split(path)
    if _BACKWARD.search(place):
        return Kind.BACKWARD
    if _UPDATES.match(kind) or _OPTIMIZER.search(place):
        return Kind.OPTIMIZER
    return Kind.FORWARD if _FORWARD.search(place) else ""


def split(operation: str) -> tuple[str, str]:
    """TensorFlow's name of an operation as its place in the graph and its type, which is "" of anything else."""
    found = _OPERATION.match(operation)
    return (found[1], found[2]) if found else (operation, "")


def collective_of(kind: str) -> str:
    """What a collective of TensorFlow's is called, by the operation's type; "" where it is none."""
    found = _COLLECTIVE.match(kind)
    return _COLLECTIVES[found[1]] if found else _COLLECTIVES.get(kind, "") if kind == "NcclAllReduce" else ""


def kernel_of(name: str) -> str:
    """What a kernel of NCCL or RCCL does; "" of any other kernel."""
    if not _KERNEL.match(name):
        return ""
    return next((kind for part, kind in _KERNELS.items() if part in name), "collective")


def scope_of(path: str) -> str:
    """The part of the model that an operation belongs to: its path without machinery and without itself."""
    place = split(path)[0].partition(";")[0]
    *scopes, own = place.split("/")
    found = []
    for scope in scopes:
        if scope.startswith(("jit(", "pjit(")):
            continue
        while inside := _WRAPPED.match(scope):
            scope = inside[1]
        if not _MACHINERY.match(scope):
            found.append(scope)
    return "/".join(found) or own
