"""A stage that several pipelines have, and what the strategy of its replicas does about it.

It acts under the last backward of a step, as gradients become ready, at the optimizer's step, and under the first
forward, where that needs parameters which are on their way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from headway.graph.blocks import COMPUTED
from headway.graph.build import GraphBuilder, RankCursor
from headway.graph.step_layout import InRecordedOrder
from headway.graph.timeline import Item, Part, Point
from headway.scheduling.pipeline.schedule import Action
from headway.strategies.pipeline.stage_times import StageTimes
from headway.trace.events import Read


def lay_out_using(
    graph: GraphBuilder[Any], replicas: InRecordedOrder, cursor: RankCursor, times: StageTimes, action: Action
) -> None:
    """Lay out the first forward of a stage, ``action``, with what ``replicas`` does about what it uses."""
    graph.compute(cursor, Part.FORWARD, 0)  # it waits for its message, before anything is used
    items = times.using(action)
    if not any(item.kind == Point.USE for item in items):
        replicas.use_all(cursor)
    for item in items:
        _compute_or_react(graph, replicas, cursor, item)
    rest_ns = times.passes_ns[action] - sum(item.duration_ns for item in items)
    if rest_ns > 0:
        graph.compute(cursor, Part.FORWARD, rest_ns)


def lay_out_update(
    graph: GraphBuilder[Any],
    replicas: Sequence[InRecordedOrder],
    cursor: RankCursor,
    items: Iterable[Item],
    optimizer_ns: int,
) -> int:
    """Lay out ``items``, what a rank does before its first pass or after its last one.

    The update takes ``optimizer_ns`` for all stages of the rank, whose ``replicas`` have a share of it each and lay it
    out where the optimizer first steps. Returns what is left of it. Gradients are clipped by the norm of all stages,
    for which each is brought whole.
    """
    first, *others = replicas
    for item in items:
        match item.kind:
            case Point.STEP:
                for each in replicas:
                    each.optimizer(cursor, optimizer_ns // len(replicas))
                optimizer_ns = 0
            case Part.OPTIMIZER:
                pass
            case Part.READ:
                whole = item._replace(name=Read.LOOK) if item.name == Read.CLIP else item
                first.read(cursor, whole)
                for each in others:
                    each.read(cursor, whole._replace(duration_ns=0))
            case Part.FINALIZE:
                first.finalize(cursor, item.duration_ns)
            case _ if item.kind in COMPUTED:
                graph.compute(cursor, item.kind, item.duration_ns)
    return optimizer_ns


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
        _compute_or_react(graph, gradients, cursor, item)
    finalize_ns = times.finalize_ns.get(action.stage, 0)
    rest_ns = times.passes_ns[action] - sum(item.duration_ns for item in items) - finalize_ns
    if rest_ns > 0:
        graph.compute(cursor, Part.BACKWARD, rest_ns)
    if finalize_ns:
        gradients.finalize(cursor, finalize_ns)
    if send is not None:
        send()


def _compute_or_react(
    graph: GraphBuilder[Any], replicas: InRecordedOrder, cursor: RankCursor, item: Item
) -> None:
    if item.kind in COMPUTED:
        graph.compute(cursor, item.kind, item.duration_ns)
    else:
        react(replicas, cursor, item)


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
