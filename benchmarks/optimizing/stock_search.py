"""A search among the settings of a stock tool by trials: given ones first, then those near the best so far.

It is pure: whoever asks makes the trials. Ranks that are told the same decide the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Generic, TypeVar

ONE_BYTE_MB = 2**-20  # a cap that every parameter reaches
FACTORS = (2.0, 0.5, 1.4, 0.7)
T = TypeVar("T")


class StockSearch(Generic[T]):
    """Asks for options to try, and is told what they took."""

    def __init__(self, first: Sequence[T], near: Callable[[T], Sequence[T]]) -> None:
        self._first, self._near = tuple(dict.fromkeys(first)), near
        self._taken_s: dict[T, list[float]] = {}

    @property
    def took_first(self) -> bool:
        """Whether all options that were given have been tried."""
        return all(each in self._taken_s for each in self._first)

    @property
    def tried_s(self) -> dict[T, tuple[float, ...]]:
        """Every trial of every option, in seconds."""
        return {option: tuple(taken_s) for option, taken_s in self._taken_s.items()}

    @property
    def trials(self) -> int:
        """How many there have been."""
        return sum(map(len, self._taken_s.values()))

    def ask(self) -> T | None:
        """What to try next; None where nothing near the best is left."""
        untried = (each for each in self._first if each not in self._taken_s)
        if (found := next(untried, None)) is not None:
            return found
        (best,) = self.finalists(1)
        return next((each for each in self._near(best) if each not in self._taken_s), None)

    def tell(self, option: T, taken_s: float) -> None:
        """Say what a trial of ``option`` took."""
        self._taken_s.setdefault(option, []).append(taken_s)

    def finalists(self, count: int) -> list[T]:
        """The fastest so far, each by the median of its trials, the fastest first."""
        return sorted(self._taken_s, key=lambda each: median(self._taken_s[each]))[:count]


@dataclass(frozen=True)
class DdpOptions:
    """Arguments of DistributedDataParallel; caps are in MiB of the model as it is trained, the last for all others."""

    caps_mb: tuple[float, ...]
    views: bool = True
    static_graph: bool = False

    def describe(self) -> str:
        """Say the options in a few words."""
        few = len(self.caps_mb) <= 2
        caps = " then ".join(f"{cap:.3g}" for cap in self.caps_mb) if few else f"{len(self.caps_mb)} caps"
        return f"{caps}{' MiB' * few}" + ", views" * self.views + ", static graph" * self.static_graph

    def with_caps(self, *caps_mb: float) -> DdpOptions:
        """The same with other caps."""
        return DdpOptions(caps_mb, self.views, self.static_graph)


def first_ddp_options(
    scale: float, whole_mb: float, default: Sequence[float], given: Sequence[Sequence[float]]
) -> list[DdpOptions]:
    """The default caps, one cap from a bucket a parameter to one bucket, and the ``given`` lists of caps.

    ``scale`` is by how much the model was scaled down, ``whole_mb`` its size then.
    """
    usual = [cap * scale for cap in (1, 2.5, 5, 10, 25, 50, 100)]
    alone = [(ONE_BYTE_MB,), *((cap,) for cap in usual if cap < whole_mb), (whole_mb,)]
    return [DdpOptions(tuple(caps)) for caps in (default, *alone, *given)]


def near_ddp_options(option: DdpOptions) -> list[DdpOptions]:
    """Options that differ in one thing: in a flag, in the first or the other caps, or in where two buckets are one."""
    caps_mb = option.caps_mb
    flags = [
        DdpOptions(caps_mb, option.views, not option.static_graph),
        DdpOptions(caps_mb, not option.views, option.static_graph),
    ]
    if len(caps_mb) > 2:
        merged = [
            option.with_caps(*caps_mb[:index], caps_mb[index] + caps_mb[index + 1], *caps_mb[index + 2 :])
            for index in reversed(range(len(caps_mb) - 1))
        ]
        return flags[:1] + merged + flags[1:]
    first, others = caps_mb[0], caps_mb[-1]
    pairs = [pair for factor in FACTORS for pair in ((first * factor, others), (first, others * factor))]
    return flags[:1] + [option.with_caps(*pair) for pair in pairs] + flags[1:]
