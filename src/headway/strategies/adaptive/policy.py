"""Policy of adaptive training: what a job begins as, and what is searched for while it trains."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Self

from pydantic import Field, model_validator

from headway.job import Job
from headway.scheduling.buckets import BucketSchedule
from headway.strategies import registry
from headway.strategies.base import DATA, Strategy
from headway.strategies.registry import NamedStrategy

HOME = "decoupled"
"""The strategy whose schedules are searched."""

CHANGES_WHILE_TRAINING = ("tune", "adapt", "begin_as")
OF_SERVERS_ALONE = frozenset(("channels", "shares", "pieces"))


def _home() -> Strategy:
    return registry.policy_named(HOME).model_validate({})


class AdaptiveStrategy(Strategy):
    """Chooses among strategies of data parallelism while the job trains: decoupled schedules, stock DDP, servers."""

    name: ClassVar[str] = "adaptive"

    begin_as: NamedStrategy = Field(default_factory=_home)
    """What does the steps until something faster is measured: ``decoupled``, ``ddp`` or ``parameter_server`` with its
    options, which send gradients as they are."""

    search_from: NamedStrategy | None = None
    """The decoupled schedule that the search starts from where the job begins as ``ddp`` or ``parameter_server``; null
    for the default one."""

    tune: bool = True
    """Whether better options are searched for during the first steps."""

    adapt: bool = False
    """Whether the job is watched for as long as it trains, and better options are searched for when its network, its
    ranks or their number have changed."""

    @model_validator(mode="after")
    def _has_runtimes(self) -> Self:
        for option, strategy in (("begin_as", self.begin_as), ("search_from", self.search_from)):
            if strategy is None:
                continue
            if strategy.permissions:
                raise ValueError(f"{option} must send gradients as they are, has {strategy.describe()}")
            if getattr(strategy, "servers", None) is not None:
                raise ValueError(f"{option} must not have servers on hosts: they can be predicted, not run")
            is_home = strategy.name == HOME
            if option == "search_from" and not is_home:
                raise ValueError(f"search_from must be {HOME}, is {strategy.name}")
            if strategy.dimension != DATA or not (is_home or _on_stock_ddp(strategy)):
                raise ValueError(
                    f"{option} cannot be {strategy.name}: it cannot be replaced while a job trains"
                )
        if self.search_from is not None and self.begin_as.name == HOME:
            raise ValueError(f"search_from is for a job that does not begin as {HOME}")
        return self

    @property
    def home(self) -> Strategy:
        """The decoupled schedule that is in force, or that the search starts from."""
        return self.begin_as if self.begin_as.name == HOME else self.search_from or _home()

    @property
    def begins_as(self) -> Strategy:
        """What does the steps at first."""
        return self.begin_as

    @property
    def decides_while_training(self) -> bool:
        """Whether anything is searched for."""
        return self.tune or self.adapt

    @property
    def family(self) -> str:
        """That of what it begins as."""
        return self.begin_as.family

    def decide(self, job: Job) -> BucketSchedule:
        """Decide what the job begins with."""
        schedule = self.begin_as.decide(job)
        assert isinstance(schedule, BucketSchedule)
        return schedule

    def spelled_out(self, job: Job) -> Self:
        """The same decision with the buckets of what it begins as written out."""
        return self.model_copy(update={"begin_as": self.begin_as.spelled_out(job)})

    def describe(self) -> str:
        """Say in a few words what it begins as, and what is changed."""
        words = [self.begin_as.describe()]
        words += ["tuned while training"] * self.tune + ["adapting"] * self.adapt
        return ", ".join(words)


def _on_stock_ddp(strategy: Strategy) -> bool:
    return registry.plugin_of(strategy).on_stock_ddp(strategy) is not None


def of_earlier_format(name: str, options: Any) -> tuple[str, Any] | None:
    """``decoupled`` as plans had it that could be tuned, adapt, and begin as stock DDP or servers."""
    if name != HOME or not isinstance(options, Mapping) or not (options.keys() & set(CHANGES_WHILE_TRAINING)):
        return None
    kept = {option: value for option, value in options.items() if option not in CHANGES_WHILE_TRAINING}
    tune, adapt = options.get("tune", False), options.get("adapt", False)
    begin_as = options.get("begin_as")
    if begin_as is None and tune is False and adapt is False:
        return name, kept
    changes = {"tune": tune, "adapt": adapt}
    if begin_as is None:
        return AdaptiveStrategy.name, {"begin_as": {HOME: kept}, **changes}
    if isinstance(begin_as, Mapping):
        has_servers = bool(begin_as.keys() & OF_SERVERS_ALONE)
        begin_as = {"parameter_server" if has_servers else "ddp": begin_as}
    return AdaptiveStrategy.name, {"begin_as": begin_as, "search_from": {HOME: kept}, **changes}
