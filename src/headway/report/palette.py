"""Words and colours of the report: one for each part of a step and for each kind of event."""

from __future__ import annotations

from headway.trace.events import Kind

PART_LABELS = {
    "computation": "Computation",
    "exposed_communication": "Exposed communication",
    "straggler_wait": "Waiting for a straggler",
    "input": "Waiting for input",
    "optimizer": "Optimizer",
    "rest": "Everything else",
}
PART_COLOURS = {
    "computation": "#3f7fb5",
    "exposed_communication": "#d1495b",
    "straggler_wait": "#ee8434",
    "input": "#e3b23c",
    "optimizer": "#8a6bb1",
    "rest": "#b8bec7",
}

KIND_LABELS = {
    Kind.INPUT: "input",
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.OPTIMIZER: "optimizer",
    Kind.UPDATE: "update",
    Kind.WAIT: "wait",
    Kind.COLLECTIVE: "collective",
    Kind.SEND: "send",
    Kind.RECEIVE: "receive",
}
KIND_COLOURS = {
    Kind.INPUT: "#e3b23c",
    Kind.FORWARD: "#6fa8d6",
    Kind.FORWARD_PASS: "#cfe1f0",
    Kind.BACKWARD: "#2f6690",
    Kind.BACKWARD_PASS: "#a9c2d6",
    Kind.OPTIMIZER: "#8a6bb1",
    Kind.UPDATE: "#b49fd0",
    Kind.WAIT: "#f0b3bb",
    Kind.COLLECTIVE: "#2a9d8f",
    Kind.SEND: "#76b041",
    Kind.RECEIVE: "#a5ce7c",
}
PENDING_COLOUR = "#b9c4c2"
PATH_COLOUR = "#111827"
UNKNOWN_COLOUR = "#9aa1ab"


_SHORT_LABELS = {
    "computation": "compute",
    "exposed_communication": "exposed comm.",
    "straggler_wait": "straggler",
}


def short_label(part: str) -> str:
    """The words for a part of the step where a column is narrow."""
    return _SHORT_LABELS.get(part, part.replace("_", " "))
