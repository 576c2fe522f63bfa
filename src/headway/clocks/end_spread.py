"""Ends that should be together: by how much they are apart, and how far that can be trusted."""

from __future__ import annotations

import numpy as np

from headway.arrays import Floats
from headway.clocks.quantiles import medians
from headway.clocks.rows import Rows

FINEST_US = 1.0  # nothing is recorded finer than this
SHARE = 0.1  # of the time that a meeting took, by how much its ends may be apart unseen


def off_by_us(rows: Rows, values: Floats) -> Floats:
    """By how much each end is after the median of its meeting's."""
    end_us = rows.end_us + rows.shift_us(values, rows.end_us)
    first = rows.first
    count = np.diff(np.append(first, len(rows)))
    order = np.lexsort((end_us, rows.meeting))
    low_us, high_us = end_us[order[first + (count - 1) // 2]], end_us[order[first + count // 2]]
    off: Floats = end_us - ((low_us + high_us) / 2)[rows.meeting]
    return off


def apart_us(rows: Rows, values: Floats) -> Floats:
    """How far each end is from others of its meeting: of two clocks each is off their middle by half of that."""
    two = np.bincount(rows.meeting)[rows.meeting] == 2
    apart: Floats = np.abs(off_by_us(rows, values)) * np.where(two, 2.0, 1.0)
    return apart


def spreads_us(rows: Rows, values: Floats) -> Floats:
    """For each row by how much the ends of meetings that took about as long are usually apart, as a deviation."""
    kind = np.log2(rows.took_us + FINEST_US).astype(np.intp) + 64 * rows.form.astype(np.intp)
    off_us = medians(np.abs(off_by_us(rows, values)), kind, np.ones(len(rows)), 256)
    # Twice, for two clocks' sake, of which each is off by half of what they are apart.
    spread: Floats = 2 * 1.4826 * off_us[kind] + FINEST_US
    return spread


def trusted_us(rows: Rows, spread_us: Floats) -> Floats:
    """How far each end is trusted: what nothing would show grows with the time that its meeting took."""
    trusted: Floats = spread_us + SHARE * rows.took_us
    return trusted
