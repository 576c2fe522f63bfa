"""A candidate of the search: a plan with what it decides, and what is expected of it."""

from __future__ import annotations

from dataclasses import dataclass

from headway.job import Job
from headway.passes.base import Pass
from headway.replayer.expectation import Expectation
from headway.scheduling.schedule import Schedule
from headway.strategies.base import Strategy

UNCHANGED = ("none",)


@dataclass(frozen=True, slots=True)
class Candidate:
    """One plan with what it decides for the job, and what is expected of it.

    ``peak_bytes`` is the most that one rank will hold, None where nothing is known of parameters; ``peak_is_rough``
    where memory was not watched. ``recut`` is the job
    of a pipeline that the recorded script does not train, and follows only with ``headway.parallelize``. ``passes`` are
    what the plan has besides its strategy. ``of_other_size``: for another number of micro-batches than was recorded.
    """

    name: str
    strategy: Strategy
    schedule: Schedule
    expected: Expectation
    changes: tuple[str, ...]
    peak_bytes: int | None = None
    recut: Job | None = None
    passes: tuple[Pass, ...] = ()
    of_other_size: bool = False
    peak_is_rough: bool = False

    @property
    def predicted_ms(self) -> float:
        """The step that it is expected to take."""
        return self.expected.step_ms

    @property
    def changed(self) -> bool:
        """Whether it differs from what was recorded."""
        return self.changes != UNCHANGED

    @property
    def changes_training(self) -> str:
        """What it changes of what is trained, in words; "" for nothing."""
        said = (self.strategy.changes_training, *(each.changes_training for each in self.passes))
        return ", ".join(filter(None, said))

    @property
    def permissions(self) -> frozenset[str]:
        """Those without which it would not have been considered."""
        return self.strategy.permissions | {each.permission for each in self.passes} - {""}

    @property
    def uncertainty_ms(self) -> float:
        """By how much that may be off."""
        return self.expected.uncertainty_ms


def is_better(one: Candidate, other: Candidate) -> bool:
    """Whether ``one`` is no slower than ``other`` and needs no more memory, and is better in one of both."""
    if one.peak_bytes is None or other.peak_bytes is None:
        return False
    mine, others = (one.predicted_ms, one.peak_bytes), (other.predicted_ms, other.peak_bytes)
    return mine != others and all(a <= b for a, b in zip(mine, others, strict=True))


def no_other_training(one: Candidate, other: Candidate) -> bool:
    """Whether ``one`` changes nothing of what is trained unless ``other`` does too."""
    return not one.changes_training or bool(other.changes_training)
