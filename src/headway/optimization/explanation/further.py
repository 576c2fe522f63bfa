"""What it would take to come closer to the bound: replays of the plan on other links and with fewer workers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from headway.errors import UserError
from headway.optimization.candidate import Candidate
from headway.replayer.replayer import Replayer
from headway.replayer.what_if import WhatIf

MOST = 16.0
HALVINGS = 5
CLOSED_SHARE = 0.5


@dataclass(frozen=True, slots=True)
class Further:
    """What alone would bring the step to ``target_ms``; None for what does not, however much of it there is.

    ``bandwidth`` and ``latency`` are factors of the links', ``workers`` the largest smaller number of workers;
    ``any_workers`` says whether the plan can have others than it was made for.
    """

    target_ms: float
    bandwidth: float | None
    latency: float | None
    workers: int | None
    any_workers: bool = True

    @property
    def sentence(self) -> str:
        """The same in words."""
        ways = []
        if self.bandwidth is not None:
            ways.append(f"{self.bandwidth:.2g} times the bandwidth")
        if self.latency is not None:
            ways.append(f"{self.latency:.2g} times the latency")
        if self.workers is not None:
            ways.append(f"{self.workers} workers" if self.workers > 1 else "a single worker")
        goal = f"halfway to the bound ({self.target_ms:.1f} ms)"
        if ways:
            return f"To get {goal}, this plan would need {' or '.join(ways)}."
        fewer = "Neither links" if self.any_workers else "Not even links"
        return f"{fewer} {MOST:g} times as fast{' nor fewer workers' * self.any_workers} would bring this plan {goal}."


def further(replayer: Replayer, plan: Candidate, *, bound_ms: float) -> Further:
    """What closes half of the distance from what is predicted of ``plan`` to ``bound_ms``."""
    target_ms = plan.predicted_ms - (plan.predicted_ms - bound_ms) * CLOSED_SHARE

    def reaches(what_if: WhatIf) -> bool | None:
        """None where the plan cannot be replayed so."""
        try:
            played = replayer.replay(plan.strategy, what_if, passes=plan.passes)
            return replayer.expect(played).step_ms <= target_ms
        except UserError:
            return None

    def least(what_if: Callable[[float], WhatIf], sign: int) -> float | None:
        if not reaches(what_if(MOST**sign)):
            return None
        low, high = 0.0, 1.0
        for _ in range(HALVINGS):
            middle = (low + high) / 2
            if reaches(what_if(MOST ** (sign * middle))):
                high = middle
            else:
                low = middle
        return float(MOST ** (sign * high))

    workers, answers = replayer.trace.world_size // 2, []
    while workers >= 1:
        answers.append(reaches(WhatIf(workers=workers)))
        if answers[-1]:
            break
        workers //= 2
    any_workers = not answers or any(each is not None for each in answers)
    bandwidth = least(lambda factor: WhatIf(bandwidth=factor), 1)
    latency = least(lambda factor: WhatIf(latency=factor), -1)
    return Further(target_ms, bandwidth, latency, workers or None, any_workers)
