"""How far errors of clocks reach that are limited against each other, directly or through others."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from headway.arrays import Floats, Indices

DRIFT_PPM = 100.0  # by how much two clocks drift apart at most where nothing is known of it


@dataclass(frozen=True, slots=True, eq=False)
class Limits:
    """Limits of how wrong clocks may be: at ``place``, the error of ``upper`` is at most ``most_us`` above ``lower``'s.

    ``place`` is a time, -1 at the beginning of all meetings and 1 at their end. A limit below nought is broken by the
    estimate itself; it is worth no more than it is broken by.
    """

    lower: Indices
    upper: Indices
    place: Floats
    most_us: Floats

    @classmethod
    def concatenated(cls, parts: list[Limits]) -> Limits:
        """All limits, one after another."""
        columns = ("lower", "upper", "place", "most_us")
        return cls(*(np.concatenate([getattr(part, name) for part in parts]) for name in columns))


def errors_us(limits: Limits, nodes: int, ends: tuple[float, float], half_us: float) -> Floats:
    """How wrong each node may be against node 0 anywhere between ``ends``; infinite where nothing limits it."""
    worst = np.zeros(nodes)
    for end in ends:
        lower, upper, most_us = _at(limits, nodes, end, DRIFT_PPM * 1e-6 * half_us)
        above = _shortest(lower, upper, most_us, nodes)
        below = _shortest(upper, lower, most_us, nodes)
        worst = np.maximum(worst, np.maximum(above, below))
    return worst


def _at(limits: Limits, nodes: int, end: float, drift_us: float) -> tuple[Indices, Indices, Floats]:
    """The limits of each pair of nodes at ``end``. Errors are linear in time, so that two places limit a third."""
    most_us, away = np.abs(limits.most_us), np.abs(end - limits.place)
    pair, number = np.unique(limits.lower * nodes + limits.upper, return_inverse=True)
    back = (pair % nodes) * nodes + pair // nodes
    found = np.minimum(np.searchsorted(pair, back), len(pair) - 1)
    opposite = np.where(pair[found] == back, found, -1)
    best_us = np.full(len(pair), np.inf)
    np.minimum.at(best_us, number, most_us + away * drift_us)
    near, far = _pairings(number, opposite)
    nearer = away[near] < away[far]
    near, far = near[nearer], far[nearer]
    reach_us = (most_us[near] * away[far] + most_us[far] * away[near]) / (away[far] - away[near])
    np.minimum.at(best_us, number[near], reach_us)
    return pair // nodes, pair % nodes, best_us


def _pairings(number: Indices, opposite: Indices) -> tuple[Indices, Indices]:
    """Every limit with every limit of the same two nodes in the other direction."""
    order = np.argsort(number, kind="stable")
    first = np.searchsorted(number[order], np.arange(len(opposite)))
    count = np.bincount(number, minlength=len(opposite))
    towards = opposite[number]
    some = np.flatnonzero(towards >= 0)
    repeats = count[towards[some]]
    near = np.repeat(some, repeats)
    within = np.arange(len(near)) - np.repeat(np.cumsum(repeats) - repeats, repeats)
    return near, order[np.repeat(first[towards[some]], repeats) + within]


def _shortest(origin: Indices, target: Indices, length_us: Floats, nodes: int) -> Floats:
    """The shortest way from node 0 to each node."""
    way_us = np.full(nodes, np.inf)
    way_us[0] = 0.0
    for _ in range(nodes):
        longer = way_us.copy()
        np.minimum.at(way_us, target, way_us[origin] + length_us)
        if np.array_equal(longer, way_us):
            break
    return way_us
