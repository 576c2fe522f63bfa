from __future__ import annotations

import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.clocks.linear_program import LinearProgram
from headway.errors import UserError

one = np.zeros(1, dtype=np.intp), np.ones(1)
numbers = st.integers(-1000, 1000)


@given(st.lists(st.tuples(numbers, st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=12))
def test_one_unknown_comes_out_where_the_cost_is_least(terms: list[tuple[int, int, int]]) -> None:
    program = LinearProgram(1)
    for wanted, above, below in terms:
        program.add(np.array([-float(wanted)]), one, above=float(above), below=float(below))

    def cost(value: float) -> float:
        return sum(max(value - w, 0) * above + max(w - value, 0) * below for w, above, below in terms)

    (found,) = program.solve()
    assert cost(found) <= min(cost(wanted) for wanted, _, _ in terms) * (1 + 1e-9) + 1e-6


def test_what_costs_infinitely_much_is_a_bound() -> None:
    program = LinearProgram(1)
    program.add(np.array([-5.0]), one, above=1.0, below=1.0)
    program.add(np.array([-3.0]), one, above=np.inf)
    assert program.solve() == pytest.approx([3.0])


def test_unknowns_in_no_term_and_those_left_out_are_nought() -> None:
    program = LinearProgram(3)
    program.add(np.array([-5.0]), one, (np.array([2]), np.ones(1)), above=1.0, below=1.0)
    assert program.solve(without=(0,)) == pytest.approx([0.0, 0.0, 5.0])
    assert LinearProgram(2).solve().tolist() == [0.0, 0.0]


def test_a_slope_is_found_through_outliers() -> None:
    place = np.linspace(-1, 1, 50)
    seen = 3.0 + 2.0 * place
    seen[::7] += 1000
    program = LinearProgram(2)
    ones = np.ones(50)
    program.add(
        -seen,
        (np.zeros(50, dtype=np.intp), ones),
        (np.ones(50, dtype=np.intp), place),
        above=ones,
        below=ones,
    )
    assert program.solve() == pytest.approx([3.0, 2.0])


def test_a_missing_scipy_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "scipy.optimize", None)
    with pytest.raises(UserError, match=r"pip install .*'scipy"):
        LinearProgram(1).solve()
