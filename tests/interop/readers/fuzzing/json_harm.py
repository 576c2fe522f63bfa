"""Ways in which JSON documents come to harm: other types, impossible numbers, depth, keys twice, events in disorder."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

Node = Any  # a list or an object

# What ``json`` cannot write, or not at once, stands in the document as a text that is replaced afterwards.
WRITTEN = {
    "@endless number@": b"9" * 100_000, "@exponent@": b"1e999999", "@deep@": b"[" * 3_000 + b"]" * 3_000,
    "@bottomless@": b'{"a":' * 50_000, "@surrogate@": b'"\\ud800"', "@control@": b'"\x00\x1b[31m"', "@nothing@": b"",
    "@bytes@": b'"\xff\xfe"', "@zeros@": b"-0.000", "@plus@": b"+1", "@twice@": b'1, "ts": 2, "ts": "x", "name": null',
}  # fmt: skip
ODD: tuple[Any, ...] = (
    None, True, False, -1, 0, 1, 3, 0.5, 2**31, 2**53 + 1, 2**63 - 1, 2**63, 2**64, -(2**63), -(2**70), 1e18, 1e19,
    1e300, -1e300, 1e-300, float("nan"), float("inf"), float("-inf"), "", "x", "0", "-1", "1e400", "2024-01-01",
    "\x00\x1b[31m<script>", "x" * 5_000, [], {}, [[]], [None], [[[[[[]]]]]], {"name": {}}, {"": []}, [2**62] * 3,
    *WRITTEN,
)  # fmt: skip


def harmed_json(draw: random.Random, document: Any) -> bytes:
    """``document``, which is changed in place, after one to five kinds of harm."""
    holder: Node = [document]
    for _ in range(draw.choice((1, 1, 1, 2, 2, 3, 5))):
        draw.choice(HARMS)(draw, holder)
    text = json.dumps(holder[0], separators=draw.choice(((",", ":"), (", ", ": "))))
    data = text.encode()
    for mark, written in WRITTEN.items():
        if mark in text:
            data = data.replace(json.dumps(mark).encode(), written, 3)
    return data


def _nodes(draw: random.Random, holder: Node) -> tuple[Node, Any]:
    """A list or object somewhere in the document, and a key of it."""
    here, depth = holder, draw.randrange(1, 9)
    while True:
        key = draw.choice(list(here)) if isinstance(here, dict) else draw.randrange(len(here))
        below = here[key]
        depth -= 1
        if not isinstance(below, list | dict) or not below or (depth <= 0 and here is not holder):
            return here, key
        here = below


def _events(draw: random.Random, holder: Node) -> list[Any]:
    """The longest list near the top, which is that of the events."""
    whole = holder[0]
    lists = [one for one in (whole.values() if isinstance(whole, dict) else [whole]) if isinstance(one, list)]
    return max(lists, key=len, default=[])


def _replace(draw: random.Random, holder: Node) -> None:
    here, key = _nodes(draw, holder)
    here[key] = json.loads(json.dumps(draw.choice(ODD)))


def _remove(draw: random.Random, holder: Node) -> None:
    here, key = _nodes(draw, holder)
    if here is not holder:
        del here[key]


def _transplant(draw: random.Random, holder: Node) -> None:
    (here, key), (there, other) = _nodes(draw, holder), _nodes(draw, holder)
    if here is not holder:
        here[key] = json.loads(json.dumps(there[other]))


_CHANGES: tuple[Callable[[random.Random, Any], Any], ...] = (
    lambda draw, value: -value,
    lambda draw, value: value * 10**6,
    lambda draw, value: value / 1e6,
    lambda draw, value: value + 10**12,
    lambda draw, value: value + draw.randrange(-1000, 1000),
    lambda draw, value: draw.randrange(2**64),
    lambda draw, value: 0,
    lambda draw, value: 2**62,
    lambda draw, value: -(10**17),
    lambda draw, value: float("nan"),
    lambda draw, value: [value],
    lambda draw, value: str(value),
)


def _number(draw: random.Random, holder: Node) -> None:
    """Numbers of one name become other ones, in all events or in some."""
    events = [one for one in _events(draw, holder) if isinstance(one, dict)]
    names = sorted(
        {key for one in events[:50] for key, value in one.items() if isinstance(value, int | float)}
    )
    if not names:
        return
    name, some = draw.choice(names), draw.choice((1.0, 0.3, 0.02))
    change = draw.choice(_CHANGES)
    for one in events:
        if isinstance(one.get(name), int | float) and draw.random() < some:
            try:
                one[name] = change(draw, one[name])
            except (OverflowError, ValueError):
                one[name] = None


def _rename(draw: random.Random, holder: Node) -> None:
    """Texts of one name become another event's, so that what belongs together no longer does."""
    events = [one for one in _events(draw, holder) if isinstance(one, dict)]
    names = sorted({key for one in events[:50] for key, value in one.items() if isinstance(value, str)})
    if not names:
        return
    name = draw.choice(names)
    others = [one[name] for one in events if name in one]
    for one in draw.sample(events, max(1, len(events) // draw.choice((1, 10, 100)))):
        one[name] = draw.choice(others)


def _disorder(draw: random.Random, holder: Node) -> None:
    events = _events(draw, holder)
    if not events:
        return
    begin = draw.randrange(len(events))
    end = min(len(events), begin + draw.choice((1, 5, 50, 10_000)))
    harm = draw.choice(["shuffle", "repeat", "lose", "keep", "reverse", "first"])
    if harm == "shuffle":
        draw.shuffle(events)
    elif harm == "repeat":
        events[begin:begin] = json.loads(json.dumps(events[begin:end])) * draw.choice((1, 3))
    elif harm == "lose":
        del events[begin:end]
    elif harm == "keep":
        events[:] = events[begin:end]
    elif harm == "reverse":
        events.reverse()
    else:
        del events[1:]


HARMS = (_replace, _replace, _remove, _transplant, _number, _number, _rename, _disorder)
