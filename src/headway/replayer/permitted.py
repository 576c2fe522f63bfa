"""What the recorded model and optimizers permit: a plan that they do not is not run as it stands, nor predicted so."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from statistics import median

import numpy as np

from headway.errors import UnsupportedError
from headway.scheduling.buckets import FORMS, Gather
from headway.strategies.base import Strategy
from headway.strategies.data_parallel.decoupled.kinds import Kind as UpdateKind
from headway.strategies.data_parallel.decoupled.kinds import kind_named
from headway.strategies.data_parallel.decoupled.policy import DecoupledStrategy
from headway.trace.events import Kind
from headway.trace.format import Trace


def deferrable_forms(trace: Trace) -> tuple[Sequence[Gather], str]:
    """What decoupled strategies may gather for the recorded job, and why they may not gather everything.

    An optimizer that looks at several elements at once needs whole gradients, and one that is not known to take its
    parameters one by one needs all of them before it steps: then nothing is left of forward to hide a gather under.
    Several optimizers would each gather what they have stepped, one after the other, whatever forward needs first.
    """
    refused = [info.why_not_decoupled for info in trace.manifest.ranks if info.why_not_decoupled]
    if refused:
        return (), f"{refused[0]}, so decoupled plans are left out"
    names = {row.name for events in trace.events.values() for row in events.of_kind(Kind.OPTIMIZER)}
    kinds = {name: kind_named(name) for name in sorted(names) if name}
    whole = [name for name, kind in kinds.items() if kind is UpdateKind.WHOLE]
    if whole:
        return (), f"{whole[0]} may look at all gradients at once, so decoupled plans are left out"
    by_parameter = [name for name, kind in kinds.items() if kind is UpdateKind.PARAMETER]
    if by_parameter:
        return ("gradients",), f"{by_parameter[0]} needs whole gradients, so no plan gathers parameters"
    if _updates_behind_a_backward(trace) > 1:
        return ("gradients",), "several optimizers step in turn, so no plan gathers parameters"
    return FORMS, ""


def _updates_behind_a_backward(trace: Trace) -> float:
    """How many updates follow one backward, on one rank, in most recorded steps."""
    rows = trace.events[min(trace.events)].of_kind(Kind.BACKWARD_PASS, Kind.OPTIMIZER)
    most: Counter[int] = Counter()
    behind = 0
    for index in np.argsort(rows.start_ns, kind="stable").tolist():
        behind = behind + 1 if rows.kind[index] == Kind.OPTIMIZER else 0
        step = int(rows.step[index])
        most[step] = max(most[step], behind)
    return median(most.values() or [0])


def as_run(strategy: Strategy, forms: Sequence[Gather], why: str) -> Strategy:
    """``strategy`` as a job runs it whose optimizers permit ``forms``; ``why`` not everything.

    Raises UnsupportedError where nothing of a decoupled strategy would be left to hide under forward.
    """
    if not isinstance(strategy, DecoupledStrategy) or strategy.gather in forms:
        return strategy
    if not forms:
        raise UnsupportedError(
            "the plan is not predicted for the recorded job",
            got=why,
            expected="a model and optimizers that the decoupled all-reduce takes",
            fix="Replay a plan of DDP.",
        )
    return strategy.model_copy(update={"gather": forms[0]})
