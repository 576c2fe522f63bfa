"""What a search has found, and which of it to take."""

from __future__ import annotations

from dataclasses import dataclass, replace

from headway.errors import UserError
from headway.optimization.candidate import Candidate, is_better, no_other_training
from headway.planning.bound import StepBound
from headway.strategies.base import Strategy
from headway.strategies.registry import plugin_of

STAGES = "stages"


@dataclass(frozen=True, slots=True)
class SearchResult:
    """Candidates best first, what gains are counted from, and the bound no plan can beat.

    ``baseline_ms`` is the recorded step, ``replayed_ms`` what replay makes of it. ``excluded`` need more memory than
    there is. ``bound`` says why no plan can beat ``bound_ms``; None for plans of which only the number is known.
    ``pruned`` plans were not replayed, as their own bounds say that they are slower, ``unseen`` as time was up;
    ``cut_short`` says that others may not even have been proposed for that reason.
    """

    baseline_ms: float
    replayed_ms: float
    candidates: tuple[Candidate, ...]
    bound_ms: float
    elapsed_s: float
    note: str = ""
    excluded: tuple[Candidate, ...] = ()
    bound: StepBound | None = None
    pruned: int = 0
    unseen: int = 0
    cut_short: bool = False

    def dominated(self, candidate: Candidate) -> bool:
        """Whether another one is no slower and needs no more memory, and is better in one of both.

        What is predicted of a script as it is and what is not are not compared, and nothing that changes what is
        trained dominates what does not.
        """
        return any(
            is_better(each, candidate)
            for each in self.candidates
            if (each.recut is None) == (candidate.recut is None) and no_other_training(each, candidate)
        )

    def like(self, best: Candidate) -> tuple[Candidate, ...]:
        """The others that cannot be told apart from ``best``, which may be one that was made to follow its network."""
        return tuple(
            each
            for each in self.candidates
            if each.expected is not best.expected
            and best.expected.like(each.expected)
            and (each.recut is None or best.recut is not None)
            and no_other_training(each, best)
        )

    def best(self, strategy: str | None = None) -> Candidate:
        """The first candidate that the recorded script can follow, or of the strategy of that name, where given.

        The name of a dimension stands for all strategies along it. Where no such candidate is one that the script can
        follow, it is one of other stages than the script's; ``STAGES`` asks for such. Raises UserError where there is
        none.
        """
        for candidate in sorted(self.candidates, key=lambda each: each.recut is not None):
            if candidate.recut is not None and strategy == STAGES:
                return candidate
            if candidate.recut is None if strategy is None else strategy in names_of(candidate.strategy):
                return candidate
        if strategy is None:
            raise UserError(
                "no plan within the limit is one that the recorded script can follow as it is",
                got=f"{self.candidates[0].name}, which needs headway.parallelize in the script",
                fix="Give --strategy pipeline to have that, or raise --memory-limit.",
            )
        raise UserError(
            "no plan of this strategy was found" + (f": {self.note}" if self.note else ""),
            got=strategy,
            fix="Leave out --strategy. Parameter servers need Gloo and a --cluster that headway probe measured; "
            "strategies that change what is trained need a permission: partial-all-reduce --allow asynchronous, "
            "local-sgd --allow local-steps.",
        )


def following(found: SearchResult, strategy: str | None = None) -> Candidate:
    """The best candidate, of the strategy of that name where given, that can follow its network, as one that does.

    It needs the memory of all that it goes over to.

    Raises UserError where none can.
    """
    fitting = [each.strategy for each in found.candidates if each.recut is None]
    for candidate in (each for each in found.candidates if each.recut is None):
        made = plugin_of(candidate.strategy).following(candidate.strategy, fitting)
        if made is not None and strategy in (None, *names_of(candidate.strategy)):
            own, among = made
            peaks = [each.peak_bytes for each in found.candidates if each.strategy in among]
            peak_bytes = None if None in peaks else max(peak or 0 for peak in peaks)
            return replace(candidate, name=own.describe(), strategy=own, peak_bytes=peak_bytes)
    raise UserError(
        "no plan can follow the job's network while it trains",
        got=" | ".join(dict.fromkeys(each.name for each in fitting)),
        expected="a pipeline",
        fix="Leave out --follow-network.",
    )


def names_of(strategy: Strategy) -> tuple[str, str]:
    """What a user may call it by: its own name, or the dimension of the mesh that it is for."""
    return strategy.name, strategy.dimension
