"""Stalls: single steps that take far longer than the others on some rank, as for checkpoints and collections."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from headway import intervals
from headway.diagnose.findings import Finding, listed, milliseconds, of_each_step
from headway.diagnose.timeline import REST, RankTime
from headway.trace.events import Events, Kind

STANDS_OUT = 0.03  # of all steps' time
LEAST_SHARE = 0.15  # of a typical step: how much longer a stalled one takes
MOST_OFTEN = 0.35  # of the steps: what happens in more of them is no stall
SPREADS = 6.0  # median deviations above the median
_PARTS = ("forward", "backward", "input", "optimizer", REST)
_WORDS = {REST: "outside of its passes"}
_ADVICE = {
    "garbage collection": "collect at chosen moments (gc.freeze, gc.disable, gc.collect every so many steps)",
    "torch.save": "save checkpoints asynchronously, or less often",
    "input": "look at what refills that rank's data loader",
}
_OTHER_ADVICE = "look at what happens there, such as checkpoints, evaluation, logging and garbage collection"

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Stalls:
    """What ranks did longer than usual in some steps.

    ``excess_ms`` is the mean over those steps. ``every`` is how many steps lie between them, 0 where irregular.
    """

    ranks: tuple[int, ...]
    steps: tuple[int, ...]
    every: int
    excess_ms: float
    cost_ms: float  # a step, over all recorded steps
    where: str


def find_stalls(
    times: dict[int, RankTime], events: dict[int, Events], steps: tuple[int, ...]
) -> Stalls | None:
    """The stalls of all ranks as one, where there are any. At least eight steps are needed to know what is usual."""
    if len(steps) < 8:
        return None
    ranks = sorted(times)
    own = np.stack([_own_ms(times[rank]) for rank in ranks])  # (ranks, steps): without waits
    usual = np.median(own, axis=1, keepdims=True)
    deviation = np.median(np.abs(own - usual), axis=1, keepdims=True)
    excess = own - usual
    stalled = (excess > LEAST_SHARE * usual) & (excess > SPREADS * deviation)
    stalled &= stalled.mean(axis=1, keepdims=True) <= MOST_OFTEN
    hit = np.flatnonzero(stalled.any(axis=0))
    if not len(hit) or len(hit) > MOST_OFTEN * len(steps):
        return None
    blamed = np.where(stalled, excess, 0.0)
    cost = blamed.max(axis=0)
    of_rank = blamed.sum(axis=1)
    to_blame = np.flatnonzero(of_rank > 0.25 * of_rank.max())
    chief = int(np.argmax(of_rank))
    numbers = tuple(steps[index] for index in hit.tolist())
    chief_steps = np.flatnonzero(stalled[chief])
    return Stalls(
        ranks=tuple(ranks[index] for index in to_blame.tolist()),
        steps=numbers,
        every=_period(numbers),
        excess_ms=float(cost[hit].mean()),
        cost_ms=float(cost.sum()) / len(steps),
        where=_where(times[ranks[chief]], events[ranks[chief]], chief_steps, of_rank[chief]),
    )


def stall_finding(stalls: Stalls, step_ms: float, world_size: int) -> Finding:
    """Stalls in words."""
    how_often = (
        f"Every {_ordinal(stalls.every)} step"
        if stalls.every
        else f"{len(stalls.steps)} of the recorded steps"
    )
    who = "every rank" if len(stalls.ranks) == world_size > 1 else listed(stalls.ranks)
    waits = "" if world_size == 1 or len(stalls.ranks) == world_size else ", and the others wait for it"
    take = "takes" if stalls.every else "take"
    sentence = (
        f"{how_often} {take} {milliseconds(stalls.excess_ms)} longer because {who} stalls "
        f"{_in_words(stalls.where)}{waits}: "
        f"{of_each_step(stalls.cost_ms, step_ms)} on average; {_ADVICE.get(stalls.where, _OTHER_ADVICE)}."
    )
    return Finding("stalls", stalls.cost_ms, sentence, stalls.ranks, stalls.cost_ms >= STANDS_OUT * step_ms)


def _in_words(where: str) -> str:
    if where in ("garbage collection", "torch.save"):
        return f"in {where}"
    return _WORDS.get(where, f"in its {where}")


def _ordinal(number: int) -> str:
    ending = {1: "st", 2: "nd", 3: "rd"}.get(number % 10 if number // 10 % 10 != 1 else 0, "th")
    return f"{number}{ending}"


def _own_ms(time: RankTime) -> Floats:
    """How long each step took without its waits, in ms."""
    whole: Floats = (time.step_end_ns - time.step_start_ns - time.per_step(time.wait)) / 1e6
    return whole


def _period(numbers: tuple[int, ...]) -> int:
    """By how many steps stalls follow each other, where that is regular."""
    gaps = np.diff(numbers)
    return int(gaps[0]) if len(gaps) >= 2 and (gaps == gaps[0]).all() else 0


def _where(time: RankTime, events: Events, stalled: npt.NDArray[np.intp], excess_ms: float) -> str:
    """The pause, or else the part of the step, that grew most in the stalled steps."""
    starts, ends = time.step_start_ns[stalled], time.step_end_ns[stalled]
    pauses = events.of_kind(Kind.PAUSE)
    for name in dict.fromkeys(pauses.name.tolist()):
        own = pauses.where(pauses.name == name)
        spans = intervals.union(own.start_ns, own.end_ns)
        if intervals.length_within(spans, starts, ends).sum() / 1e6 > 0.5 * excess_ms:
            return str(name)
    parts = [
        time.per_step(spans) for spans in (time.forward, time.backward, time.input, time.optimizer, time.wait)
    ]
    parts[-1] = time.step_end_ns - time.step_start_ns - sum(parts)
    grown = [float((part[stalled] - np.median(part)).sum()) for part in parts]
    return _PARTS[int(np.argmax(grown))]
