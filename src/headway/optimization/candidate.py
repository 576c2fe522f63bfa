"""Describes one candidate of the search: a plan, its schedule, and its predicted step time and memory."""

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
from headway.units import counted, format_bytes

UNCHANGED = ("none",)
SHORT_PARTS = 3  # how many parts of a description a short name keeps


@dataclass(frozen=True, slots=True)
class Candidate:
    """A plan with its schedule and predicted step time.

    ``peak_bytes`` is the predicted peak memory of the rank that needs most, or None if the parameters are unknown.
    ``peak_is_rough`` marks an estimate made without recorded memory. ``recut`` is the job of a pipeline that the
    recorded script does not train, and that needs ``headway.parallelize``. ``passes`` are applied on top of the
    strategy. ``of_other_size`` marks a plan with another number of micro-batches than was recorded.
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
        """The predicted step time."""
        return self.expected.step_ms

    @property
    def changed(self) -> bool:
        """Whether the plan differs from the recorded one."""
        return self.changes != UNCHANGED

    @property
    def change_count(self) -> int:
        """The number of changes to the recorded plan."""
        return len(self.changes) if self.changed else 0

    @property
    def is_runnable(self) -> bool:
        """Whether ``headway run`` can apply the plan to the unmodified script; other plans need changes to it."""
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
        """The name without the details of the strategy."""
        strategy, *passes = self.name.split(" + ")
        return " + ".join((", ".join(strategy.split(", ")[:SHORT_PARTS]), *passes))

    @property
    def kind(self) -> tuple[object, ...]:
        """Identifies the plan apart from sizes and counts: plans of one kind are variants of each other."""
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
        """The order of the pipeline, or "" without a pipeline."""
        return str(getattr(getattr(self.strategy, "pipeline", self.strategy), "order", ""))

    @property
    def changes_training(self) -> str:
        """How the plan changes training, in words; "" if it does not."""
        changes = (self.strategy.changes_training, *(pass_.changes_training for pass_ in self.passes))
        return ", ".join(filter(None, changes))

    @property
    def permissions(self) -> frozenset[str]:
        """The permissions (``--allow``) that the plan requires."""
        return self.strategy.permissions | {pass_.permission for pass_ in self.passes} - {""}

    @property
    def uncertainty_ms(self) -> float:
        """The uncertainty (±) of ``predicted_ms``."""
        return self.expected.uncertainty_ms


def is_better(candidate: Candidate, rival: Candidate) -> bool:
    """Whether ``candidate`` dominates ``rival``: no worse in time and memory, and better in at least one."""
    if candidate.peak_bytes is None or rival.peak_bytes is None:
        return False
    figures, compared = (candidate.predicted_ms, candidate.peak_bytes), (rival.predicted_ms, rival.peak_bytes)
    return figures != compared and all(a <= b for a, b in zip(figures, compared, strict=True))


def is_as_faithful(candidate: Candidate, rival: Candidate) -> bool:
    """Whether ``candidate`` trains as recorded, or ``rival`` does not either."""
    return not candidate.changes_training or bool(rival.changes_training)


PEAK_UNCERTAINTY = 0.05
"""The share by which predicted peaks may be too low (benchmarks/pipeline_memory.py)."""
ROUGH_PEAK_UNCERTAINTY = 0.5
"""The same for estimates without recorded memory, which take the outputs of modules for the saved activations."""


def within(
    candidates: Iterable[Candidate], limit_bytes: int | None
) -> tuple[list[Candidate], list[Candidate]]:
    """Split ``candidates`` into those that fit into ``limit_bytes`` on every rank, and the rest.

    Predicted peaks get a margin: ``PEAK_UNCERTAINTY``, or ``ROUGH_PEAK_UNCERTAINTY`` for rough ones. Raises UserError
    if no candidate fits.
    """
    fitting: list[Candidate] = []
    excluded: list[Candidate] = []
    for candidate in candidates:
        (fitting if fits_within(candidate, limit_bytes) else excluded).append(candidate)
    if limit_bytes is not None and not fitting:
        least = min(excluded, key=needed_bytes)
        raise UserError(
            "no plan keeps every rank within the memory limit",
            got=f"{format_bytes(needed_bytes(least))} for {least.name}, the smallest of {counted(len(excluded), 'plan')}",
            expected=f"at most {format_bytes(limit_bytes)}",
            fix="Raise --memory-limit, or record the job with smaller micro-batches or more stages. If memory is marked "
            "~ (not recorded), record the job under DDP.",
        )
    return fitting, excluded


def fits_within(candidate: Candidate, limit_bytes: int | None) -> bool:
    """Whether every rank fits into ``limit_bytes``; False if there is a limit but the peak is unknown."""
    if limit_bytes is None:
        return True
    return candidate.peak_bytes is not None and needed_bytes(candidate) <= limit_bytes


def needed_bytes(candidate: Candidate) -> int:
    """The memory that a rank should have: the predicted peak plus its margin of error."""
    share = ROUGH_PEAK_UNCERTAINTY if candidate.peak_is_rough else PEAK_UNCERTAINTY
    return round((candidate.peak_bytes or 0) * (1 + share))


def exclusion(excluded: Iterable[Candidate], limit_bytes: int) -> str:
    """A note that lists the plans over the memory limit."""
    named = ", ".join(f"{candidate.name} ({format_bytes(needed_bytes(candidate))})" for candidate in excluded)
    return f"plans over the memory limit of {format_bytes(limit_bytes)} were left out: {named}"
