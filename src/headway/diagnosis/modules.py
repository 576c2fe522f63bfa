"""Measures each module's exclusive time in forward and backward, and the memory it keeps between them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from headway import intervals
from headway.arrays import Ints
from headway.diagnosis.breakdown import NS_A_MS, RankTime
from headway.diagnosis.buckets import in_steps
from headway.trace.events import Events, Kind
from headway.trace.format import Trace


@dataclass(frozen=True, slots=True)
class ModuleTimes:
    """One module in a rank's mean step. Times are ms, without submodules and without waits.

    ``calls`` counts its forward calls per step. ``kept_bytes`` is what one forward keeps for backward; None if memory
    was not recorded.
    """

    name: str
    forward_ms: float
    backward_ms: float
    calls: float
    kept_bytes: int | None = None

    @property
    def ms(self) -> float:
        """Forward and backward together."""
        return self.forward_ms + self.backward_ms

    def to_document(self) -> dict[str, Any]:
        """As ``headway diagnose --json`` prints it."""
        return {
            "name": self.name,
            "forward_ms": round(self.forward_ms, 6),
            "backward_ms": round(self.backward_ms, 6),
            "calls": round(self.calls, 3),
            "kept_bytes": self.kept_bytes,
        }


def module_times(trace: Trace, times: Mapping[int, RankTime]) -> tuple[ModuleTimes, ...]:
    """The recorded modules, slowest first, averaged over all ranks (also in a pipeline)."""
    forward_ns: Counter[str] = Counter()
    backward_ns: Counter[str] = Counter()
    calls: Counter[str] = Counter()
    steps = 0
    for rank, time in times.items():
        steps += len(time.step_start_ns)
        for kind, sums in ((Kind.FORWARD, forward_ns), (Kind.BACKWARD, backward_ns)):
            rows = trace.events[rank].of_kind(kind)
            rows = rows.where(in_steps(time, rows.start_ns)[0])
            names, first, counts = _number_names(rows)
            total_ns = np.bincount(first, _exclusive_ns(rows, time), minlength=len(names))
            sums.update(dict(zip(names, total_ns.tolist(), strict=True)))
            if kind == Kind.FORWARD:
                calls.update(dict(zip(names, counts.tolist(), strict=True)))
    kept = _kept_bytes(trace)
    modules = [
        ModuleTimes(
            name,
            forward_ns[name] / steps / NS_A_MS,
            backward_ns[name] / steps / NS_A_MS,
            calls[name] / steps,
            kept.get(name),
        )
        for name in dict.fromkeys((*forward_ns, *backward_ns))
        if name
    ]
    return tuple(sorted(modules, key=lambda row: -row.ms))


def _number_names(rows: Events) -> tuple[list[str], Ints, Ints]:
    """The distinct names of ``rows``, each row's index among them, and the count of each."""
    numbers: dict[str, int] = {}
    of_row = np.array([numbers.setdefault(name, len(numbers)) for name in rows.name.tolist()], dtype=np.int64)
    return list(numbers), of_row, np.bincount(of_row, minlength=len(numbers))


def _exclusive_ns(rows: Events, time: RankTime) -> Ints:
    """The exclusive time of each span in ns: without nested spans of ``rows`` and without waits."""
    computing = rows.duration_ns - intervals.length_within(time.wait, rows.start_ns, rows.end_ns)
    if len(rows) < 2 or (rows.end_ns[:-1] <= rows.start_ns[1:]).all():
        return computing
    exclusive_ns = computing.copy()
    order = np.lexsort((-rows.duration_ns, rows.start_ns)).tolist()
    starts, ends = rows.start_ns.tolist(), rows.end_ns.tolist()
    outer: list[int] = []
    for at in order:
        while outer and ends[outer[-1]] <= starts[at]:
            outer.pop()
        if outer and ends[at] <= ends[outer[-1]]:
            exclusive_ns[outer[-1]] -= computing[at]
        outer.append(at)
    return exclusive_ns


def _kept_bytes(trace: Trace) -> dict[str, int]:
    memory = trace.model.pass_memory
    kept: Counter[str] = Counter()
    for call in () if memory is None else memory.modules:
        kept[call.module] += max(0, call.end_bytes - call.begin_bytes)
    return dict(kept)
