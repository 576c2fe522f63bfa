"""Ways in which documents come to harm: bytes flipped, cut or repeated; JSON values replaced by other ones."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st

from headway.errors import TraceError

ODD_VALUES: tuple[Any, ...] = (
    None, True, -1, 0, 2**31, 2**63, 2**64, -(2**70), 1e308, -1e300, "", "x", "\x00\x1b[31m<script>", "9" * 400,
    [], {}, [[]], [None], [[[[[[[[]]]]]]]], {"name": {}}, [2**62] * 3, "\ud800",
)  # fmt: skip


def damaged_bytes(draw: st.DataObject, data: bytes) -> bytes:
    """``data`` with some bytes changed, then perhaps cut at either end, or with a stretch left out or repeated."""
    made = bytearray(data)
    for _ in range(draw.draw(st.integers(0, 6))):
        made[draw.draw(st.integers(0, len(data) - 1))] = draw.draw(st.integers(0, 255))
    first, second = sorted((draw.draw(st.integers(0, len(data))), draw.draw(st.integers(0, len(data)))))
    harm = draw.draw(st.sampled_from(["none", "head", "tail", "without", "twice"]))
    return {
        "none": bytes(made),
        "head": bytes(made[:first]),
        "tail": bytes(made[first:]),
        "without": bytes(made[:first] + made[second:]),
        "twice": bytes(made[:second] + made[first:]),
    }[harm]


def damaged_json(draw: st.DataObject, value: Any) -> bytes:
    """The document ``value`` with a few of its parts replaced, removed or repeated, written as JSON."""
    made = copy.deepcopy(value)
    for _ in range(draw.draw(st.integers(1, 4))):
        here = made
        for _ in range(draw.draw(st.integers(1, 8))):
            if not isinstance(here, list | dict) or not here:
                break
            keys = list(range(len(here))) if isinstance(here, list) else list(here)
            key = draw.draw(st.sampled_from(keys[:200]))
            if not isinstance(here[key], list | dict) or draw.draw(st.integers(0, 3)) == 0:
                _harm(draw, here, key)
                break
            here = here[key]
    return json.dumps(made).encode()


def _harm(draw: st.DataObject, here: Any, key: Any) -> None:
    what = draw.draw(st.sampled_from(["replace", "replace", "remove", "repeat"]))
    if what == "remove":
        del here[key]
    elif what == "repeat" and isinstance(here, list):
        here.append(copy.deepcopy(here[key]))
    else:
        here[key] = copy.deepcopy(draw.draw(st.sampled_from(ODD_VALUES)))


def refused(read: Callable[[], object]) -> str:
    """What ``read`` reports of damage, "" where it reads all. Whatever else it raises passes through."""
    try:
        read()
    except TraceError as failure:
        return str(failure)
    return ""
