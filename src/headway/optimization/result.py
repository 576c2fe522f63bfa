"""What a search has found, and which of it to take."""

from __future__ import annotations

from dataclasses import dataclass, replace

from headway.errors import UserError
from headway.optimization.candidate import Candidate, is_better, no_other_training
from headway.optimization.ranking import best_to_take, gains
from headway.planning.bound import StepBound
from headway.replayer.fidelity import is_reproduced
from headway.strategies import registry
from headway.strategies.base import DATA, Strategy
from headway.strategies.data_parallel.ddp.policy import DistributedDataParallelStrategy
from headway.strategies.registry import plugin_of

STAGES = "stages"


@dataclass(frozen=True, slots=True)
class SearchResult:
    """Candidates best first, what gains are counted from, and the bound no plan can beat.

    The recorded command can run each of ``candidates`` as it is; ``for_other_scripts`` are plans that need a change of
    the script, best first too. The recorded plan is a candidate unless it needs more memory than there is.
    ``baseline_ms`` is the recorded step, ``replayed_ms`` what replay makes of it. ``notes`` say what was left out and
    why; ``excluded`` need more memory than there is. ``bound`` says why no plan can beat ``bound_ms``, where that is
    known. ``pruned`` plans were not replayed, as their own bounds say that they are slower,
    ``unseen`` as time was up; ``cut_short`` says that others may not even have been proposed for that reason.
    """

    baseline_ms: float
    replayed_ms: float
    candidates: tuple[Candidate, ...]
    bound_ms: float
    elapsed_s: float
    notes: tuple[str, ...] = ()
    excluded: tuple[Candidate, ...] = ()
    bound: StepBound | None = None
    pruned: int = 0
    unseen: int = 0
    cut_short: bool = False
    for_other_scripts: tuple[Candidate, ...] = ()

    @property
    def note(self) -> str:
        """What was left out and why, in sentences without the last full stop."""
        return ". ".join(self.notes)

    @property
    def replayed(self) -> int:
        """How many plans were replayed."""
        return len(self.candidates) + len(self.for_other_scripts)

    @property
    def reproduction_error(self) -> float:
        """By which share the replay of the recorded plan is slower than the recording; below 0 where it is faster."""
        return self.replayed_ms / self.baseline_ms - 1

    @property
    def can_rank(self) -> bool:
        """Whether replay reproduces the recording well enough for predictions to rank plans."""
        return is_reproduced(self.reproduction_error)

    @property
    def recorded(self) -> Candidate | None:
        """The plan that was recorded; None where it needs more memory than there is."""
        return next((each for each in self.candidates if not each.changed), None)

    @property
    def stock(self) -> Candidate | None:
        """DDP with its default buckets; None where that was not replayed, or needs more memory than there is."""
        default = DistributedDataParallelStrategy()
        return next((each for each in self.candidates if each.strategy == default and not each.passes), None)

    def dominated(self, candidate: Candidate) -> bool:
        """Whether another one is no slower and needs no more memory, and is better in one of both.

        Nothing that changes what is trained dominates what does not.
        """
        return any(
            is_better(each, candidate) and no_other_training(each, candidate) for each in self.candidates
        )

    def like(self, best: Candidate) -> tuple[Candidate, ...]:
        """The others that cannot be told apart from ``best``, which may be one that was made to follow its network."""
        among = self.candidates if best.is_runnable else (*self.candidates, *self.for_other_scripts)
        return tuple(
            each
            for each in among
            if each.expected is not best.expected
            and best.expected.like(each.expected)
            and no_other_training(each, best)
        )

    def best(self, strategy: str | None = None) -> Candidate:
        """The plan to take of those that the recorded command can run as it is.

        That is the recorded plan, unless another is faster by more than ±; of such plans the fastest, or one that ties
        with it and needs less memory or fewer changes. Where the recording cannot rank plans, it is the recorded plan.

        With ``strategy`` it is the best of the strategy of that name, whatever was recorded. The name of a dimension
        stands for all strategies along it. Where the recorded command can run none of it, it is one that needs a change
        of the script; ``STAGES`` asks for the best of such. Raises UserError where there is none.
        """
        if strategy is not None:
            return best_to_take(self._of(strategy))
        if not self.candidates:
            raise UserError(
                "no plan within the limit is one that the recorded script can follow as it is",
                got=f"{self.for_other_scripts[0].name}, which needs headway.parallelize in the script",
                fix="Give --strategy pipeline to have that, or raise --memory-limit.",
            )
        if self.recorded is None:
            return best_to_take(self.candidates)
        faster = [each for each in self.candidates if gains(each)]
        return best_to_take(faster) if faster and self.can_rank else self.recorded

    def _of(self, strategy: str) -> tuple[Candidate, ...]:
        """All of that strategy that are to be compared: there is at least one."""
        among = () if strategy == STAGES else self.candidates
        for candidates in (among, self.for_other_scripts):
            named = tuple(each for each in candidates if strategy in (STAGES, *names_of(each.strategy)))
            if named:
                return named
        raise UserError(
            "no plan of this strategy was found" + (f": {self.note}" if self.note else ""),
            got=strategy,
            fix="Leave out --strategy. Parameter servers need Gloo and a --cluster that headway probe measured; "
            "strategies that change what is trained need a permission, such as partial-all-reduce "
            "--allow asynchronous.",
        )


def check_strategy(strategy: str | None) -> None:
    """Raise UserError unless ``SearchResult.best`` knows this name, or it is None."""
    if strategy is not None:
        registry.check_usable(strategy)
    known = (*registry.names(), *registry.COMPOSED, DATA, STAGES)
    if strategy is not None and strategy not in known:
        raise UserError("there is no such strategy", got=strategy, expected=" or ".join(known))


def following(found: SearchResult, strategy: str | None = None) -> Candidate:
    """The best candidate, of the strategy of that name where given, that can follow its network, as one that does.

    It needs the memory of all that it goes over to.

    Raises UserError where none can.
    """
    fitting = [each.strategy for each in found.candidates]
    for candidate in found.candidates:
        adapted = plugin_of(candidate.strategy).following(candidate.strategy, fitting)
        if adapted is not None and strategy in (None, *names_of(candidate.strategy)):
            follower, among = adapted
            peaks = [each.peak_bytes for each in found.candidates if each.strategy in among]
            peak_bytes = None if None in peaks else max(peak or 0 for peak in peaks)
            return replace(candidate, name=follower.describe(), strategy=follower, peak_bytes=peak_bytes)
    raise UserError(
        "no plan can follow the job's network while it trains",
        got=" | ".join(dict.fromkeys(each.name for each in found.candidates)),
        expected="a pipeline",
        fix="Leave out --follow-network.",
    )


def names_of(strategy: Strategy) -> tuple[str, str]:
    """What a user may call it by: its own name, or the dimension of the mesh that it is for."""
    return strategy.name, strategy.dimension
