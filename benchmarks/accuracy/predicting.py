"""What replay says of each configuration, from the base run's trace and the links probed in the same job."""

from __future__ import annotations

from pathlib import Path

from accuracy.configurations import (
    BASE_WORKERS,
    LINK_SHARE,
    SLOW_BY,
    SLOW_HOST,
    SLOW_RANK,
    TENANT,
    TENANT_SHARE,
    Lab,
    Subject,
    plans_of,
)
from accuracy.job import PROBED, TRACE
from headway.cluster import Cluster
from headway.replayer.replayer import Replayer
from headway.simulator.what_if import WhatIf
from headway.trace.folder import load_trace


class BaseRun:
    """The recorded run of one model."""

    def __init__(self, subject: Subject, folder: Path) -> None:
        self.subject = subject
        self.replayer = Replayer(load_trace(folder / TRACE), Cluster.load(folder / PROBED))

    @property
    def recorded_ms(self) -> float:
        """The mean recorded step."""
        return self.replayer.recorded_step_ms

    def predicted_ms(self, lab: Lab) -> dict[str, tuple[float, float]]:
        """The step that replay says of every plan on ``lab``, and its ±."""
        what_if = WhatIf.parse(_differences(self.subject, lab))
        found = {}
        for name, plan in plans_of(self.subject, lab).items():
            result = self.replayer.replay(plan, what_if)
            found[name] = (result.step_ms, self.replayer.expect(result).uncertainty_ms)
        return found


def _differences(subject: Subject, lab: Lab) -> list[str]:
    """What a user would pass as ``--what-if``."""
    asked = []
    if lab.workers != BASE_WORKERS:
        asked.append(f"workers={lab.workers}")
    if lab.rate != 1:
        asked.append(f"bandwidth={lab.rate}x")
    if lab.compute != 1:
        asked.append(f"compute={lab.compute}x")
    if lab.slow_rank:
        asked.append(f"compute:{SLOW_RANK}={SLOW_BY}x")
    if lab.slow_link:
        asked.append(f"bandwidth:{SLOW_HOST}={LINK_SHARE}x")
    if lab.tenant:
        asked.append(f"traffic:{':'.join(TENANT)}={subject.rate_mbit * TENANT_SHARE}mbit")
    return asked
