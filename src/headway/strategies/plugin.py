"""StrategyPlugin: all that Headway asks of a strategy, from its decision to the scripts that run under it.

A strategy is a folder with one object of this class. Nothing outside the folder knows its name, so that a package of
somebody else's may bring one (``registry``).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

from headway.cluster import Cluster
from headway.collectives.algorithms import ALL_REDUCE
from headway.collectives.selection import native
from headway.job import Job
from headway.scheduling.buckets import BucketSchedule
from headway.strategies.base import Strategy
from headway.strategies.footprint import Footprint

if TYPE_CHECKING:
    from torch import nn

    from headway.graph.build import GraphBuilder
    from headway.graph.step_layout import StepLayout
    from headway.strategies.injection import Injection

S = TypeVar("S", bound=Strategy)


@dataclass(frozen=True, slots=True)
class Proposal:
    """What a strategy has the search replay for one job.

    No plan of the strategy can have a step of less than ``bound_ms``. ``note`` says why some plans are left out.
    """

    strategies: tuple[Strategy, ...] = ()
    bound_ms: float = math.inf
    note: str = ""


@dataclass(frozen=True, slots=True)
class InForce:
    """The strategy that a live model was found under: its options, and its buckets by the names of parameters."""

    options: Mapping[str, Any]
    buckets: tuple[tuple[str, ...], ...] = ()


class StrategyPlugin(ABC, Generic[S]):
    """One strategy. Methods import what is heavy, torch above all, when they are called.

    ``policy`` is the class of its decisions, and their ``name`` the strategy's. ``carries_over`` says that it finishes
    some of a step's collectives in the next. ``usual`` are the options under which ``headway predict`` shows it where
    nobody names strategies, each as in ``--strategy NAME:OPTIONS``. ``measured_after_recordings`` says that ranks may
    measure links and cores when a recording under it is over.
    """

    policy: type[S]
    carries_over: ClassVar[bool] = False
    usual: ClassVar[tuple[str, ...]] = ()
    measured_after_recordings: ClassVar[bool] = False

    @property
    def name(self) -> str:
        """The strategy's name, in plans and on the command line."""
        return self.policy.name

    # In replay.

    @abstractmethod
    def reactions(self, graph: GraphBuilder[Any], job: Job) -> StepLayout:
        """What lays the steps of the ranks of ``job`` out in ``graph``, whose schedule this strategy decided."""

    @abstractmethod
    def footprint(self, job: Job, schedule: Any) -> Footprint:
        """What one rank holds besides parameters, gradients and activations."""

    def messages(self, schedule: Any, world_size: int, library: str) -> int:
        """About how many pieces the collectives of one pass have; by default, all-reduces of buckets."""
        assert isinstance(schedule, BucketSchedule)
        sizes = (bucket.size_bytes for bucket in schedule.buckets)
        return sum(native(ALL_REDUCE, size, world_size, library).pieces for size in sizes)

    def as_run(self, strategy: S, job: Job) -> S:
        """``strategy`` as it is run where ``job`` does not permit all that it asks for.

        Raises UnsupportedError where nothing of it would be left.
        """
        del job
        return strategy

    def without_own_costs(self, cluster: Cluster) -> Cluster:
        """``cluster`` without measured costs that a recording under this strategy holds, or shows, by itself."""
        return cluster

    # In the search.

    def propose(self, job: Job) -> Proposal:
        """What is worth a replay for ``job``; nothing by default."""
        del job
        return Proposal()

    def explain(self, before: Strategy, after: S) -> Sequence[str]:
        """What ``after`` changes of the recorded ``before``, besides the strategy and the number of its buckets."""
        del before, after
        return ()

    # Live.

    @abstractmethod
    def wrap(self, module: nn.Module, strategy: S, **ddp_options: Any) -> nn.Module:
        """Wrap ``module`` as ``headway.parallelize`` does. Collective over the process group.

        Raises PlanError where the strategy does not fit the module, UnsupportedError where it would train wrongly.
        """

    @property
    def injection(self) -> Injection[S] | None:
        """How a script's own DistributedDataParallel becomes this strategy's; None where none can."""
        return None

    # In recordings.

    def wrappers(self) -> tuple[type[nn.Module], ...]:
        """Classes that wrap models for this strategy, besides DistributedDataParallel itself."""
        return ()

    def recognise(self, wrapped: nn.Module) -> InForce | None:
        """What is in force where ``wrapped`` is trained under this strategy; None where it is not."""
        del wrapped
        return None

    def refusal(self, wrapped: nn.Module, *, compiled_around: bool) -> str:
        """Why ``wrapped``, of whatever strategy, could not be trained under this one; "" where it could.

        ``compiled_around`` says that code was compiled which calls the wrapper.
        """
        del wrapped, compiled_around
        return ""
