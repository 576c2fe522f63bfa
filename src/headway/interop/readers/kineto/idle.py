"""Why a device has nothing to do: its host waits for it, or does not launch fast enough."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from headway import intervals
from headway.arrays import Texts
from headway.interop.readers.kineto.document import LAUNCHES, KinetoDocument
from headway.trace.events import Idle

LEAST_NS = 5_000  # what lies between kernels that were queued is no idleness
_BLOCKING = ("Synchronize", "StreamWaitValue")
_COPIES = ("cudaMemcpy", "hipMemcpy")  # without Async they return when the copy is done


def idle_reasons(document: KinetoDocument, gaps: intervals.Spans) -> Texts:
    """For each gap of the device: synchronising where the host was waiting for the device as it began, else launching.

    A host that has waited launches the next kernel only then, and the device stands still meanwhile.
    """
    calls = document.of_category(*LAUNCHES)
    blocking = calls[document.called(calls, _blocks)]
    waiting = intervals.union(document.start_ns[blocking], document.end_ns[blocking])
    reasons = np.full(len(gaps), Idle.LAUNCHING, dtype=object)
    reasons[intervals.inside(waiting, gaps[:, 0])] = Idle.SYNCHRONISING
    return reasons


def long_enough(gaps: intervals.Spans) -> npt.NDArray[np.bool_]:
    """Which gaps are idleness."""
    long: npt.NDArray[np.bool_] = gaps[:, 1] - gaps[:, 0] >= LEAST_NS
    return long


def _blocks(name: str) -> bool:
    return any(part in name for part in _BLOCKING) or name in _COPIES
