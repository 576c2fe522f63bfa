"""Pauses: what the program was seen to do besides training, such as garbage collections and checkpoints."""

from __future__ import annotations

from typing import NamedTuple

from headway import intervals
from headway.diagnosis.timeline import RankTime
from headway.trace.events import Events, Kind

_ADVICE = {
    "garbage collection": "collect at chosen moments (gc.freeze, gc.disable, gc.collect every so many steps)",
    "torch.save": "save checkpoints asynchronously, or less often",
}
OTHER_ADVICE = "look at what happens there, such as checkpoints, evaluation, logging and garbage collection"


class Pause(NamedTuple):
    """How long pauses of one name take outside of the passes and the optimizer, averaged over steps and ranks."""

    name: str
    mean_ms: float


def pause_advice(name: str) -> str:
    """What to do about pauses of this name."""
    return _ADVICE.get(name, OTHER_ADVICE)


def longest_pause(times: dict[int, RankTime], events: dict[int, Events]) -> Pause | None:
    """The pauses that take most of what counts as rest, where there are any."""
    took_ns: dict[str, int] = {}
    for rank, time in times.items():
        pauses = events[rank].of_kind(Kind.PAUSE)
        training = intervals.join(time.wait, time.optimizer, time.input, time.backward, time.forward)
        for name in dict.fromkeys(pauses.name.tolist()):
            own = pauses.where(pauses.name == name)
            spans = intervals.subtract(intervals.union(own.start_ns, own.end_ns), training)
            took_ns[name] = took_ns.get(name, 0) + int(time.per_step(spans).sum())
    if not took_ns:
        return None
    steps = sum(len(time.step_start_ns) for time in times.values())
    name = max(took_ns, key=lambda one: took_ns[one])
    return Pause(name, took_ns[name] / steps / 1e6)
