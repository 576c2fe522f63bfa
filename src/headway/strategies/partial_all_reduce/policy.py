"""Policy of partial all-reduce (Prague: Luo et al., ASPLOS 2020): who forms groups, how large, and how they overlap."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from headway.errors import PlanError
from headway.job import Job
from headway.scheduling.groups import CoordinatedGroups, GroupSchedule, hosts_in_turn
from headway.strategies.base import Strategy
from headway.strategies.partial_all_reduce.generators.generator import Milliseconds
from headway.strategies.partial_all_reduce.generators.rules import names, options_of

STATIC = "static"
TIME_LIMIT_S = 30.0
OPTIONS = (
    "group_size", "neighbours", "deadline_ms", "patience", "slowdown_threshold", "lateness_threshold", "mixing_window",
)  # fmt: skip

_RANKS = ("rank", "ranks", "a model of its own")


class PartialAllReduceStrategy(Strategy):
    """Every rank trains a model of its own, and averages it with those of a group of ranks after each iteration.

    With ``within_hosts`` a worker is not a rank but a host, whose ranks train one model together. It does not train as
    all-reduce does: workers hold different models in between, and unless groups are static, which ones average depends
    on when they come.
    """

    name: ClassVar[str] = "partial-all-reduce"

    groups: str = "first-come"
    """Who forms groups: static (a schedule, no coordinator), or a generator: first-come, global-division,
    inter-intra, group-buffer, random, pairs, all."""

    group_size: Annotated[int, Field(ge=2, le=1024)] | None = None
    """How many ranks average together; by default 4. Of static and inter-intra groups: how many hosts."""

    within_hosts: Literal["all-reduce"] | None = None
    """all-reduce: the ranks of a host are one worker. They all-reduce their gradients at every step, as
    DistributedDataParallel does, and hosts average their models: groups are of hosts, not of ranks."""

    staleness: Literal[0, 1] = 0
    """1: a rank computes its next iteration while its group averages, and takes the average over after it."""

    moments: Literal["local", "averaged"] = "local"
    """Whether the optimizer's state is averaged too, or stays each rank's own."""

    neighbours: Literal["bipartite", "any"] | None = None
    """Of pairs: whether a rank averages with the other half of ranks (even and odd), or with any."""

    deadline_ms: Milliseconds | None = None
    """Of first-come groups: how long a rank waits for others; by default it follows the times between arrivals."""

    patience: Annotated[float, Field(ge=0.1, le=100, allow_inf_nan=False)] | None = None
    """Of first-come groups: how many times as long as a group takes to fill the deadline is, if it follows."""

    slowdown_threshold: Annotated[int, Field(ge=0, le=1_000_000)] | None = None
    """Of divided and buffered groups: how many iterations behind a rank is left out of groups that others draw."""

    lateness_threshold: Annotated[float, Field(ge=0, le=1000, allow_inf_nan=False)] | None = None
    """Of divided and buffered groups: by how many of the shortest iterations a rank may ask later, after the end of its
    group, than the rank for which groups are drawn; beyond that it is left out."""

    mixing_window: Annotated[int, Field(ge=1, le=1000)] | None = None
    """How many of its last groups have to connect each rank with all others, directly or by way of others."""

    hosts: tuple[Annotated[int, Field(ge=1)], ...] = ()
    """Of static groups, and with within_hosts: how many ranks each host has, in their order. Without it ranks tell each
    other which host they are on."""

    time_limit_s: Annotated[float, Field(ge=1, le=3600, allow_inf_nan=False)] | None = None
    """How long a group may take to average, in seconds, by default 30: after it, its members go on with their own
    models. A member that is lost costs the others as much. Large models over slow links need more."""

    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """What chance starts from."""

    @model_validator(mode="after")
    def _has_such_options(self) -> Self:
        options = self.generator_options
        if self.groups != STATIC:
            if self.groups not in names():
                raise ValueError(f"groups: expected {STATIC}, {', '.join(names())}, got {self.groups!r}")
            try:
                options_of(self.groups, options)
            except PlanError as error:
                raise ValueError(str(error)) from None
            if self.hosts and not self.within_hosts:
                raise ValueError("hosts are of static groups only, or of within_hosts")
            if self.within_hosts and self.groups == "inter-intra":
                raise ValueError("inter-intra groups average within hosts themselves: leave within_hosts out")
        elif not set(options) <= {"group_size"}:
            raise ValueError(f"static groups have no {', '.join(sorted(set(options) - {'group_size'}))}")
        return self

    @property
    def is_static(self) -> bool:
        """Whether groups are fixed before training."""
        return self.groups == STATIC

    @property
    def generator_options(self) -> dict[str, Any]:
        """What was said to the generator, by the names of its options."""
        return {name: value for name in OPTIONS if (value := getattr(self, name)) is not None}

    def decide(self, job: Job) -> GroupSchedule | CoordinatedGroups:
        """Fix the groups of workers, or say who forms them.

        Raises PlanError for hosts of another number of ranks, and where with ``within_hosts`` there is one host.
        """
        if job.world_size == 1:
            return GroupSchedule(1, ((),)) if self.is_static else self._coordinated(1)
        workers = self.workers(job)
        if len(workers) == 1:
            raise PlanError(
                "all ranks are on one host, and with within_hosts hosts average: nothing but all-reduce is left",
                got=f"{job.world_size} ranks of one host", expected="two hosts", fix="Use ddp, or leave it out.",
            )  # fmt: skip
        if not self.is_static:
            return self._coordinated(len(workers))
        hosts: Sequence[Sequence[int]] = self._ranks_of_hosts(job)
        if self.within_hosts:
            hosts = [[worker] for worker in range(len(workers))]
        return self.groups_of(hosts)

    def groups_of(self, hosts: Sequence[Sequence[int]]) -> GroupSchedule:
        """Static groups of workers on ``hosts``."""
        return hosts_in_turn(hosts, self.group_size or 4)

    @property
    def group_limit_s(self) -> float:
        """How long a group may take to average."""
        return TIME_LIMIT_S if self.time_limit_s is None else self.time_limit_s

    def _coordinated(self, workers: int) -> CoordinatedGroups:
        options = tuple(sorted(self.generator_options.items()))
        return CoordinatedGroups(workers, self.groups, options, self.staleness, self.seed)

    def workers(self, job: Job) -> Sequence[Sequence[int]]:
        """The ranks of each worker: one each, or with ``within_hosts`` those of a host. Raises as ``decide`` does."""
        return self._ranks_of_hosts(job) if self.within_hosts else [(rank,) for rank in range(job.world_size)]

    def spelled_out(self, job: Job) -> Self:
        """The same with the hosts of static groups written out."""
        if not self.is_static:
            return self
        return self.model_copy(update={"hosts": tuple(map(len, self._ranks_of_hosts(job)))})

    def _ranks_of_hosts(self, job: Job) -> Sequence[Sequence[int]]:
        sizes = self.hosts
        if not sizes:
            sizes = (job.world_size,) if job.cluster is None else tuple(h.workers for h in job.cluster.hosts)
        if sum(sizes) != job.world_size:
            raise PlanError(
                f"the hosts of {'within_hosts' if self.within_hosts else 'static groups'} have another number of ranks",
                got=f"{sum(sizes)} ranks", expected=f"{job.world_size}",
            )  # fmt: skip
        ends = [sum(sizes[: number + 1]) for number in range(len(sizes))]
        return [range(end - size, end) for end, size in zip(ends, sizes, strict=True)]

    @property
    def counts_steps(self) -> bool:
        """Rounds of static groups are counted in steps."""
        return self.is_static

    @property
    def changes_training(self) -> str:
        """Models of their own, whom they are averaged with, and how late."""
        worker, workers, model = (
            ("host", "hosts", "a model that its ranks share") if self.within_hosts else _RANKS
        )
        whom = f"all {workers} that are there" if self.groups == "all" else f"a group of {workers}"
        changes = [
            f"every {worker} trains {model} and averages its parameters with {whom}, instead of summing "
            "gradients over all ranks"
        ]
        if self.within_hosts:
            changes.append("each host counts once in an average, however many ranks it has")
        if self.groups not in (STATIC, "all"):
            changes.append(f"which {workers} average depends on when they come, so two runs differ")
        if self.staleness:
            changes.append("averages are taken over one iteration late")
        return "; ".join(changes)

    def describe(self) -> str:
        """Say the strategy and its options in a few words."""
        whose = " of hosts, all-reduce within" if self.within_hosts else ""
        parts = [f"partial all-reduce, {self.groups} groups{whose}"]
        parts += [f"{name.replace('_', ' ')} {value}" for name, value in self.generator_options.items()]
        parts += [] if self.time_limit_s is None else [f"at most {self.time_limit_s:g} s a group"]
        parts += ["one iteration stale"] * self.staleness + ["moments averaged"] * (
            self.moments == "averaged"
        )
        return ", ".join(parts)
