"""``StrategyPlugin``: the interface of a strategy, for replay, search, training and recordings.

A strategy is a folder with one ``StrategyPlugin`` object. Nothing outside the folder depends on it, so other packages
can add strategies (``registry``).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar, cast

from headway.bound import StepBound
from headway.cluster import Cluster
from headway.collectives.algorithms import ALL_REDUCE
from headway.collectives.selection import native
from headway.job import Job
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
    from headway.strategies.candidates import Candidate, Question
    from headway.strategies.injection import Injection, ScheduleInjection
    from headway.strategies.live.stock import StockSteps

S = TypeVar("S", bound=Strategy)


@dataclass(frozen=True, slots=True)
class Proposal:
    """Candidate plans of one strategy for a job.

    No plan of the strategy has a step shorter than ``bound_ms``; infinity means that no bound is known. ``bound`` gives
    its reason, if known; then plans whose own bounds prove them slower than others are not replayed, which is valid only
    for plans that exchange exact gradients of every bucket in every step. ``note`` explains why plans were omitted. If
    it is about plans that need the permission ``about_permitted``, it is shown only to users who grant that.
    """

    strategies: tuple[Strategy, ...] = ()
    bound_ms: float = math.inf
    note: str = ""
    about_permitted: str = ""
    bound: StepBound | None = None

    @classmethod
    def within(cls, strategies: tuple[Strategy, ...], bound: StepBound, note: str = "") -> Proposal:
        """Propose plans that cannot beat ``bound``."""
        return cls(strategies, bound.step_ms, note, bound=bound)


def proposal_of(plugin: StrategyPlugin[Any], job: Job) -> Proposal:
    """Return the proposal of ``plugin`` for ``job``. Raises TypeError if it is not a ``Proposal`` of strategies."""
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
    """Strategy of a live model: its options, and its buckets as parameter names."""

    options: Mapping[str, Any]
    buckets: tuple[tuple[str, ...], ...] = ()


class StrategyPlugin(ABC, Generic[S]):
    """One strategy. Methods import heavy libraries, above all torch, when they are called.

    - ``policy``: class of its decisions, whose ``name`` is the strategy's.
    - ``api_version``: version of ``headway.ext`` that it was written for; Headway rejects other versions.
    - ``carries_over``: whether collectives of a step may finish in the next step.
    - ``usual``: option strings, as in ``--strategy NAME:OPTIONS``, that ``headway predict`` shows by default.
    - ``measured_after_recordings``: whether ranks may measure links and cores after a recording under it.
    - ``simulates_incidents``: whether ``over_a_horizon`` simulates randomly slow, dying and joining ranks.
    - ``library_calls``: NCCL functions whose algorithm it leaves to the library, such as "allreduce".
    """

    api_version: ClassVar[int] = API_VERSION
    policy: type[S]
    carries_over: ClassVar[bool] = False
    usual: ClassVar[tuple[str, ...]] = ()
    measured_after_recordings: ClassVar[bool] = False
    simulates_incidents: ClassVar[bool] = False
    library_calls: ClassVar[tuple[str, ...]] = ()

    @property
    def name(self) -> str:
        """The strategy's name, in plans and on the command line."""
        return self.policy.name

    # In replay.

    @abstractmethod
    def reactions(self, graph: GraphBuilder[Any], job: Job, strategy: S) -> StepLayout:
        """Return the object that lays out the ranks' steps in ``graph``, whose schedule ``strategy`` decided."""

    @abstractmethod
    def footprint(self, job: Job, schedule: Any, stage: int) -> Footprint:
        """Return the memory of a rank of ``job.stages[stage]`` beyond parameters, gradients and activations of a pass."""

    def peak_bytes(self, job: Job, schedule: Any, stage: int) -> int | None:
        """Return the peak memory of a rank of ``job.stages[stage]``; None (the default) to use ``footprint``."""
        del job, schedule, stage
        return None

    def over_a_horizon(self, job: Job, strategy: S) -> Outcome | None:
        """Simulate ``strategy`` over a time horizon, for ranks that do not finish steps together.

        Returns None (the default) if they do: ``reactions`` lays out such steps.
        """
        del job, strategy
        return None

    @property
    def has_horizon(self) -> bool:
        """Whether ranks do not finish steps together and are simulated by ``over_a_horizon``."""
        return type(self).over_a_horizon is not StrategyPlugin.over_a_horizon

    def messages(self, schedule: Any, world_size: int, library: str) -> int:
        """Estimate the number of messages of one pass; by default those of all-reduces of its buckets."""
        assert isinstance(schedule, BucketSchedule)
        sizes = (bucket.size_bytes for bucket in schedule.buckets)
        return sum(native(ALL_REDUCE, size, world_size, library).pieces for size in sizes)

    def as_run(self, strategy: S, job: Job) -> Strategy:
        """Return the strategy that ``job`` starts with, if it does not support all options of ``strategy``.

        Raises UnsupportedError if nothing of the strategy would remain.
        """
        del job
        return strategy

    def carried_out_by(self, strategy: S, library: str) -> tuple[Strategy, Sequence[str]]:
        """Return ``strategy`` as ``library`` carries it out, and sentences about options that it ignores or rejects.

        Predictions use the returned strategy. Sentences have no full stop. By default nothing is ignored.
        """
        del library
        return strategy, ()

    def without_own_costs(self, cluster: Cluster) -> Cluster:
        """Return ``cluster`` without measured costs that recordings under this strategy already contain."""
        return cluster

    # In the search.

    def propose(self, job: Job) -> Proposal:
        """Propose candidate plans for ``job``; none by default.

        Plans that change training are searched only with the user's permission.
        """
        del job
        return Proposal()

    def following(self, strategy: S, fitting: Sequence[Strategy]) -> tuple[S, Sequence[Strategy]] | None:
        """Return ``strategy`` as one that switches among alternatives as the network changes, and those alternatives.

        The alternatives are some of ``fitting``. Returns None if this strategy cannot switch (the default).
        """
        del strategy, fitting
        return None

    def adapting(self, strategy: Strategy) -> S | None:
        """Return a strategy that starts as ``strategy``, which may be another plug-in's, and adapts during training.

        Returns None if this plug-in cannot adapt it (the default, unless ``strategy`` adapts by itself).
        """
        adapts = isinstance(strategy, self.policy) and strategy.decides_while_training
        return cast("S", strategy) if adapts else None

    def for_workers(self, strategy: S) -> S | None:
        """Return the adaptive ``strategy`` for a job with a different number of workers than its plan.

        Returns None if it holds for the planned number only (the default).
        """
        del strategy
        return None

    def of_earlier_format(self, name: str, options: Any) -> tuple[str, Any] | None:
        """The strategy ``name`` of an earlier plan format, and its options, as they are called today.

        None, as by default, where this strategy has nothing to do with it.
        """
        del name, options
        return None

    def for_any_workers(self, strategy: S) -> S:
        """``strategy`` without the options that hold for one number of workers alone; by default there are none."""
        return strategy

    def left_out(self, job: Job) -> str:
        """Explain why this strategy is not considered for ``job``, whose model is not partitioned as it needs."""
        del job
        return ""

    def settings_for(self, tool: str, strategy: S, job: Job | None) -> Settings | None:
        """Export ``strategy`` as settings of ``tool``, a name of ``headway settings --for``.

        Returns None (the default) if unsupported.

        Passes of the plan are added to what the tool lacks. ``job`` carries the model if a trace is available. Raises
        PlanError if the tool supports the strategy, but not these options.
        """
        del tool, strategy, job
        return None

    def explain(self, before: Strategy, after: S) -> Sequence[str]:
        """Explain what ``after`` changes from the recorded ``before``, besides strategy and number of buckets."""
        del before, after
        return ()

    # Live.

    @abstractmethod
    def wrap(self, module: nn.Module, strategy: S, **ddp_options: Any) -> nn.Module:
        """Wrap ``module`` as ``headway.parallelize`` does. Collective over the process group.

        Raises PlanError if the strategy does not fit the module, UnsupportedError if it would train wrongly.
        """

    def worth_trying(self, question: Question) -> Sequence[Candidate]:
        """What is worth a measurement while a job trains; nothing by default."""
        del question
        return ()

    def live_runtime(self, module: nn.Module, strategy: S, **ddp_options: Any) -> Any:
        """``module`` wrapped as by ``wrap``, for a wrapper that another strategy puts around it and alone calls.

        What records scripts is told nothing of it. None, as by default, where the strategy has no such runtime. Others
        are described by ``strategies.live.runtime``.
        """
        del module, strategy, ddp_options

    def on_stock_ddp(self, strategy: S) -> StockSteps | None:
        """How torch's DDP does steps under ``strategy``; None, as by default, where it does not."""
        del strategy
        return None

    def updated_by(self, wrapped: nn.Module, optimizer: Optimizer) -> None:
        """Tell the strategy which optimizer updates the wrapped model; ignored by default."""
        del wrapped, optimizer

    def finish(self, wrapped: nn.Module, timeout_s: float) -> tuple[int, ...] | None:
        """End training with one model on all ranks; returns the ranks whose models it averages.

        Returns None (the default) if ``wrapped`` is not this strategy's, or all ranks always hold the same model. Raises
        CommunicationError after ``timeout_s``.
        """
        del wrapped, timeout_s
        return None

    def launched_with(self, strategy: S) -> AbstractContextManager[Mapping[str, str]]:
        """Run services that ``strategy`` needs while ranks run on this host; yields environment variables for the ranks.

        Nothing by default. Raises LaunchError if a service does not start.
        """
        del strategy
        return nullcontext({})

    @property
    def injection(self) -> Injection[S] | None:
        """How this strategy replaces a script's DistributedDataParallel; None if it cannot."""
        return None

    @property
    def schedule_injection(self) -> ScheduleInjection[S] | None:
        """How this strategy replaces a script's pipeline schedule; None if it cannot."""
        return None

    # In recordings.

    def wrappers(self) -> tuple[type[nn.Module], ...]:
        """Wrapper classes of this strategy, other than DistributedDataParallel itself."""
        return ()

    def recognise(self, wrapped: Any) -> InForce | None:
        """Return the options in force if ``wrapped`` is trained under this strategy, else None.

        ``wrapped`` is a wrapped model, or a stage of ``torch.distributed.pipelining``.
        """
        del wrapped
        return None

    def refusal(self, wrapped: nn.Module, *, compiled_around: bool) -> str:
        """Explain why ``wrapped`` could not be trained under this strategy; "" if it could.

        ``compiled_around`` says that compiled code calls the wrapper.
        """
        del wrapped, compiled_around
        return ""
