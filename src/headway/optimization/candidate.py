"""A candidate of the search: a plan with what it decides, and what is expected of it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from headway.compression.codec import Codec
from headway.errors import UserError
from headway.job import Job
from headway.passes.base import Pass
from headway.scheduling.pipeline.orders import LOOPED_ORDERS
from headway.scheduling.schedule import Schedule
from headway.simulator.expectation import Expectation
from headway.strategies.base import Strategy
from headway.strategies.registry import plugin_of
from headway.units import format_bytes

UNCHANGED = ("none",)
SHORT_PARTS = 3  # of a description that short names keep


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
    def change_count(self) -> int:
        """How many changes it is from what was recorded."""
        return len(self.changes) if self.changed else 0

    @property
    def is_runnable(self) -> bool:
        """Whether the recorded command can run it as it is, with ``headway run``; other plans need another script."""
        if self.recut is not None:
            return False
        if not self.changed:
            return True
        plugin = plugin_of(self.strategy)
        if plugin.injection is None and plugin.schedule_injection is None:
            return False
        return not (self.of_other_size and self._order in LOOPED_ORDERS)

    @property
    def short_name(self) -> str:
        """Its name without the details of its strategy."""
        strategy, *passes = self.name.split(" + ")
        return " + ".join((", ".join(strategy.split(", ")[:SHORT_PARTS]), *passes))

    @property
    def kind(self) -> tuple[object, ...]:
        """What it is but for sizes and numbers: plans of one kind are variants of each other."""
        wire = getattr(self.strategy, "wire", None) or ()
        codecs = wire if isinstance(wire, tuple) else (wire,)
        return (
            self.strategy.name,
            getattr(getattr(self.strategy, "data", None), "name", ""),
            getattr(self.strategy, "groups", ""),
            getattr(self.schedule, "gather", ""),
            self._order,
            tuple(codec.name for codec in codecs if isinstance(codec, Codec)),
            tuple(pass_.name for pass_ in self.passes),
        )

    @property
    def _order(self) -> str:
        """The order of a pipeline; "" where there is none."""
        return str(getattr(getattr(self.strategy, "pipeline", self.strategy), "order", ""))

    @property
    def changes_training(self) -> str:
        """What it changes of what is trained, in words; "" for nothing."""
        changes = (self.strategy.changes_training, *(pass_.changes_training for pass_ in self.passes))
        return ", ".join(filter(None, changes))

    @property
    def permissions(self) -> frozenset[str]:
        """Those without which it would not have been considered."""
        return self.strategy.permissions | {pass_.permission for pass_ in self.passes} - {""}

    @property
    def uncertainty_ms(self) -> float:
        """By how much that may be off."""
        return self.expected.uncertainty_ms


def is_better(one: Candidate, other: Candidate) -> bool:
    """Whether ``one`` is no slower than ``other`` and needs no more memory, and is better in one of both."""
    if one.peak_bytes is None or other.peak_bytes is None:
        return False
    figures, compared = (one.predicted_ms, one.peak_bytes), (other.predicted_ms, other.peak_bytes)
    return figures != compared and all(a <= b for a, b in zip(figures, compared, strict=True))


def no_other_training(one: Candidate, other: Candidate) -> bool:
    """Whether ``one`` changes nothing of what is trained unless ``other`` does too."""
    return not one.changes_training or bool(other.changes_training)


PEAK_UNCERTAINTY = 0.05
"""By how much predicted peaks may be too low (benchmarks/pipeline_memory.py)."""
ROUGH_PEAK_UNCERTAINTY = 0.5
"""The same where memory was not watched: what modules put out stands for what they keep."""


def within(
    candidates: Iterable[Candidate], limit_bytes: int | None
) -> tuple[list[Candidate], list[Candidate]]:
    """Those under which no rank needs more than ``limit_bytes``, and the others.

    A predicted peak may be too low by up to ``PEAK_UNCERTAINTY``, one that is rough by more. Raises UserError where
    none is within the limit.
    """
    fitting: list[Candidate] = []
    excluded: list[Candidate] = []
    for candidate in candidates:
        (fitting if fits_within(candidate, limit_bytes) else excluded).append(candidate)
    if limit_bytes is not None and not fitting:
        least = min(excluded, key=needed_bytes)
        raise UserError(
            "no plan keeps every rank within the memory limit",
            got=f"{format_bytes(needed_bytes(least))} for {least.name}, which needs least of {len(excluded)}",
            expected=f"at most {format_bytes(limit_bytes)}",
            fix="Raise --memory-limit, or record the job with smaller micro-batches or more stages; where its memory "
            "was not watched (~), record it under DDP.",
        )
    return fitting, excluded


def fits_within(candidate: Candidate, limit_bytes: int | None) -> bool:
    """Whether no rank needs more than ``limit_bytes``, where there is a limit; what it needs has to be known then."""
    if limit_bytes is None:
        return True
    return candidate.peak_bytes is not None and needed_bytes(candidate) <= limit_bytes


def needed_bytes(candidate: Candidate) -> int:
    """The memory that a rank should have for it: its predicted peak, and what that may be too low by."""
    share = ROUGH_PEAK_UNCERTAINTY if candidate.peak_is_rough else PEAK_UNCERTAINTY
    return round((candidate.peak_bytes or 0) * (1 + share))


def exclusion(excluded: Iterable[Candidate], limit_bytes: int) -> str:
    """Say what the limit has excluded."""
    named = ", ".join(f"{each.name} ({format_bytes(needed_bytes(each))})" for each in excluded)
    return f"left out, as a rank would need more than the limit of {format_bytes(limit_bytes)}: {named}"
