"""A step, and what it holds, where a batch is computed in parts one after the other, each again in backward."""

from __future__ import annotations

from collections.abc import Callable

from headway.errors import UnsupportedError
from headway.graph.timeline import Item, Part, Point, Timeline
from headway.model import ModelSpec, ModuleMemory, PassMemory


def accumulating(parts: int) -> Callable[[Timeline], Timeline]:
    """How a step of one forward and backward changes. Raises UnsupportedError for a step of several."""

    def change(timeline: Timeline) -> Timeline:
        items = timeline.items
        forward = [at for at, item in enumerate(items) if item.kind == Part.FORWARD and item.duration_ns]
        backward = [at for at, item in enumerate(items) if item.kind == Part.BACKWARD and item.duration_ns]
        if not forward or not backward:
            return timeline
        if forward[-1] > backward[0] or sum(item.kind == Point.BACKWARD_END for item in items) > 1:
            raise UnsupportedError(
                "a step of several forwards accumulates gradients already", got=f"step {timeline.step}",
                fix="Leave the pass out of the plan.",
            )  # fmt: skip
        forward_ns, backward_ns = (sum(items[at].duration_ns for at in own) for own in (forward, backward))
        changed: list[Item] = []
        for at, item in enumerate(items):
            if at == backward[0]:  # the other parts, and the last one's forward once more
                before_ns = forward_ns + backward_ns * (parts - 1) // parts
                changed.append(item._replace(name="", duration_ns=before_ns))
            if item.kind in (Part.FORWARD, Part.BACKWARD):
                changed.append(item._replace(duration_ns=item.duration_ns // parts))
            else:
                changed.append(item)
            if at == forward[-1]:
                changed.append(item._replace(name="", duration_ns=forward_ns * (parts - 1) // parts))
        return Timeline(timeline.rank, timeline.step, tuple(changed), timeline.background_ns)

    return change


def in_parts(memory: PassMemory, model: ModelSpec, parts: int) -> PassMemory:
    """``memory`` where a part's activations are there at a time, and gradients add up until the last part's are done.

    What the model is given and puts out is of the whole batch, and so is the gradient of the latter.
    """
    given_bytes = memory.modules[0].begin_bytes
    last = memory.modules[-1]
    output_bytes = last.output_bytes
    rise_bytes = max(each.peak_bytes - each.begin_bytes for each in _innermost(memory))
    own = {each.name: each.size_bytes for each in model.parameters}
    unready_bytes = model.size_bytes
    backward: list[tuple[str, int]] = []
    whole_bytes = 2 * output_bytes  # what is put out, and its gradient
    for name, held_bytes in memory.backward:
        own_bytes = own.get(name, 0)
        part_bytes = max(0, held_bytes - given_bytes - own_bytes) // parts
        constant_bytes = given_bytes + whole_bytes - whole_bytes // parts
        # Besides the sum so far there are a part's gradient and their new sum: autograd does not add to views in place,
        # and gradients of linear layers are views.
        backward.append((name, constant_bytes + part_bytes + 2 * own_bytes + unready_bytes))
        unready_bytes -= own_bytes
    loss_bytes = max(0, memory.backward[0][1] - last.end_bytes)
    forward_bytes = max(
        given_bytes + 2 * output_bytes + rise_bytes // parts, given_bytes + output_bytes + loss_bytes
    )
    return memory.model_copy(
        update={"forward_bytes": forward_bytes, "backward": tuple(backward), "modules": ()}
    )


def _innermost(memory: PassMemory) -> list[ModuleMemory]:
    names = {each.module for each in memory.modules}
    outer = {name.rpartition(".")[0] for name in names}
    return [each for each in memory.modules if each.module not in outer]
