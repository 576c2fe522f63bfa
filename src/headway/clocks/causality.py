"""What bounds clocks: nobody who waits is through before the last has come."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from headway.arrays import Flags, Floats, Indices
from headway.clocks.rows import STRETCHES, Rows

MANY = 8  # meetings of which the tightest is not believed: it may be a flaw


@dataclass(frozen=True, slots=True, eq=False)
class Bounds:
    """Rows that waited for others: ``slack_us`` is by how much they were through after those had come."""

    waiter: Indices
    holder: Indices
    slack_us: Floats

    def where(self, picked: Flags | Indices) -> Bounds:
        """The bounds that ``picked`` picks."""
        return Bounds(self.waiter[picked], self.holder[picked], self.slack_us[picked])


def waited(rows: Rows, values: Floats) -> Bounds:
    """Every row that waits, with the last that it waits for."""
    arrival_us = rows.arrival_us + rows.shift_us(values, rows.arrival_us)
    end_us = rows.end_us + rows.shift_us(values, rows.end_us)
    order = np.lexsort((-arrival_us, ~rows.holds, rows.meeting))
    last, second = order[rows.first][rows.meeting], order[rows.first + 1][rows.meeting]
    holder = np.where(last == np.arange(len(rows)), second, last)
    waiter = np.flatnonzero(rows.waits & rows.holds[holder])
    holder = holder[waiter]
    return Bounds(waiter, holder, end_us[waiter] - arrival_us[holder])


def tightest(rows: Rows, every: Bounds) -> Bounds:
    """The tightest bound for each pair of clocks, direction and stretch of time."""
    pair = (rows.clock[every.holder] * rows.clocks * STRETCHES) + rows.cell[every.waiter]
    order = np.lexsort((every.slack_us, pair))
    first = np.flatnonzero(np.diff(pair[order], prepend=-1))
    met = np.diff(np.append(first, len(order)))
    return every.where(order[first + (met >= MANY)])


def opposite(rows: Rows, bounds: Bounds) -> Indices:
    """For each of the tightest bounds the one of the same pair and stretch in the other direction, or -1."""
    one, other = rows.clock[bounds.waiter], rows.clock[bounds.holder]
    stretch = rows.stretch[bounds.waiter]
    key = (one * rows.clocks + other) * STRETCHES + stretch
    back = (other * rows.clocks + one) * STRETCHES + stretch
    order = np.argsort(key)
    place = np.minimum(np.searchsorted(key[order], back), len(key) - 1) if len(key) else key
    found = order[place]
    return np.where(key[found] == back, found, -1)
