from __future__ import annotations

from headway.graph.computation import Item, Part, Point, Timeline
from headway.replayer.replayer import gap_note, gap_ns
from headway.trace.events import Read

MS = 1_000_000


def steps(*between: Item) -> list[list[Timeline]]:
    before = (Item(Part.REST, "", 50 * MS), Item(Part.BACKWARD, "", 40 * MS), Item(Point.BACKWARD_END))
    items = (
        *before,
        Item(Part.FINALIZE, "", 2 * MS),
        *between,
        Item(Point.STEP),
        Item(Part.REST, "", 9 * MS),
    )
    return [[Timeline(rank, 0, items)] for rank in range(2)]


def test_a_large_gap_before_the_step_is_said_unless_a_read_explains_it() -> None:
    unexplained = steps(Item(Part.REST, "", 8 * MS))
    assert gap_ns(unexplained) == 8 * MS
    (note,) = gap_note(unexplained, 100.0)
    assert note.startswith("8.0 ms of each step")
    assert gap_note(steps(Item(Part.READ, Read.CLIP, 8 * MS)), 100.0) == ()
    looked = steps(Item(Part.READ, Read.LOOK, 0), Item(Part.REST, "", 8 * MS))
    assert gap_note(looked, 100.0) == ()
    assert gap_note(unexplained, 1000.0) == ()
