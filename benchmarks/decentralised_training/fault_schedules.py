"""Schedules of faults, drawn from a seed: who is killed, stopped, cut off or joins, when and for how long."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Literal

Kind = Literal["kill", "stop", "cut", "join", "coordinator"]

WORKERS, HOSTS = 6, 3
COORDINATOR_HOST = HOSTS  # the coordinator is on a host of its own, which is never cut off for good
GENERATORS = (
    "first-come:group_size=3", "pairs", "group-buffer:group_size=3", "global-division:group_size=3",
    "inter-intra:group_size=2",
)  # fmt: skip
LEASE_S, TIME_LIMIT_S = 2.0, 1.5
LEAST_HEALTHY = 2  # so many workers are neither gone, stopped nor cut off at any time
BEGIN_S, END_S = 0.3, 2.5  # when faults begin, after all workers have averaged
STOP_S, CUT_S, RESTART_S = (0.2, 3.5), (0.2, 3.0), (0.1, 1.5)
FEWEST, MOST = 1, 4
WEIGHTS: dict[Kind, int] = {"kill": 3, "stop": 3, "cut": 3, "join": 3, "coordinator": 1}


@dataclass(frozen=True, slots=True)
class Fault:
    """From ``at_s`` to ``until_s``, in seconds after all workers have averaged.

    ``target`` is a worker; of "cut" a host; of "coordinator", which is killed and started again, nothing.
    """

    kind: Kind
    at_s: float
    until_s: float
    target: int = -1

    def hits(self, worker: int) -> bool:
        """Whether it keeps ``worker`` from averaging."""
        if self.kind == "cut":
            return self.target in (host_of(worker), COORDINATOR_HOST)
        return self.kind == "coordinator" or (self.kind in ("kill", "stop") and self.target == worker)


@dataclass(frozen=True, slots=True)
class FaultSchedule:
    """One job of WORKERS workers on HOSTS hosts and what befalls it."""

    seed: int
    generator: str
    staleness: int
    faults: tuple[Fault, ...]


def host_of(worker: int) -> int:
    """The host of a worker."""
    return worker // 2 % HOSTS


def schedule_of(seed: int) -> FaultSchedule:
    """The schedule of a seed. Generators and staleness change from seed to seed, so that all combinations come."""
    draw = random.Random(seed)
    faults: list[Fault] = []
    wanted = draw.randint(FEWEST, MOST)
    while len(faults) < wanted:
        fault = _drawn(draw, faults)
        if _is_bearable([*faults, fault]):
            faults.append(fault)
    staleness = seed // len(GENERATORS) % 2
    ordered = tuple(sorted(faults, key=lambda each: each.at_s))
    return FaultSchedule(seed, GENERATORS[seed % len(GENERATORS)], staleness, ordered)


def _drawn(draw: random.Random, before: list[Fault]) -> Fault:
    (kind,) = draw.choices(list(WEIGHTS), list(WEIGHTS.values()))
    at_s = round(draw.uniform(BEGIN_S, END_S), 3)
    if kind == "kill":
        return Fault(kind, at_s, at_s, draw.randrange(WORKERS))
    if kind == "join":
        # Under the number of a worker that was killed, or a new one.
        joined = sum(each.kind == "join" for each in before)
        killed = [each.target for each in before if each.kind == "kill" and each.at_s < at_s]
        return Fault(kind, at_s, at_s, draw.choice([WORKERS + joined, *killed]))
    longest = {"stop": STOP_S, "cut": CUT_S, "coordinator": RESTART_S}[kind]
    until_s = round(at_s + draw.uniform(*longest), 3)
    if kind == "stop":
        return Fault(kind, at_s, until_s, draw.randrange(WORKERS))
    if kind == "cut":
        return Fault(kind, at_s, until_s, draw.randrange(HOSTS + 1))
    return Fault(kind, at_s, until_s)


def _is_bearable(faults: list[Fault]) -> bool:
    """Whether faults make sense together: nobody is hit twice at a time, and enough workers are left."""
    for number, one in enumerate(faults):
        for other in faults[:number]:
            if (one.kind, one.target) == (other.kind, other.target) or _same_worker(one, other):
                return False
            if {one.kind, other.kind} <= {"coordinator", "cut"} and _reach_coordinator(one, other):
                return False
    hitting = [each for each in faults if _is_worker_fault(each)]
    for moment in (each.at_s for each in faults):
        now = [each for each in hitting if each.at_s <= moment <= _end_s(each)]
        hit = sum(any(each.hits(worker) for each in now) for worker in range(WORKERS))
        if WORKERS - hit < LEAST_HEALTHY:
            return False
    return True


def _same_worker(one: Fault, other: Fault) -> bool:
    """Whether both happen to one process: only a join under the number of a worker that was killed before may."""
    kinds = {one.kind, other.kind}
    if one.target != other.target or not kinds <= {"kill", "stop", "join"}:
        return False
    kill, join = (one, other) if one.kind == "kill" else (other, one)
    return not (kinds == {"kill", "join"} and kill.at_s < join.at_s)


def _reach_coordinator(one: Fault, other: Fault) -> bool:
    """Whether both keep all workers from the coordinator."""
    return all(each.kind == "coordinator" or each.target == COORDINATOR_HOST for each in (one, other))


def _is_worker_fault(fault: Fault) -> bool:
    return fault.kind in ("kill", "stop") or (fault.kind == "cut" and fault.target != COORDINATOR_HOST)


def _end_s(fault: Fault) -> float:
    return float("inf") if fault.kind == "kill" else fault.until_s
