"""What exposed communication costs: less than what ranks wait for it, where they wait for one another as well."""

from __future__ import annotations

import numpy as np

from headway.diagnose.breakdown import NS_A_MS
from headway.diagnose.communication import Communications
from headway.diagnose.timeline import RankTime
from headway.trace.events import Kind


def communication_cost_ms(times: dict[int, RankTime], rows: Communications) -> float:
    """By how much a mean step would be shorter without communication, in ms.

    Where ranks communicate all together, who waits for it longer than another rank does waits for that rank as well,
    and would go on to: what counts is who waits least, in each step anew. Else it is the mean over ranks.
    """
    exposed = np.stack([time.per_step(time.exposed) for time in times.values()])
    collective = rows.where(rows.kind == Kind.COLLECTIVE)
    lengths = collective.end_ns - collective.arrival_ns
    members = np.bincount(collective.instance, minlength=1)[collective.instance]
    together = 2 * int(lengths[members == len(times)].sum()) >= int(lengths.sum()) > 0
    each_step = exposed.min(axis=0) if together else exposed.mean(axis=0)
    return float(each_step.mean()) / NS_A_MS
