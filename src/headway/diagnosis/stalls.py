"""Finds stalls: single steps that take far longer on some rank, such as for checkpoints or garbage collection."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from headway import intervals
from headway.diagnosis.breakdown import NS_A_MS, REST, RankTime
from headway.diagnosis.findings import Finding, listed, milliseconds, of_each_step
from headway.trace.events import Events, Kind

_ADVICE = {
    "garbage collection": "collect at chosen moments (gc.freeze, gc.disable, gc.collect every so many steps)",
    "torch.save": "save checkpoints asynchronously, or less often",
}
OTHER_ADVICE = "check what happens there, such as checkpoints, evaluation, logging and garbage collection"


class Pause(NamedTuple):
    """The time of pauses with one name outside training, averaged over steps and ranks."""

    name: str
    mean_ms: float


def pause_advice(name: str) -> str:
    """Advice on pauses with this name."""
    return _ADVICE.get(name, OTHER_ADVICE)


def longest_pause(times: dict[int, RankTime], events: dict[int, Events]) -> Pause | None:
    """The kind of pause that takes most of the rest; None without pauses."""
    took_ns: dict[str, int] = {}
    for rank, time in times.items():
        pauses = events[rank].of_kind(Kind.PAUSE)
        training = intervals.join(time.wait, time.optimizer, time.input, time.backward, time.forward)
        for name in dict.fromkeys(pauses.name.tolist()):
            named = pauses.where(pauses.name == name)
            spans = intervals.subtract(intervals.union(named.start_ns, named.end_ns), training)
            took_ns[name] = took_ns.get(name, 0) + int(time.per_step(spans).sum())
    if not took_ns:
        return None
    steps = sum(len(time.step_start_ns) for time in times.values())
    name = max(took_ns, key=lambda label: took_ns[label])
    return Pause(name, took_ns[name] / steps / 1e6)


STANDS_OUT = 0.03  # of all steps' time
IRREGULAR_STANDS_OUT = 0.04  # the same for stalls of unknown cause: machines have hiccups
LEAST_SHARE = 0.15  # of a typical step: stalled steps take at least this much longer
MOST_OFTEN = 0.35  # of the steps: more frequent events are not stalls
SPREADS = 6.0  # median absolute deviations above the median
SLIGHT = 0.25  # of the median stall: shorter ones are hiccups of the machine
_PARTS = ("forward", "backward", "input", "optimizer", REST)
_INPUT_ADVICE = "check what refills that rank's data loader"


@dataclass(frozen=True)
class Stalls:
    """Steps that took longer than usual on some ranks.

    ``excess_ms`` is how much longer a stalled step takes. ``every`` is their period in steps, 0 if irregular. ``where``
    is a pause's name or a part of the step. ``disturbed`` are the indices of stalled steps and of the steps after them.
    """

    ranks: tuple[int, ...]
    steps: tuple[int, ...]
    every: int
    excess_ms: float
    cost_ms: float  # per step, averaged over all recorded steps
    where: str
    disturbed: frozenset[int]


def find_stalls(
    times: dict[int, RankTime], events: dict[int, Events], steps: tuple[int, ...]
) -> Stalls | None:
    """The stalls of all ranks combined; None without stalls, or with fewer than eight steps to compare."""
    if len(steps) < 8:
        return None
    ranks = sorted(times)
    busy_ms = np.stack([times[rank].busy_ms for rank in ranks])  # (ranks, steps): without waits
    usual = np.median(busy_ms, axis=1, keepdims=True)
    deviation = np.median(np.abs(busy_ms - usual), axis=1, keepdims=True)
    excess = busy_ms - usual
    stalled = (excess > LEAST_SHARE * usual) & (excess > SPREADS * deviation)
    stalled &= stalled.mean(axis=1, keepdims=True) <= MOST_OFTEN
    hit = np.flatnonzero(stalled.any(axis=0))
    if not len(hit) or len(hit) > MOST_OFTEN * len(steps):
        return None
    blamed = np.where(stalled, excess, 0.0)
    disturbed = np.unique([*hit, *(hit[hit < len(steps) - 1] + 1)])
    longest = blamed.max(axis=0)
    hit = hit[longest[hit] > SLIGHT * np.median(longest[hit])]
    total_ms = min(float(longest[hit].sum()), _grown_ms(times, disturbed))
    of_rank = blamed.sum(axis=1)
    to_blame = np.flatnonzero(of_rank > 0.25 * of_rank.max())
    chief = int(np.argmax(of_rank))
    numbers = tuple(steps[index] for index in hit.tolist())
    return Stalls(
        ranks=tuple(ranks[index] for index in to_blame.tolist()),
        steps=numbers,
        every=_period(numbers, steps),
        excess_ms=total_ms / len(hit),
        cost_ms=total_ms / len(steps),
        where=_where(times[ranks[chief]], events[ranks[chief]], stalled[chief], of_rank[chief]),
        disturbed=frozenset(disturbed.tolist()),
    )


def _grown_ms(times: dict[int, RankTime], disturbed: npt.NDArray[np.intp]) -> float:
    """How much longer the disturbed steps took than the others, in ms, on the rank with the largest difference.

    A stall costs nothing while the rank waits for others anyway. A stall after a step's last collective delays the
    others in their next step.
    """
    grown = [0.0]
    for time in times.values():
        length_ms = (time.step_end_ns - time.step_start_ns) / NS_A_MS
        others_ms = np.delete(length_ms, disturbed)
        usual_ms = np.median(others_ms if len(others_ms) else length_ms)
        grown.append(float((length_ms[disturbed] - usual_ms).sum()))
    return max(grown)


def stall_finding(stalls: Stalls, step_ms: float, world_size: int) -> Finding:
    """Reports stalls."""
    several = len(stalls.ranks) > 1
    everywhere = len(stalls.ranks) == world_size > 1
    if stalls.every:
        how_often = f"Every {_ordinal(stalls.every)} step takes"
    else:
        how_often = f"{len(stalls.steps)} of the recorded steps take{'s' if len(stalls.steps) == 1 else ''}"
    who = "every rank stalls" if everywhere else f"{listed(stalls.ranks)} stall{'' if several else 's'}"
    waits = (
        "" if world_size == len(stalls.ranks) else f", and the others wait for {'them' if several else 'it'}"
    )
    advice = _INPUT_ADVICE if stalls.where == "input" else pause_advice(stalls.where)
    sentence = (
        f"{how_often} {milliseconds(stalls.excess_ms)} longer because {who} "
        f"{_in_words(stalls.where, 'its' if everywhere or not several else 'their')}{waits}: "
        f"{of_each_step(stalls.cost_ms, step_ms)} on average; {advice}."
    )
    is_explained = stalls.every > 0 or stalls.where not in _PARTS
    least_ms = (STANDS_OUT if is_explained else IRREGULAR_STANDS_OUT) * step_ms
    return Finding("stalls", stalls.cost_ms, sentence, stalls.ranks, stalls.cost_ms >= least_ms)


def _in_words(where: str, whose: str) -> str:
    if where == REST:
        return f"outside of {whose} passes"
    return f"in {whose} {where}" if where in _PARTS else f"in {where}"


def _ordinal(number: int) -> str:
    ending = {1: "st", 2: "nd", 3: "rd"}.get(number % 10 if number // 10 % 10 != 1 else 0, "th")
    return f"{number}{ending}"


def _period(numbers: tuple[int, ...], steps: tuple[int, ...]) -> int:
    """The period of the stalls in steps; 0 unless they are regular from the first to the last of ``steps``."""
    gaps = np.diff(numbers)
    regular = len(gaps) >= 2 and (gaps == gaps[0]).all()
    if not regular or numbers[0] - gaps[0] >= steps[0] or numbers[-1] + gaps[0] <= steps[-1]:
        return 0
    return int(gaps[0])


def _where(time: RankTime, events: Events, stalled: npt.NDArray[np.bool_], excess_ms: float) -> str:
    """The pause that explains most of the excess, or else the part of the step that grew most."""

    def grown_ms(spent_ns: npt.NDArray[np.int64]) -> float:
        return float((spent_ns[stalled] - np.median(spent_ns)).sum()) / NS_A_MS

    pauses = events.of_kind(Kind.PAUSE)
    for name in dict.fromkeys(pauses.name.tolist()):
        named = pauses.where(pauses.name == name)
        if grown_ms(time.per_step(intervals.union(named.start_ns, named.end_ns))) > 0.5 * excess_ms:
            return str(name)
    parts = [
        time.per_step(spans) for spans in (time.forward, time.backward, time.input, time.optimizer, time.wait)
    ]
    parts[-1] = time.step_end_ns - time.step_start_ns - sum(parts)
    return _PARTS[int(np.argmax([grown_ms(part) for part in parts]))]
