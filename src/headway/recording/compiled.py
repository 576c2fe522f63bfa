"""What compiled code hides: hooks on modules inside would break it up, so that none are laid there.

A module's forward is then not seen, but that its parameters were needed is known: at the latest when the pass began.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from headway.trace.events import Event, Kind, Stream

MODULES_UNSEEN = (
    "The model is compiled: modules inside are not seen, and all their parameters are taken to be needed when forward "
    "begins."
)
FORWARD_UNSEEN = (
    "Forward runs inside compiled code and is not seen: it counts as rest. To see it, compile the model before it is "
    "wrapped: DistributedDataParallel(torch.compile(model))."
)


def unseen_uses(rows: Iterable[Event], owners: Sequence[str]) -> list[Event]:
    """Forwards of no length of the modules ``owners``: where each recorded pass begins, or a step that shows none."""
    steps = {row.step: row.start_ns for row in rows if row.kind == Kind.STEP}
    passes = [(row.step, row.start_ns) for row in rows if row.kind == Kind.FORWARD_PASS]
    seen = {step for step, _ in passes}
    begins = passes + [(step, start_ns) for step, start_ns in steps.items() if step not in seen]
    return [
        Event(Kind.FORWARD, name, Stream.COMPUTE, step, start_ns, 0)
        for step, start_ns in begins
        for name in owners
    ]
