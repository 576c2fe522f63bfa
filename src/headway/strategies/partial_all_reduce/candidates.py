"""Plans of partial all-reduce that are worth a simulation, for users who permit them."""

from __future__ import annotations

from typing import Literal

from headway.job import Job
from headway.permission import ASYNCHRONOUS
from headway.strategies.partial_all_reduce.policy import STATIC, PartialAllReduceStrategy
from headway.strategies.plugin import Proposal

SIZES = (2, 4, 8)  # of groups
STALENESS: tuple[Literal[0, 1], ...] = (0, 1)
LATENESS_THRESHOLD = 1.0  # equal ranks never come so late, and one twice as slow as its host does
MOST_RANKS = 256  # a simulation takes time in proportion to their number


def proposal(job: Job) -> Proposal:
    """A handful: groups of whoever has come, of several sizes; by a schedule; across hosts, whose ranks may be one
    worker; pairs. With no bound."""
    if job.world_size < 2:
        return Proposal()
    if why := _why_not(job):
        return Proposal(note=f"partial all-reduce was not considered: {why}", about_permitted=ASYNCHRONOUS)
    own = PartialAllReduceStrategy
    sizes = [size for size in SIZES if size < job.world_size] or [2]
    found = [own(group_size=size, staleness=staleness) for size in sizes for staleness in STALENESS]
    found += [own(groups=STATIC, staleness=staleness).spelled_out(job) for staleness in STALENESS]
    hosts = job.on.hosts
    if len(hosts) > 1 and any(host.workers > 1 for host in hosts):
        found += [
            own(groups="inter-intra", lateness_threshold=LATENESS_THRESHOLD, staleness=staleness)
            for staleness in STALENESS
        ]
        together = [own(groups=STATIC, within_hosts="all-reduce", staleness=each) for each in STALENESS]
        found += [strategy.spelled_out(job) for strategy in together]
        if len(hosts) > 2:
            found.append(own(within_hosts="all-reduce", group_size=2, staleness=1))
    if job.world_size > 2:
        found.append(own(groups="pairs", staleness=1))
    return Proposal(tuple(found))


def _why_not(job: Job) -> str:
    if refusal := job.refusals.get(PartialAllReduceStrategy.name):
        return refusal
    if job.world_size > MOST_RANKS:
        return f"{job.world_size} ranks, and a search simulates at most {MOST_RANKS} that come as they will"
    return ""
