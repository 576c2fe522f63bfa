"""Steps of a Horovod timeline, which marks none: each reduces the same tensors again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from headway_readers.horovod.timeline import Collective

_REDUCTIONS = ("ALLREDUCE", "ADASUM", "REDUCESCATTER", "ALLGATHER")


def number_steps(collectives: Sequence[Collective]) -> list[int]:
    """The step of each of ``collectives``, which stand in order.

    A step ends before the first tensor that it has already reduced. What came before the first reduction that comes
    again belongs to none, -1, as does a last step that lacks some of the others' tensors. Where none comes again,
    everything is one step.
    """
    tensors = [
        {one.tensor for one in each.requests} if each.kind in _REDUCTIONS else set() for each in collectives
    ]
    times = Counter(tensor for each in tensors for tensor in each)
    usual = Counter(count for count in times.values() if count > 1)
    if not usual:
        return [0] * len(collectives)
    often = max(usual, key=lambda count: (usual[count], -count))
    telling = {tensor for tensor, count in times.items() if often <= count <= often + 1}
    numbers: list[int] = []
    seen: set[str] = set()
    step = -1
    for each in tensors:
        own = each & telling
        if own and (step < 0 or own & seen):
            step += 1
            seen = set()
        seen |= own
        numbers.append(step)
    whole = step == 0 or telling <= seen
    return numbers if whole else [number if number < step else -1 for number in numbers]
