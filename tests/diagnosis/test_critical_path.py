"""The names of the critical path's pieces."""

from __future__ import annotations

import pytest

from headway.diagnosis.critical_path import _name, _Piece
from headway.trace.events import Kind


@pytest.mark.parametrize(
    ("modules", "name"),
    [
        (("4", "5", "6"), "'4' and 2 more"),
        (("0.1", "0.2"), "'0.1' and 1 more"),
        (("layers.4", "layers.5"), "layers.4 and 1 more"),
        (("4",), "4"),
    ],
)
def test_names_that_are_numbers_are_quoted_where_a_count_follows(modules: tuple[str, ...], name: str) -> None:
    run = [_Piece(0, Kind.FORWARD, each, -1, 0, 100 - place) for place, each in enumerate(modules)]
    assert _name(run) == name
