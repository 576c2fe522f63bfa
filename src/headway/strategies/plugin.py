"""StrategyPlugin: all that Headway asks of a strategy, from its decision to the scripts that run under it.

A strategy is a folder with one object of this class. Nothing outside the folder knows its name, so that another
package can add one (``registry``).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar, cast

from headway.cluster import Cluster
from headway.collectives.algorithms import ALL_REDUCE
from headway.collectives.selection import native
from headway.job import Job
from headway.planning.bound import StepBound
from headway.plugins import API_VERSION
from headway.scheduling.buckets import BucketSchedule
from headway.strategies.base import Strategy
from headway.strategies.footprint import Footprint
from headway.strategies.horizon import Outcome
from headway.tool_settings import Settings

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from headway.graph.build import GraphBuilder
    from headway.graph.step_layout import StepLayout
    from headway.strategies.injection import Injection, ScheduleInjection

S = TypeVar("S", bound=Strategy)


@dataclass(frozen=True, slots=True)
class Proposal:
    """The plans of a strategy that are worth a replay for one job.

    No plan of the strategy can have a step shorter than ``bound_ms``; infinity says nothing about that. ``bound`` says
    why, where that is known: then plans are not replayed whose own bounds say that they are slower than others, which
    holds only for plans that exchange exact gradients of every bucket in every step. ``note`` says why some plans are
    left out; where it is about plans that need a permission, ``about_permitted``, it is told only to users who give
    that.
    """

    strategies: tuple[Strategy, ...] = ()
    bound_ms: float = math.inf
    note: str = ""
    about_permitted: str = ""
    bound: StepBound | None = None

    @classmethod
    def within(cls, strategies: tuple[Strategy, ...], bound: StepBound, note: str = "") -> Proposal:
        """Plans none of which can beat ``bound``."""
        return cls(strategies, bound.step_ms, note, bound=bound)


def proposal_of(plugin: StrategyPlugin[Any], job: Job) -> Proposal:
    """What ``plugin`` proposes for ``job``. Raises TypeError where that is no proposal of strategies."""
    proposal: object = plugin.propose(job)
    if not isinstance(proposal, Proposal):
        raise TypeError(f"propose() returned {type(proposal).__name__}, expected Proposal")
    for strategy in proposal.strategies:
        if not isinstance(strategy, Strategy):
            raise TypeError(
                f"propose() returned {type(strategy).__name__} in its Proposal, expected strategies"
            )
    return proposal


@dataclass(frozen=True, slots=True)
class InForce:
    """The strategy that a live model was found under: its options, and its buckets by the names of parameters."""

    options: Mapping[str, Any]
    buckets: tuple[tuple[str, ...], ...] = ()


class StrategyPlugin(ABC, Generic[S]):
    """One strategy. Methods import what is heavy, torch above all, when they are called.

    ``policy`` is the class of its decisions, whose ``name`` is the strategy's. ``api_version`` is the version of
    ``headway.ext`` that it was written for: Headway refuses it if it has another one. ``carries_over`` says that it
    finishes some of a step's collectives in the next step. ``usual`` are the options with which ``headway predict``
    shows it if no strategies are named, each as in ``--strategy NAME:OPTIONS``. ``measured_after_recordings`` says that
    ranks may measure links and cores after a recording under it. ``simulates_incidents`` says that ``over_a_horizon``
    has ranks slow by chance, dying and joining as the job says.
    """

    api_version: ClassVar[int] = API_VERSION
    policy: type[S]
    carries_over: ClassVar[bool] = False
    usual: ClassVar[tuple[str, ...]] = ()
    measured_after_recordings: ClassVar[bool] = False
    simulates_incidents: ClassVar[bool] = False

    @property
    def name(self) -> str:
        """The strategy's name, in plans and on the command line."""
        return self.policy.name

    # In replay.

    @abstractmethod
    def reactions(self, graph: GraphBuilder[Any], job: Job, strategy: S) -> StepLayout:
        """What lays out the steps of the ranks of ``job`` in ``graph``, whose schedule ``strategy`` decided."""

    @abstractmethod
    def footprint(self, job: Job, schedule: Any, stage: int) -> Footprint:
        """What a rank of ``job.stages[stage]`` holds in addition to parameters, gradients and a pass's activations."""

    def peak_bytes(self, job: Job, schedule: Any, stage: int) -> int | None:
        """The most that a rank of ``job.stages[stage]`` holds at once; None, as here, where ``footprint`` tells."""
        del job, schedule, stage
        return None

    def over_a_horizon(self, job: Job, strategy: S) -> Outcome | None:
        """What ranks do in a time under ``strategy``, where they do not finish their steps together.

        None, as by default, where they do: such steps are laid out by ``reactions``.
        """
        del job, strategy
        return None

    @property
    def has_horizon(self) -> bool:
        """Whether ranks do not finish their steps together, so that ``over_a_horizon`` says what they do."""
        return type(self).over_a_horizon is not StrategyPlugin.over_a_horizon

    def messages(self, schedule: Any, world_size: int, library: str) -> int:
        """Roughly how many pieces the collectives of one pass have; by default those of all-reduces of buckets."""
        assert isinstance(schedule, BucketSchedule)
        sizes = (bucket.size_bytes for bucket in schedule.buckets)
        return sum(native(ALL_REDUCE, size, world_size, library).pieces for size in sizes)

    def as_run(self, strategy: S, job: Job) -> Strategy:
        """What ``job`` is run under at first, where it does not permit all options of ``strategy`` or that changes.

        Raises UnsupportedError if nothing of it would be left.
        """
        del job
        return strategy

    def carried_out_by(self, strategy: S, library: str) -> tuple[Strategy, Sequence[str]]:
        """What ``strategy`` comes to where ``library`` has the collectives, and what of it that ignores or refuses.

        The former is what predictions are of; the latter are sentences without a full stop, about options alone. By
        default nothing is ignored.
        """
        del library
        return strategy, ()

    def without_own_costs(self, cluster: Cluster) -> Cluster:
        """``cluster`` without those measured costs that recordings under this strategy already contain."""
        return cluster

    # In the search.

    def propose(self, job: Job) -> Proposal:
        """The plans that are worth a replay for ``job``; none by default.

        Those that change what is trained are left out of a search unless the user has permitted them.
        """
        del job
        return Proposal()

    def following(self, strategy: S, fitting: Sequence[Strategy]) -> tuple[S, Sequence[Strategy]] | None:
        """``strategy`` as one that goes over to some of ``fitting``, which are given too, as the job's network changes.

        None where it cannot, as by default.
        """
        del strategy, fitting
        return None

    def adapting(self, strategy: Strategy) -> S | None:
        """One that begins as ``strategy``, which may be another's, and changes while the job trains as its world does.

        None where none does, as by default where ``strategy`` does not by itself.
        """
        adapts = isinstance(strategy, self.policy) and strategy.decides_while_training
        return cast("S", strategy) if adapts else None

    def for_workers(self, strategy: S) -> S | None:
        """``strategy``, which adapts, for a job of another number of workers than its plan is of.

        None where it holds for that number alone, as by default.
        """
        del strategy
        return None

    def left_out(self, job: Job) -> str:
        """Why nothing of this strategy is considered for ``job``, whose model is not cut as it would need it."""
        del job
        return ""

    def settings_for(self, tool: str, strategy: S, job: Job | None) -> Settings | None:
        """``strategy`` as settings of ``tool``, a name of ``headway settings --for``; None, as by default, for none.

        Passes of the plan are added to what the tool lacks. ``job`` has the model, where the trace is there. Raises
        PlanError where the tool has something, but not for these options.
        """
        del tool, strategy, job
        return None

    def explain(self, before: Strategy, after: S) -> Sequence[str]:
        """What ``after`` changes of the recorded ``before``, other than the strategy and the number of buckets."""
        del before, after
        return ()

    # Live.

    @abstractmethod
    def wrap(self, module: nn.Module, strategy: S, **ddp_options: Any) -> nn.Module:
        """Wrap ``module`` as ``headway.parallelize`` does. Collective over the process group.

        Raises PlanError if the strategy does not fit the module, UnsupportedError if it would train wrongly.
        """

    def updated_by(self, wrapped: nn.Module, optimizer: Optimizer) -> None:
        """``optimizer`` updates what ``wrap`` has wrapped; of no concern by default."""
        del wrapped, optimizer

    def finish(self, wrapped: nn.Module, timeout_s: float) -> tuple[int, ...] | None:
        """End the training of ``wrapped`` with one model on all ranks; returns whose models are in it.

        None, as by default, where it is not this strategy's or all ranks have the same model at any time. Raises
        CommunicationError where that takes longer than ``timeout_s``.
        """
        del wrapped, timeout_s
        return None

    def launched_with(self, strategy: S) -> AbstractContextManager[Mapping[str, str]]:
        """What a launcher keeps for ``strategy`` while its ranks run on this host: gives variables for them.

        Nothing by default. Raises LaunchError where it does not start.
        """
        del strategy
        return nullcontext({})

    @property
    def injection(self) -> Injection[S] | None:
        """How a script's own DistributedDataParallel becomes this strategy's wrapper; None if it cannot."""
        return None

    @property
    def schedule_injection(self) -> ScheduleInjection[S] | None:
        """How a script's own schedule of a pipeline becomes this strategy's; None where none can."""
        return None

    # In recordings.

    def wrappers(self) -> tuple[type[nn.Module], ...]:
        """Classes that wrap models for this strategy, other than DistributedDataParallel itself."""
        return ()

    def recognise(self, wrapped: Any) -> InForce | None:
        """What is in force if ``wrapped`` is trained under this strategy; None if it is not.

        It is a wrapped model, or a stage of ``torch.distributed.pipelining``.
        """
        del wrapped
        return None

    def refusal(self, wrapped: nn.Module, *, compiled_around: bool) -> str:
        """Why ``wrapped``, whatever its strategy, could not be trained under this one; "" if it could.

        ``compiled_around`` says that code which calls the wrapper was compiled.
        """
        del wrapped, compiled_around
        return ""
