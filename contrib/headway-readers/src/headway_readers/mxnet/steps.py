"""Steps of an MXNet worker: what the user marked as steps, or else what repeats."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from headway.arrays import Ints
from headway_readers.mxnet.operators import Work, is_any
from headway_readers.mxnet.profile import Profile, Spans

_STEP = re.compile(r"(?<![a-z])(?:step|iteration|iter|batch)(?![a-z])", re.IGNORECASE)
_BACKWARD_CALLS = ("MXAutogradBackwardEx", "MXExecutorBackwardEx")

MARKED = ""
DERIVED = (
    "No step is marked: a step is assumed to begin with the first forward operator after gradients were pushed. "
    "Mark steps with an mxnet.profiler.Task named 'step'."
)
SINGLE = (
    "Neither marks nor operators tell steps apart: everything is taken for one step. "
    "Mark steps with an mxnet.profiler.Task named 'step'."
)


@dataclass(frozen=True, slots=True, eq=False)
class Steps:
    """Windows of time that do not overlap, in their order. ``note`` says how they were found where no mark says it."""

    start_ns: Ints
    end_ns: Ints
    note: str

    def of(self, moments: Ints) -> Ints:
        """The step in which each moment lies; -1 outside of all."""
        index = np.searchsorted(self.start_ns, moments, side="right") - 1
        inside = (index >= 0) & (moments < self.end_ns[index])
        found: Ints = np.where(inside, index, -1).astype(np.int64)
        return found


def find_steps(profile: Profile, work: npt.NDArray[np.object_]) -> Steps:
    """Find a worker's steps. ``work`` says what each operator does; there is at least one operator."""
    return _marked(profile) or _derived(profile, work) or _single(profile.operators)


def _single(operators: Spans) -> Steps:
    return Steps(operators.start_ns.min(keepdims=True), operators.end_ns.max(keepdims=True) + 1, SINGLE)


def _marked(profile: Profile) -> Steps | None:
    """Marks with a step's name that have operators inside; of several kinds of them, the one that covers most."""
    marks = profile.marks
    kinds: dict[tuple[str, str], list[int]] = {}
    for index, kind in enumerate(zip(marks.category.tolist(), marks.name.tolist(), strict=True)):
        if _STEP.search(kind[1]):
            kinds.setdefault(kind, []).append(index)
    windows = [_windows(marks.where(np.array(own)), profile.operators) for own in kinds.values()]
    covered = [float((end - start).sum()) for start, end in windows]
    if not covered or max(covered) <= 0:
        return None
    start_ns, end_ns = windows[int(np.argmax(covered))]
    return Steps(start_ns, end_ns, MARKED)


def _windows(own: Spans, operators: Spans) -> tuple[Ints, Ints]:
    """The most of these marks that do not overlap and have operators inside; of markers, from each to the next."""
    order = np.argsort(own.start_ns, kind="stable")
    start_ns, end_ns = own.start_ns[order], own.end_ns[order]
    if (start_ns == end_ns).all():
        end_ns = np.append(start_ns[1:], max(int(operators.end_ns.max()) + 1, int(start_ns[-1])))
    begun = np.sort(operators.start_ns)
    used = np.searchsorted(begun, start_ns) < np.searchsorted(begun, end_ns)
    start_ns, end_ns = start_ns[used], end_ns[used]
    picked, reach_ns = [], 0
    for index in np.argsort(end_ns, kind="stable").tolist():
        if start_ns[index] >= reach_ns:
            picked.append(index)
            reach_ns = end_ns[index]
    return start_ns[picked], end_ns[picked]


def _derived(profile: Profile, work: npt.NDArray[np.object_]) -> Steps | None:
    """Cut between two pushes where a forward operator began between them: there, a new step had begun.

    Where nothing is pushed, reductions and then backward operators stand for pushes; where no forward operator is
    named, calls of backward stand for them.
    """
    operators = profile.operators
    late = _late(operators, work)
    forward = np.sort(operators.start_ns[is_any(work, "forward")])
    fresh = forward if len(forward) else np.sort(profile.calls.named(*_BACKWARD_CALLS).start_ns)
    if not len(late) or not len(fresh):
        return None
    after = np.searchsorted(late, fresh) - 1
    cuts = late[np.unique(after[after >= 0])]  # the last push before each new beginning
    first = np.sort(operators.start_ns[is_any(work, "forward", "bulk")])
    begins = first[np.searchsorted(first, cuts[cuts < first.max(initial=-1)], side="right")]
    steps = _between(operators, work, np.unique(begins))
    whole = np.searchsorted(late, steps.start_ns) < np.searchsorted(late, steps.end_ns)
    return Steps(steps.start_ns[whole], steps.end_ns[whole], DERIVED) if whole.any() else None


def _late(operators: Spans, work: npt.NDArray[np.object_]) -> Ints:
    """When what ends a step's computation began, in order: the first of several things that there is."""
    kinds: tuple[tuple[Work, ...], ...] = (("push", "push_pull"), ("collective",), ("backward",))
    for chosen in kinds:
        found = operators.start_ns[is_any(work, *chosen)]
        if len(found):
            return np.sort(found)
    return np.zeros(0, dtype=np.int64)


def _between(operators: Spans, work: npt.NDArray[np.object_], begins: Ints) -> Steps:
    """Steps that end where the last that began in them ended, or else where the next one's forward began."""
    counted = operators.name != "DeleteVariable"
    start_ns, end_ns = operators.start_ns[counted], operators.end_ns[counted]
    index = np.searchsorted(begins, start_ns, side="right")
    last = np.full(len(begins) + 1, start_ns.min())
    np.maximum.at(last, index, end_ns)
    ends = np.append(np.minimum(last[:-1], begins), last[-1] + 1)
    starts = np.concatenate([start_ns.min(keepdims=True), ends[:-1]])
    return Steps(starts, ends, DERIVED)
