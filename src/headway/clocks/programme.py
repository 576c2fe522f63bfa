"""The linear programme: values for unknowns at which what should be nought is off by the least.

Every term is linear in the unknowns and costs so much a unit above nought and so much a unit below. That is regression
in the sense of least absolute deviations: a few terms that are far off move it little. Where one side costs much it is
a bound. What is solved is the dual, which has a bounded variable for each term and an equation for each unknown: that
takes a tenth of the time.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from headway.arrays import Floats, Indices
from headway.errors import UserError, how_to_install

FARTHEST = 1e9  # off nought: what is farther off is far enough off
LEAST_COST, COST_UNIT = 1e-7, 1e4
LIMIT_S = 15.0  # for numbers that no recording has, solvers may run in components

Factors = tuple[Indices, Floats]
"""One unknown of each term, and its factor."""


@dataclass(slots=True)
class Programme:
    """Terms, put in many at a time. Unknowns are known by number; those in no term come out as 0."""

    unknowns: int
    _constants: list[Floats] = field(default_factory=list)
    _above: list[Floats] = field(default_factory=list)
    _below: list[Floats] = field(default_factory=list)
    _entries: list[tuple[Indices, Indices, Floats]] = field(default_factory=list)
    _terms: int = 0

    def add(
        self, constant: Floats, *factors: Factors, above: Floats | float = 0.0, below: Floats | float = 0.0
    ) -> None:
        """Put in terms ``constant + Σ factor · unknown``, which cost ``above`` or ``below`` a unit off nought.

        What costs infinitely much is a bound; each needs a side that costs nothing, and together they must leave a way.
        """
        term = self._terms + np.arange(len(constant))
        self._terms += len(constant)
        self._constants.append(constant)
        self._above.append(np.broadcast_to(above, constant.shape))
        self._below.append(np.broadcast_to(below, constant.shape))
        self._entries += [(unknown, term, factor) for unknown, factor in factors]

    def solve(self, without: tuple[int, ...] = ()) -> Floats:
        """The value of each unknown; those of ``without`` are 0.

        All are 0 where no solution is found in time. Raises UserError where scipy is missing.
        """
        try:
            from scipy.optimize import linprog  # type: ignore[import-untyped]
            from scipy.sparse import coo_matrix  # type: ignore[import-untyped]
        except ImportError:
            raise UserError(
                "aligning clocks needs scipy, which is not installed",
                fix=f"Run: {how_to_install('traces')}.",
            ) from None
        values = np.zeros(self.unknowns)
        if not self._terms or not self._entries:
            return values
        constants = np.clip(np.concatenate(self._constants), -FARTHEST, FARTHEST)
        above, below = _in_bounds(np.concatenate(self._above), np.concatenate(self._below))
        row, column, factor = (np.concatenate([entry[i] for entry in self._entries]) for i in range(3))
        free = ~np.isin(row, without)
        used, row = np.unique(row[free], return_inverse=True)
        factors = coo_matrix((factor[free], (row, column[free])), shape=(len(used), self._terms)).tocsr()
        for method in ("highs-ipm", "highs-ds"):  # the faster one first
            found = linprog(
                -constants,
                A_eq=factors,
                b_eq=np.zeros(len(used)),
                bounds=np.column_stack([-below, above]),
                method=method,
                options={"time_limit": LIMIT_S},
            )
            if found.status == 0:
                values[used] = found.eqlin.marginals
                break
        return values


def _in_bounds(above: Floats, below: Floats) -> tuple[Floats, Floats]:
    """Costs of a size that solvers like, the least of them raised to a small part of the largest."""
    dearest = max(float(cost[np.isfinite(cost)].max(initial=0.0)) for cost in (above, below)) or 1.0
    scaled = [
        np.where(cost > 0, np.maximum(cost / dearest, LEAST_COST), 0.0) * COST_UNIT for cost in (above, below)
    ]
    return scaled[0], scaled[1]
