"""The estimate: a first linear programme to see what is far off, and a second one without it and with all bounds.

Two things are known of clocks that met. The members of a collective end together, which says best how clocks stand when
networks are steady, but is wrong by as much as one host is always slower to notice. And nobody who waits is through
before the last has come, which bounds clocks from both sides; where these bounds are close, their middle is better than
what ends say. The programme weighs the two, and what was known before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from headway.arrays import Floats
from headway.clocks.causality import tightest, waited
from headway.clocks.end_spread import apart_us, spreads_us, trusted_us
from headway.clocks.matching import MESSAGE
from headway.clocks.quantiles import medians
from headway.clocks.rows import Rows
from headway.clocks.terms import USUAL_US, Prior, Terms

FLAW = 8.0  # how many times the usual an end is off to be left out
DOUBTED = 0.2  # what share of a clock's rows may be left out without a doubt


@dataclass(frozen=True, slots=True, eq=False)
class Estimate:
    """Offsets, then drifts; the rows that they are from, and for each row by how much its end may be off.

    ``doubt_us`` says for each clock by how much it is off where more rows than a few had to be left out, else 0.
    """

    values: Floats
    rows: Rows
    spread_us: Floats
    doubt_us: Floats


def estimated(rows: Rows, priors: Sequence[Prior]) -> Estimate:
    """Offsets and drifts of the clocks of a component; the first one's are 0."""
    first = Terms(rows, USUAL_US + rows.took_us)
    first.put_ends()
    first.put_messages(waited(rows, np.zeros(2 * rows.clocks)))
    first.put_priors(priors, firmly=False)
    first.put_drifts()
    values = first.solve()
    every, sound = rows, _sound(rows, values)
    rows = every.where(sound)
    trusted = trusted_us(rows, spreads_us(rows, values))
    for _ in range(2):  # once more, for then it is seen better which bounds are the tightest
        second = Terms(rows, trusted)
        second.put_ends()
        second.put_bounds(tightest(rows, waited(rows, values)))
        second.put_priors(priors, firmly=True)
        second.put_drifts()
        values = second.solve()
    return Estimate(values, rows, spreads_us(rows, values), _doubt_us(every, sound, values))


def _sound(rows: Rows, values: Floats) -> npt.NDArray[np.bool_]:
    """Which rows are not far off: neither of another instance of the same collective nor mistimed."""
    far_us = FLAW * spreads_us(rows, values)
    together = apart_us(rows, values) <= far_us + rows.took_us
    sound: npt.NDArray[np.bool_] = together | (rows.form == MESSAGE)
    every = waited(rows, values)
    pairs, pair = np.unique(
        rows.clock[every.waiter] * rows.clocks + rows.clock[every.holder], return_inverse=True
    )
    usual_us = medians(np.abs(every.slack_us), pair, np.ones(len(pair)), len(pairs))[pair]
    early_us = np.where(rows.form[every.waiter] == MESSAGE, 2 * usual_us, far_us[every.waiter])
    sound[every.waiter[every.slack_us < -early_us]] = False
    return sound


def _doubt_us(rows: Rows, sound: npt.NDArray[np.bool_], values: Floats) -> Floats:
    every = waited(rows, values)
    off_us = apart_us(rows, values)
    message = rows.form[every.waiter] == MESSAGE
    off_us[every.waiter[message]] = np.abs(every.slack_us[message])
    lost_us = np.where(sound, 0.0, off_us)
    return np.nan_to_num(medians(lost_us, rows.clock, np.ones(len(rows)), rows.clocks, share=1 - DOUBTED))
