from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from headway.arrays import Ints
from headway.interop.exporters import rank_tracks as under_test
from headway.interop.exporters.rank_tracks import MAX_DEPTH, disjoint_lanes, nesting_lanes

SPANS = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 8)), max_size=60)


def _columns(spans: list[tuple[int, int]]) -> tuple[Ints, Ints]:
    table = np.array(spans, dtype=np.int64).reshape(-1, 2)
    return table[:, 0], table[:, 0] + table[:, 1]


def _check(lanes: list[Ints], starts: Ints, ends: Ints) -> list[int]:
    """Every span begins and ends once, in the order of time, the last to begin first; returns the depths of lanes."""
    moves = np.concatenate([*lanes, np.zeros(0, dtype=np.int64)])
    assert sorted(moves.tolist()) == list(range(2 * len(starts)))
    depths = []
    for lane in lanes:
        open_rows: list[int] = []
        now, deepest = -1, 0
        for move in lane.tolist():
            row, is_end = divmod(move, 2)
            time = int(ends[row] if is_end else starts[row])
            assert time >= now
            now = time
            if is_end:
                assert open_rows.pop() == row
            else:
                assert all(ends[one] > starts[row] for one in open_rows)
                open_rows.append(row)
                deepest = max(deepest, len(open_rows))
        assert not open_rows
        depths.append(deepest)
    return depths


@given(SPANS)
def test_spans_nest_on_their_lanes(spans: list[tuple[int, int]]) -> None:
    starts, ends = _columns(spans)
    _check(nesting_lanes(starts, ends, np.zeros(len(spans), dtype=np.int64)), starts, ends)


@given(SPANS)
def test_spans_do_not_overlap_on_few_lanes(spans: list[tuple[int, int]]) -> None:
    starts, ends = _columns(spans)
    lanes = disjoint_lanes(starts, ends)
    assert all(depth == 1 for depth in _check(lanes, starts, ends))
    at_once = max(int(((starts <= t) & (ends > t)).sum()) for t in range(40))
    instants = int((starts == ends).any())  # one lane more is enough for all spans of no length
    assert at_once <= len(lanes) <= at_once + instants


def test_what_nests_takes_one_lane_and_the_outer_comes_first() -> None:
    starts, ends = _columns([(0, 5), (0, 10), (0, 10), (10, 0), (5, 5)])
    (lane,) = nesting_lanes(starts, ends, np.array([0, 1, 0, 0, 0]))
    assert lane.tolist() == [4, 2, 0, 1, 8, 9, 3, 5, 6, 7]


def test_depth_and_lanes_are_bounded() -> None:
    deep = np.arange(1000)
    lanes = nesting_lanes(deep, 3000 - deep, deep)
    assert max(_check(lanes, deep, 3000 - deep)) == MAX_DEPTH
    stairs = np.arange(3000)
    lanes = nesting_lanes(stairs, stairs + 500, stairs)
    _check(lanes, stairs, stairs + 500)
    assert len(lanes) == 500
    assert under_test.MAX_NESTING_LANES < 500
