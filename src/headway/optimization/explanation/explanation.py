"""The explanation of a plan: choice by choice what it saves, and where on the critical path."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from headway.optimization.candidate import Candidate
from headway.optimization.explanation.choices import Step, passes_upon, steps_to
from headway.optimization.explanation.further import Further, further
from headway.optimization.explanation.path import PathParts, iteration_of, path_of
from headway.optimization.result import SearchResult
from headway.replayer.replayer import Replayer
from headway.replayer.simulate import Simulation
from headway.strategies.registry import plugin_of

SAME_MS = 1e-6
SAME_SHARE = 1e-6


@dataclass(frozen=True, slots=True)
class Choice:
    """A choice of a plan: the expected step with it and all before it, and what it saves; below 0 what it costs.

    ``saved`` is by part and rank of the critical path, and adds up to ``saved_ms``.
    """

    name: str
    step_ms: float
    saved_ms: float
    saved: PathParts

    @property
    def where(self) -> str:
        """Where on the critical path most of it is saved, or what grows most."""
        sign = 1 if self.saved_ms >= 0 else -1
        parts = {part: sign * ms for part, ms in self.saved.parts_ms.items()}
        part = max(parts, key=parts.__getitem__, default="")
        if not part or parts[part] <= 0:
            return ""
        own = {rank: sign * ms for (name, rank), ms in self.saved.ms.items() if name == part}
        rank = max(own, key=own.__getitem__)
        # Where the path goes by way of another rank than before, what one has less the other has more.
        stays = own[rank] <= parts[part] * (1 + SAME_SHARE)
        return f"{part}, most on rank {rank}" if stays else part


@dataclass(frozen=True, slots=True)
class Explanation:
    """Why a plan takes the step that it does. All times are expected ms, of a mean step.

    ``choices`` lead from ``from_ms``, the recorded step, to ``to_ms``, the one predicted of the plan; each is added to
    those before it. ``after`` is the critical path that is left. Where ranks do not wait for each
    other in every step there is none: then it is a mean iteration of a rank, and ``iterates`` says so.
    """

    from_ms: float
    to_ms: float
    choices: tuple[Choice, ...]
    after: PathParts
    further: Further | None = None
    iterates: bool = False

    @property
    def next_bottleneck(self) -> str:
        """What the critical path, or an iteration, is made of under the plan, in a sentence."""
        parts = self.after.parts_ms
        whole = self.after.step_ms
        shares = [f"{ms / whole:.0%} {part}" for part, ms in parts.items() if ms >= whole / 100]
        first = next(iter(parts))
        return (
            f"Under this plan {'a mean iteration' if self.iterates else 'the critical path'} is {', '.join(shares)}; "
            f"next to shorten is {first}, which is longest on rank {self.after.rank_of(first)}."
        )

    def to_document(self) -> dict[str, Any]:
        """The part ``explanation`` of the document that ``headway optimize --json`` prints."""
        return {
            "from_ms": self.from_ms,
            "to_ms": self.to_ms,
            "choices": [
                {
                    "name": each.name,
                    "step_ms": each.step_ms,
                    "saved_ms": each.saved_ms,
                    "where": each.where,
                    "saved_parts_ms": each.saved.parts_ms,
                }
                for each in self.choices
            ],
            "critical_path_ms": self.after.parts_ms,
            "next_bottleneck": self.next_bottleneck,
            "further": None
            if self.further is None
            else {
                "target_ms": self.further.target_ms,
                "bandwidth": self.further.bandwidth,
                "latency": self.further.latency,
                "workers": self.further.workers,
                "sentence": self.further.sentence,
            },
        }


def explain(
    replayer: Replayer, found: SearchResult, best: Candidate, *, go_further: bool = False
) -> Explanation | None:
    """Why ``best`` is as fast as it is; with ``go_further`` also what would bring it closer to the bound.

    A plan's passes are choices upon its strategy; other stages are one choice with the pipeline that has them, and so
    is a strategy whose ranks do not wait for each other in every step. None for plans of another number of
    micro-batches than was recorded.
    """
    if best.of_other_size:
        return None
    if plugin_of(best.strategy).has_horizon:
        return _over_a_horizon(replayer, best)
    mesh = None if best.recut is None else best.recut.mesh
    target = replayer.replay(best.strategy, passes=best.passes, mesh=mesh)
    if abs(replayer.expect(target).step_ms - best.predicted_ms) > SAME_MS * best.predicted_ms:
        return None
    choices, after = _choices(
        replayer,
        (
            (step.name, replayer.expect(step.played).step_ms, path_of(replayer, step.played))
            for step in _steps(replayer, best, target)
        ),
    )
    more = None
    if (
        go_further
        and found.bound is not None
        and best.recut is None
        and not best.changes_training
        and best.predicted_ms > found.bound_ms
    ):
        more = further(replayer, best, bound_ms=found.bound_ms)
    return Explanation(replayer.recorded_step_ms, best.predicted_ms, choices, after, more)


def _over_a_horizon(replayer: Replayer, best: Candidate) -> Explanation | None:
    """The strategy as one choice, then each pass; None for what was recorded so already."""
    recorded = replayer.recorded_strategy
    if plugin_of(recorded).has_horizon:
        return None
    names = [f"{best.strategy.name} instead of {recorded.name}", *(each.describe() for each in best.passes)]
    outcomes = []
    for count in range(len(names)):
        outcome = replayer.replay_horizon(best.strategy, passes=best.passes[:count])
        assert outcome is not None
        outcomes.append(outcome)
    expected_ms = [replayer.expect_outcome(each).step_ms for each in outcomes]
    if abs(expected_ms[-1] - best.predicted_ms) > SAME_MS * best.predicted_ms:
        return None
    choices, after = _choices(replayer, zip(names, expected_ms, map(iteration_of, outcomes), strict=True))
    return Explanation(replayer.recorded_step_ms, best.predicted_ms, choices, after, iterates=True)


def _choices(
    replayer: Replayer, steps: Iterable[tuple[str, float, PathParts]]
) -> tuple[tuple[Choice, ...], PathParts]:
    """Steps that lead away from the recorded one as choices, and the path that is left.

    Of each it is given the name, the expected ms, and the replayed path, which is brought to these.
    """
    before_ms = replayer.recorded_step_ms
    before = path_of(replayer, replayer.base).scaled_to(before_ms)
    choices = []
    for name, step_ms, replayed in steps:
        after = replayed.scaled_to(step_ms)
        choices.append(Choice(name, step_ms, before_ms - step_ms, before.less(after)))
        before, before_ms = after, step_ms
    return tuple(choices), before


def _steps(replayer: Replayer, best: Candidate, played: Simulation) -> tuple[Step, ...]:
    """The choices of the strategy, then the passes; all of them replay as ``played``."""
    if not best.changed:
        return ()
    if best.recut is not None:
        return (Step(best.name, played),)
    without_passes = replayer.replay(best.strategy) if best.passes else played
    own = steps_to(replayer, best.strategy, without_passes)
    return (*own, *passes_upon(replayer, best.strategy, best.passes, played))
