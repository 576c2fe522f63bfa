"""What the timeline draws of a trace: which ranks, which steps and how much detail, so that a page stays small."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from headway.arrays import Ints
from headway.diagnosis import Diagnosis
from headway.report import words
from headway.trace.events import Events, Kind
from headway.trace.format import Trace
from headway.units import counted

MAX_RANKS = 256
DEFAULT_STEPS = 3
MAX_OPERATOR_RANKS = 8

MESSAGES = (Kind.SEND, Kind.RECEIVE)
MODULES = (Kind.FORWARD, Kind.BACKWARD)
_UNDRAWN = (Kind.GRADIENT_READY, Kind.STEP, Kind.LINK, Kind.DELIVERY_RATE)


@dataclass(frozen=True, slots=True)
class Choice:
    """What is drawn.

    ``coarse`` is whether each pass is drawn as one box. Where ``operators`` is false, those of the typical step are
    drawn on ``operator_ranks``. ``left_out`` counts events of the drawn steps that are not drawn, by what they are.
    """

    ranks: tuple[int, ...]
    steps: tuple[int, ...]
    coarse: bool
    messages: bool
    operators: bool
    operator_ranks: tuple[int, ...]
    left_out: dict[str, int]


def choose(trace: Trace, diagnosis: Diagnosis, max_boxes: int) -> Choice:
    """Complete steps around the typical one, as many as ``max_boxes`` allows.

    If not even a few steps would fit, detail is given up in this order: operators, the messages that collectives
    are made of, modules.
    """
    ranks = _ranks(trace, diagnosis)
    counts = _Counts.of((trace.events[rank] for rank in ranks), diagnosis.steps)
    wanted = min(DEFAULT_STEPS, len(diagnosis.steps))
    at = diagnosis.steps.index(diagnosis.typical_step)
    for left_out in counts.levels():
        sizes = counts.total - sum((getattr(counts, name) for name in left_out), np.zeros_like(counts.total))
        low, high = _grown(sizes, at, max_boxes)
        if high - low >= wanted and sizes[low:high].sum() <= max_boxes:
            break
    room = max_boxes - int(sizes[low:high].sum())
    some = _operator_ranks(trace, diagnosis, ranks, room) if "operators" in left_out else ()
    return Choice(
        ranks=ranks,
        steps=diagnosis.steps[low:high],
        coarse="modules" in left_out,
        messages="messages" not in left_out,
        operators="operators" not in left_out,
        operator_ranks=some,
        left_out={name: int(getattr(counts, name)[low:high].sum()) for name in left_out},
    )


def blamed_ranks(diagnosis: Diagnosis) -> tuple[int, ...]:
    """The ranks that are to blame, worst first: those of findings that stand out, then those that others wait for.

    If ranks take turns in being late, or are late by no more than equal workers are, none is to blame for it.
    """
    named = [rank for finding in diagnosis.findings if finding.stands_out for rank in finding.ranks]
    if not diagnosis.findings or any(
        finding.cause == "straggler" and finding.stands_out for finding in diagnosis.findings
    ):
        named += [one.rank for one in diagnosis.stragglers]
    return tuple(rank for rank in dict.fromkeys(named) if rank in diagnosis.breakdown)


def interesting_ranks(diagnosis: Diagnosis) -> tuple[int, ...]:
    """The ranks that the diagnosis names: those that are to blame, worst first, then those on the critical path."""
    on_path = (piece.rank for piece in diagnosis.critical_path)
    return tuple(dict.fromkeys((*blamed_ranks(diagnosis), *on_path)))


def described(choice: Choice, trace: Trace, diagnosis: Diagnosis) -> str:
    """In words, what ``choice`` leaves out; empty if it leaves out nothing."""
    parts = []
    steps, ranks = choice.steps, choice.ranks
    if len(ranks) < len(trace.events):
        parts.append(
            f"Of {counted(len(trace.events), 'rank')}, {len(ranks)} are drawn: those that are blamed or on the "
            "critical path, and an even selection of the others."
        )
    if len(steps) < len(diagnosis.steps):
        parts.append(
            f"Steps {steps[0]} to {steps[-1]} of {diagnosis.steps[0]} to {diagnosis.steps[-1]} are drawn, around the "
            "typical one, to keep this page small."
        )
    if choice.left_out.get("operators"):
        only = words.runs(choice.operator_ranks) or f"{len(choice.operator_ranks)} ranks"
        where = f"only in step {diagnosis.typical_step} on rank{'s' * (only.isdigit() is False)} {only}"
        parts.append(f"Operators are drawn {where if choice.operator_ranks else 'nowhere'}.")
    if choice.left_out.get("messages"):
        number = counted(choice.left_out["messages"], "send or receive", "sends and receives")
        parts.append(f"Collectives are drawn without their messages: {number} left out.")
    if choice.coarse:
        parts.append("Each pass is drawn as one box, not module by module.")
    return " ".join(parts)


def _ranks(trace: Trace, diagnosis: Diagnosis) -> tuple[int, ...]:
    """All ranks; of too many, those that the diagnosis names and an even selection of the others."""
    present = sorted(trace.events)
    if len(present) <= MAX_RANKS:
        return tuple(present)
    named = [rank for rank in interesting_ranks(diagnosis) if rank in trace.events][: MAX_RANKS // 2]
    others = sorted(set(present) - set(named))
    picked = np.linspace(0, len(others) - 1, MAX_RANKS - len(named)).round().astype(int)
    return tuple(sorted({*named, *(others[index] for index in picked.tolist())}))


@dataclass(frozen=True, slots=True)
class _Counts:
    """How many events each step holds over all ranks: all that could be drawn, and those that detail consists of."""

    total: Ints
    operators: Ints
    messages: Ints
    collectives: Ints
    modules: Ints

    @classmethod
    def of(cls, ranks: Iterable[Events], steps: tuple[int, ...]) -> _Counts:
        numbers = np.array(steps, dtype=np.int64)
        sums = np.zeros((6, len(numbers)), dtype=np.int64)
        for events in ranks:
            kinds = ((), (Kind.OPERATOR,), MESSAGES, (Kind.COLLECTIVE,), MODULES, _UNDRAWN)
            for row, wanted in enumerate(kinds):
                found = events.step if not wanted else events.step[_of_kinds(events, wanted)]
                place = np.minimum(np.searchsorted(numbers, found), len(numbers) - 1)
                sums[row] += np.bincount(place[numbers[place] == found], minlength=len(numbers))
        return cls(sums[0] - sums[5], *sums[1:5])

    def levels(self) -> list[tuple[str, ...]]:
        """What to leave out: first nothing, then more and more."""
        found: list[tuple[str, ...]] = [()]
        for name in ("operators", "messages", "modules"):
            some = getattr(self, name).any() and (name != "messages" or self.collectives.any())
            if some:
                found.append((*found[-1], name))
        return found


def _of_kinds(events: Events, kinds: tuple[str, ...]) -> npt.NDArray[np.bool_]:
    mask = np.zeros(len(events), dtype=bool)
    for kind in kinds:
        mask |= events.kind == kind
    return mask


def _grown(sizes: Ints, at: int, room: int) -> tuple[int, int]:
    """The step ``at`` and its neighbours, grown on both sides while all their events fit; its end is exclusive."""
    low, high = at, at + 1
    total = int(sizes[at])
    while low > 0 or high < len(sizes):
        go_low = low > 0 and (high == len(sizes) or at - low <= high - 1 - at)
        size = int(sizes[low - 1 if go_low else high])
        if total + size > room:
            break
        total += size
        low, high = (low - 1, high) if go_low else (low, high + 1)
    return low, high


def _operator_ranks(trace: Trace, diagnosis: Diagnosis, ranks: tuple[int, ...], room: int) -> tuple[int, ...]:
    """Some ranks whose operators of the typical step fit: those that the diagnosis speaks of, and one to compare."""
    named = [rank for rank in interesting_ranks(diagnosis) if rank in ranks]
    found = []
    for rank in [*named[:MAX_OPERATOR_RANKS], *[rank for rank in ranks if rank not in named][:1]]:
        events = trace.events[rank]
        size = int(np.count_nonzero((events.kind == Kind.OPERATOR) & (events.step == diagnosis.typical_step)))
        if 0 < size <= room:
            found.append(rank)
            room -= size
    return tuple(sorted(found))
