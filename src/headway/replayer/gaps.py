"""Time between backward and the optimizer's step that nothing recorded explains: scripts may read gradients there."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from headway.graph.timeline import Part, Point, Timeline
from headway.trace.events import Read

LARGE = 0.03  # of a step


def gap_ns(ranks: Iterable[Sequence[Timeline]]) -> float:
    """The mean time between the end of backward and the optimizer's step, without waits and recorded reads.

    If a recorded read fetches all gradients, other time there needs no explanation.
    """
    return float(np.mean([_gap_ns(timeline) for timelines in ranks for timeline in timelines]))


def gap_note(ranks: Iterable[Sequence[Timeline]], step_ms: float) -> tuple[str, ...]:
    """What a large gap may mean for plans that are decoupled."""
    gap_ms = gap_ns(ranks) / 1e6
    if gap_ms < LARGE * step_ms:
        return ()
    return (
        f"{gap_ms:.1f} ms of each step lie between backward and the optimizer's step, outside of any recorded read of "
        "gradients. If the script reads .grad there itself, decoupled plans will be slower than predicted, because "
        "such a read waits for communication.",
    )


def _gap_ns(timeline: Timeline) -> int:
    total = gap = 0
    ended = False
    for item in timeline.items:
        if item.kind == Point.BACKWARD_END:
            ended, gap = True, 0
        elif item.kind == Point.STEP:
            total += gap if ended else 0
            ended, gap = False, 0
        elif item.kind == Part.READ and item.name == Read.LOOK and not item.parameters:
            ended = False
        elif item.kind == Part.REST:
            gap += item.duration_ns
    return total
