"""Gradients of a stage that several pipelines have: what the strategy of its replicas does under its last backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from headway.graph.blocks import COMPUTED
from headway.graph.build import GraphBuilder, RankCursor
from headway.graph.step_layout import InRecordedOrder
from headway.graph.timeline import Item, Part, Point
from headway.scheduling.pipeline.schedule import Action
from headway.strategies.pipeline.stage_times import StageTimes


def lay_out_readying(
    graph: GraphBuilder[Any],
    gradients: InRecordedOrder,
    cursor: RankCursor,
    times: StageTimes,
    action: Action,
    send: Callable[[], object] | None = None,
) -> None:
    """Lay out the last backward of a stage, ``action``, with what ``gradients`` does about what it readies.

    ``send`` has the stage hand the gradient of its input on: it is there when all is computed, and does not wait for
    what was launched.
    """
    graph.compute(cursor, Part.BACKWARD, 0)  # it waits for its message, before anything is launched
    items = times.readying(action)
    for item in items:
        if item.kind == Point.BACKWARD_END and send is not None:
            send()
            send = None
        if item.kind in COMPUTED:
            graph.compute(cursor, item.kind, item.duration_ns)
        else:
            react(gradients, cursor, item)
    rest_ns = times.passes_ns[action] - sum(item.duration_ns for item in items)
    if rest_ns > 0:
        graph.compute(cursor, Part.BACKWARD, rest_ns)
    if send is not None:
        send()


def react(gradients: InRecordedOrder, cursor: RankCursor, item: Item) -> None:
    """Tell the strategy of a stage's replicas of a point of a timeline."""
    match item.kind:
        case Point.USE:
            gradients.use(cursor, item.name)
        case Point.READY:
            gradients.ready(cursor, item.name)
        case Point.UNUSED:
            gradients.unused(cursor, item.name)
        case Point.BACKWARD_END:
            gradients.backward_end(cursor)
