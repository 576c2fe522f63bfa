"""Policy of partial all-reduce (Prague: Luo et al., ASPLOS 2020): how groups form, their size, and overlap."""

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
    """Every rank trains its own model and averages it with a group of ranks after each iteration.

    With ``within_hosts``, a worker is a host whose ranks train one model together. Training differs from all-reduce:
    workers hold different models between averages, and unless groups are static, membership depends on arrival order.
    """

    name: ClassVar[str] = "partial-all-reduce"

    groups: str = "first-come"
    """How groups are formed: static (a fixed schedule, no coordinator), or by a generator: first-come, global-division,
    inter-intra, group-buffer, random, pairs, all."""

    group_size: Annotated[int, Field(ge=2, le=1024)] | None = None
    """Ranks per group; 4 by default. For static and inter-intra groups: hosts per group."""

    within_hosts: Literal["all-reduce"] | None = None
    """all-reduce: the ranks of a host act as one worker. They all-reduce gradients in every step, as
    DistributedDataParallel does, and groups of hosts average their models."""

    staleness: Literal[0, 1] = 0
    """1: a rank computes its next iteration while its group averages, and applies the average afterwards."""

    moments: Literal["local", "averaged"] = "local"
    """Whether optimizer state is averaged too or stays local to each rank."""

    neighbours: Literal["bipartite", "any"] | None = None
    """For pairs: bipartite pairs even ranks with odd ranks; any allows all pairs."""

    deadline_ms: Milliseconds | None = None
    """For first-come groups: how long a rank waits for others. By default it adapts to the times between arrivals."""

    patience: Annotated[float, Field(ge=0.1, le=100, allow_inf_nan=False)] | None = None
    """For first-come groups: the adaptive deadline as a multiple of the mean time that a group takes to fill."""

    slowdown_threshold: Annotated[int, Field(ge=0, le=1_000_000)] | None = None
    """For divided and buffered groups: a rank this many iterations behind is left out of groups that others draw."""

    lateness_threshold: Annotated[float, Field(ge=0, le=1000, allow_inf_nan=False)] | None = None
    """For divided and buffered groups: how much later a rank may ask after its last group than the rank that draws, in
    units of the shortest iteration. A later rank is left out."""

    mixing_window: Annotated[int, Field(ge=1, le=1000)] | None = None
    """How many of its most recent groups must connect each rank with all others, directly or through others."""

    hosts: tuple[Annotated[int, Field(ge=1)], ...] = ()
    """For static groups and within_hosts: the number of ranks on each host, in rank order. Default: found at run time."""

    time_limit_s: Annotated[float, Field(ge=1, le=3600, allow_inf_nan=False)] | None = None
    """Seconds that a group may take to average; 30 by default. After that, members continue with their own models, so a
    lost member costs the others as much. Large models over slow links need more."""

    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Seed of random groups."""

    @model_validator(mode="after")
    def _check_options(self) -> Self:
        options = self.generator_options
        if self.groups != STATIC:
            if self.groups not in names():
                raise ValueError(f"groups: expected {STATIC}, {', '.join(names())}, got {self.groups!r}")
            try:
                options_of(self.groups, options)
            except PlanError as error:
                raise ValueError(str(error)) from None
            if self.hosts and not self.within_hosts:
                raise ValueError("hosts requires static groups or within_hosts")
            if self.within_hosts and self.groups == "inter-intra":
                raise ValueError("inter-intra groups already average within hosts: remove within_hosts")
        elif not set(options) <= {"group_size"}:
            raise ValueError(f"static groups do not take {', '.join(sorted(set(options) - {'group_size'}))}")
        return self

    @property
    def is_static(self) -> bool:
        """Whether groups are fixed before training."""
        return self.groups == STATIC

    @property
    def generator_options(self) -> dict[str, Any]:
        """Options of the generator that are set, by name."""
        return {name: value for name in OPTIONS if (value := getattr(self, name)) is not None}

    def decide(self, job: Job) -> GroupSchedule | CoordinatedGroups:
        """Return a fixed schedule of groups, or the generator that will form them.

        Raises PlanError if ``hosts`` do not add up to the number of ranks, or ``within_hosts`` is used on one host.
        """
        if job.world_size == 1:
            return GroupSchedule(1, ((),)) if self.is_static else self._coordinated(1)
        workers = self.workers(job)
        if len(workers) == 1:
            raise PlanError(
                "within_hosts averages between hosts, but all ranks are on one host",
                got=f"{job.world_size} ranks on one host", expected="at least two hosts",
                fix="Use ddp, or remove within_hosts.",
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
        """Return the ranks of each worker: one, or with ``within_hosts`` those of a host. Raises as ``decide``."""
        return self._ranks_of_hosts(job) if self.within_hosts else [(rank,) for rank in range(job.world_size)]

    def spelled_out(self, job: Job) -> Self:
        """Write out the hosts of static groups."""
        if not self.is_static:
            return self
        return self.model_copy(update={"hosts": tuple(map(len, self._ranks_of_hosts(job)))})

    def _ranks_of_hosts(self, job: Job) -> Sequence[Sequence[int]]:
        sizes = self.hosts
        if not sizes:
            sizes = (job.world_size,) if job.cluster is None else tuple(h.workers for h in job.cluster.hosts)
        if sum(sizes) != job.world_size:
            raise PlanError(
                f"{'within_hosts' if self.within_hosts else 'static groups'}: hosts do not add up to the number of ranks",
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
        """Describe how training differs from all-reduce."""
        worker, workers, model = (
            ("host", "hosts", "one model on all of its ranks") if self.within_hosts else _RANKS
        )
        whom = f"all {workers} present" if self.groups == "all" else f"a group of {workers}"
        changes = [
            f"every {worker} trains {model} and averages its parameters with {whom}, instead of all-reducing "
            "gradients"
        ]
        if self.within_hosts:
            changes.append("each host has the same weight in an average, however many ranks it has")
        if self.groups not in (STATIC, "all"):
            changes.append(f"which {workers} average depends on arrival order, so two runs differ")
        if self.staleness:
            changes.append("averages are applied one iteration late")
        return "; ".join(changes)

    def describe(self) -> str:
        """Describe the strategy and its options for tables."""
        whose = " of hosts, all-reduce within" if self.within_hosts else ""
        parts = [f"partial all-reduce, {self.groups} groups{whose}"]
        parts += [f"{name.replace('_', ' ')} {value}" for name, value in self.generator_options.items()]
        parts += [] if self.time_limit_s is None else [f"at most {self.time_limit_s:g} s a group"]
        parts += ["one iteration stale"] * self.staleness + ["moments averaged"] * (
            self.moments == "averaged"
        )
        return ", ".join(parts)
