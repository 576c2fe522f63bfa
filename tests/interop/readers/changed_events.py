"""Lists of trace events that came to harm: fields replaced, taken away or added; events repeated, moved or lost."""

from __future__ import annotations

import copy
from typing import Any

from hypothesis import strategies as st
from tests.interop.readers.damaging import ODD_VALUES

_FIELDS = ("ph", "ts", "name", "pid", "tid", "cat", "id", "args", "s", "dur")
_ODD = st.sampled_from([*map(repr, range(2, 6)), *"BEXbeni()MC"]) | st.sampled_from(ODD_VALUES).map(
    copy.deepcopy
)


@st.composite
def changed_events(draw: st.DrawFn, events: list[Any]) -> list[Any]:
    """``events`` with a few of them changed."""
    made = list(events)
    for _ in range(draw(st.integers(1, 6))):
        if not made:
            break
        index = draw(st.integers(0, len(made) - 1))
        harm = draw(
            st.sampled_from(["field", "field", "field", "without", "whole", "repeat", "move", "lose", "cut"])
        )
        if harm in ("field", "without") and isinstance(made[index], dict):
            event = dict(made[index])
            field = draw(st.sampled_from(_FIELDS))
            event.pop(field, None)
            if harm == "field":
                event[field] = draw(_ODD)
            made[index] = event
        elif harm == "whole":
            made[index] = draw(_ODD)
        elif harm in ("repeat", "move"):
            event = made[index] if harm == "repeat" else made.pop(index)
            made.insert(draw(st.integers(0, len(made))), event)
        elif harm == "lose":
            del made[index : index + draw(st.integers(1, 20))]
        elif harm == "cut":
            del made[index:]
    return made
