"""Rows of the timeline, and which ranks are shown and named."""

from __future__ import annotations

from itertools import pairwise

import pytest

from headway.diagnosis.breakdown import Breakdown
from headway.report.drawing import (
    ALL_SHOWN,
    COMMUNICATION,
    COMPUTE,
    OPERATORS,
    SHOWN_FIRST,
    Box,
    rank_views,
    split_by_interest,
)
from headway.report.timeline import PITCH, Layout


def box(row: str, lane: int = 0) -> Box:
    return Box(0, row, lane, 0.0, 1.0, "forward", "", 0)


@pytest.mark.parametrize("ranks", [1, 4, 64, 128, 256])
def test_rows_do_not_overlap_and_stay_on_a_screen(ranks: int) -> None:
    layout = Layout(tuple(range(ranks)), lanes=3)
    spans = [layout.span(box(COMMUNICATION, lane), False) for lane in (2, 1, 0)]
    spans += [layout.span(box(OPERATORS), True), layout.span(box(COMPUTE), True)]
    edges = [edge for span in spans for edge in span]
    assert edges == pytest.approx(sorted(edges), abs=1e-9)
    assert edges[0] > edges[-1] - PITCH
    assert layout.band[0] <= edges[0]
    assert edges[-1] <= layout.band[1]
    assert layout.y_range[1] - layout.y_range[0] == pytest.approx(PITCH * ranks)
    assert layout.height_px <= 800
    assert layout.rank_px >= 3


def test_the_blamed_rank_is_named_and_labels_keep_apart() -> None:
    layout = Layout(tuple(range(64)), lanes=1, blamed=(37,))
    labels = layout.labels()
    assert (-PITCH * 37, "▸ rank 37") in labels
    places = sorted(place for place, _ in labels)
    assert min(b - a for a, b in pairwise(places)) * layout.rank_px / PITCH >= 14
    few = Layout((0, 1), lanes=1).labels()
    assert [label for _, label in few] == ["rank 0", "network", "rank 1", "network"]


def test_views_of_ranks() -> None:
    hosts = {rank: f"host{rank // 8}" for rank in range(64)}
    views = rank_views(tuple(range(64)), hosts, (37,), (12, 37), of_ranks=64)
    assert views[0].label == "All 64 ranks"
    assert views[1].ranks == (35, 36, 37, 38, 39)
    assert views[2].ranks == (12, 37)
    assert [view.label for view in views[3:]][:2] == ["Host host0: rank 0-7", "Host host1: rank 8-15"]
    assert len(views) == 3 + 8


def test_views_that_would_show_the_same_are_left_out() -> None:
    assert len(rank_views((0, 1, 2), {}, (1,), (0, 1, 2), of_ranks=3)) == 1
    assert rank_views((0, 5), {}, (), (), of_ranks=9)[0].label == "All drawn: 2 ranks"


def test_hosts_of_one_rank_are_no_views_and_names_are_plain() -> None:
    views = rank_views((0, 1, 2), {0: "\x1b[31m", 1: "\x1b[31m", 2: "c"}, (), (), of_ranks=3)
    assert [view.label for view in views[1:]] == ["Host \ufffd[31m: rank 0-1"]


def breakdown(computation: float) -> Breakdown:
    return Breakdown(computation, 1.0, 40.0 - computation, 1.0, 2.0, 0.5)


def test_what_matters_comes_first() -> None:
    few = {rank: breakdown(30.0) for rank in range(ALL_SHOWN)}
    assert split_by_interest(few, (3,)) == (list(range(ALL_SHOWN)), [])
    many = {rank: breakdown(30.0 + (5 if rank == 9 else 0) + (9 if rank == 50 else 0)) for rank in range(64)}
    first, others = split_by_interest(many, (20,))
    assert first[:3] == [20, 50, 9]
    assert len(first) == SHOWN_FIRST
    assert others == sorted(set(range(64)) - set(first))
