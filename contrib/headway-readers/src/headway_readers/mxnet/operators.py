"""What MXNet's operators do, told by their names."""

from __future__ import annotations

import re
from typing import Literal

import numpy as np
import numpy.typing as npt

from headway.arrays import Texts

Work = Literal[
    "push", "pull", "push_pull", "collective", "forward", "backward", "bulk", "update", "sum", "keeping"
]
"""``bulk`` is operators that were run as one and are not named; ``keeping`` copies, frees and waits."""

COMMUNICATION: tuple[Work, ...] = ("push", "pull", "push_pull", "collective")
COLLECTIVES = {
    "horovod_allreduce": "all_reduce", "horovod_allgather": "all_gather", "horovod_broadcast": "broadcast",
    "horovod_alltoall": "all_to_all", "horovod_reducescatter": "reduce_scatter",
}  # fmt: skip
_KEY_VALUE_STORE = re.compile(r"(?:KVStore|P3Store)Dist\w*?(PushPull|Push|Pull)")
_UPDATE = re.compile(r"(?:^|_)update(?:_|$)")
_SUMS = frozenset({"BinaryOpKernel", "AccumulateRowSparseGrads"})
_KEEPING = re.compile(
    r"(?:Copy[CG]PU2[CG]PU|(?:Deq|Q)uantize[CG]PU|DeleteVariable|WaitForVar|SetValueOp|SetupExec"
    r"|KVStore(?:Unique|Reduce|SparseRetain))"
)


def work_of(names: Texts) -> npt.NDArray[np.object_]:
    """What each operator does, a ``Work`` each."""
    known = {name: _work(name) for name in set(names.tolist())}
    found = np.empty(len(names), dtype=object)
    found[:] = [known[name] for name in names.tolist()]
    return found


def is_any(work: npt.NDArray[np.object_], *kinds: Work) -> npt.NDArray[np.bool_]:
    """Which of ``work`` are of one of these kinds."""
    found = np.zeros(len(work), dtype=bool)
    for kind in kinds:
        found |= work == kind
    return found


def _work(name: str) -> Work:
    if store := _KEY_VALUE_STORE.fullmatch(name):
        return "push_pull" if store[1] == "PushPull" else "push" if store[1] == "Push" else "pull"
    if name in COLLECTIVES:
        return "collective"
    if name in _SUMS:
        return "sum"
    if _KEEPING.fullmatch(name):
        return "keeping"
    if name == "ImperativeBulk":
        return "bulk"
    if name.lstrip("[").startswith("_backward"):  # of several, which stand in brackets, the first
        return "backward"
    return "update" if _UPDATE.search(name) else "forward"
