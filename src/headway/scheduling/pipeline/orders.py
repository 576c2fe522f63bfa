"""Builds the published pipeline schedules: GPipe, 1F1B, kFkB, eager 1F1B, zero-bubble, interleaved and looped.

Interleaved and looped schedules have several stages per rank. Schedules differ in how many forwards a stage runs ahead of
its backwards: that determines its activation memory and how much transfer time is hidden. A rank posts as many receives
per neighbour as a group has micro-batches; with fewer, ranks could deadlock if sends wait for receives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from headway.scheduling.pipeline.schedule import Action, Pass, PipelineSchedule


def gpipe(stages: int, micro_batches: int) -> PipelineSchedule:
    """All forwards, then all backwards (Huang et al., 2019). Raises ValueError for fewer than one of either."""
    return grouped(stages, micro_batches, max(1, micro_batches))


def one_forward_one_backward(stages: int, micro_batches: int) -> PipelineSchedule:
    """1F1B (Narayanan et al., 2019): stage ``s`` runs at most ``stages - s`` forwards ahead of its backwards.

    Raises ValueError for fewer than one stage or micro-batch.
    """
    return grouped(stages, micro_batches, 1)


def grouped(stages: int, micro_batches: int, size: int) -> PipelineSchedule:
    """kFkB (Ada-Grouper, arXiv 2303.01675): 1F1B of groups of ``size`` micro-batches; the last group may be smaller.

    While one micro-batch of a group is sent, the stage computes the next ones. Stage ``s`` holds the activations of
    at most ``min(micro_batches, size * (stages - s))`` micro-batches. A group of one is 1F1B, one of all is GPipe.
    Raises ValueError for fewer than one stage, micro-batch or member of a group.
    """
    _check(stages, micro_batches)
    if size < 1:
        raise ValueError(f"a group has at least one micro-batch, not {size}")
    groups = [range(first, min(first + size, micro_batches)) for first in range(0, micro_batches, size)]
    return _alternating(groups, [stages - stage for stage in range(stages)], micro_batches)


def eager_one_forward_one_backward(stages: int, micro_batches: int) -> PipelineSchedule:
    """Eager 1F1B (Zhuang et al., arXiv 2211.05322): about twice as many forwards ahead as 1F1B.

    Stage ``s`` holds the activations of at most ``min(micro_batches, 2 * (stages - s) - 1)`` micro-batches. Raises
    ValueError for fewer than one stage or micro-batch.
    """
    _check(stages, micro_batches)
    groups = [range(micro_batch, micro_batch + 1) for micro_batch in range(micro_batches)]
    return _alternating(groups, [2 * (stages - stage) - 1 for stage in range(stages)], micro_batches)


def zero_bubble(stages: int, micro_batches: int) -> PipelineSchedule:
    """ZB-H1 (Qi et al., arXiv 2401.10241): 1F1B with split backwards, whose weight gradients fill idle time.

    Stage ``s`` defers weight gradients by ``s`` micro-batches, so that all stages hold the activations of
    ``min(micro_batches, stages)``. Raises ValueError for fewer than one stage or micro-batch.
    """
    _check(stages, micro_batches)

    def of_stage(stage: int) -> Iterator[Action]:
        ahead = min(stages - stage, micro_batches)
        for forward in range(ahead):
            yield Action(Pass.FORWARD, stage, forward)
        for backward in range(micro_batches):
            yield Action(Pass.INPUT_GRADIENT, stage, backward)
            if backward >= stage:
                yield Action(Pass.WEIGHT_GRADIENT, stage, backward - stage)
            if ahead + backward < micro_batches:
                yield Action(Pass.FORWARD, stage, ahead + backward)
        for left in range(max(0, micro_batches - stage), micro_batches):
            yield Action(Pass.WEIGHT_GRADIENT, stage, left)

    return PipelineSchedule(tuple(tuple(of_stage(stage)) for stage in range(stages)), micro_batches)


def interleaved(ranks: int, stages_a_rank: int, micro_batches: int) -> PipelineSchedule:
    """Interleaved 1F1B (Narayanan et al., arXiv 2104.04473): stage ``s`` is on rank ``s % ranks``.

    A rank takes as many micro-batches as there are ranks through one of its stages, then through the next. Raises
    ValueError for fewer than one rank, stage or micro-batch, and where ``micro_batches`` is no multiple of ``ranks``.
    """
    _check(ranks * stages_a_rank, micro_batches)
    if micro_batches % ranks:
        raise ValueError(
            f"{micro_batches} micro-batches are no multiple of the {ranks} ranks that take turns with them"
        )
    rounds = range(0, micro_batches, ranks)

    def of_rank(rank: int) -> Iterator[Action]:
        stages = range(rank, ranks * stages_a_rank, ranks)
        forward = [(s, m) for first in rounds for s in stages for m in range(first, first + ranks)]
        backward = [(s, m) for first in rounds for s in reversed(stages) for m in range(first, first + ranks)]
        ahead = (
            2 * (ranks - rank - 1) + (stages_a_rank - 1) * ranks + 1 if stages_a_rank > 1 else ranks - rank
        )
        return _in_turn(
            [[Action(Pass.FORWARD, *place)] for place in forward],
            [[Action(Pass.BACKWARD, *place)] for place in backward],
            ahead,
        )

    # With two ranks both neighbours are the same rank, which receives activations and gradients in one sequence.
    return PipelineSchedule(
        tuple(tuple(of_rank(rank)) for rank in range(ranks)), micro_batches, receive_buffers=2
    )


def looped(ranks: int, stages_a_rank: int, micro_batches: int) -> PipelineSchedule:
    """Breadth-first GPipe (Lamy-Poirier, arXiv 2211.05953): all micro-batches through a stage, then through the next.

    Stage ``s`` is on rank ``s % ranks``; backwards go the other way. A rank holds the activations of all micro-batches
    of all its stages. Raises ValueError for fewer than one rank, stage or micro-batch.
    """
    _check(ranks * stages_a_rank, micro_batches)

    def of_rank(rank: int) -> Iterator[Action]:
        stages = range(rank, ranks * stages_a_rank, ranks)
        for stage in stages:
            yield from (Action(Pass.FORWARD, stage, micro_batch) for micro_batch in range(micro_batches))
        for stage in reversed(stages):
            yield from (Action(Pass.BACKWARD, stage, micro_batch) for micro_batch in range(micro_batches))

    ranked = tuple(tuple(of_rank(rank)) for rank in range(ranks))
    return PipelineSchedule(ranked, micro_batches, receive_buffers=micro_batches)


def _check(stages: int, micro_batches: int) -> None:
    if stages < 1 or micro_batches < 1:
        raise ValueError("a schedule has at least one stage and one micro-batch")


def _alternating(groups: Sequence[range], ahead: Sequence[int], micro_batches: int) -> PipelineSchedule:
    """Stage ``s`` runs the forwards of ``ahead[s]`` groups, then alternates a group's backwards and the next forwards."""

    def of_stage(stage: int) -> Iterator[Action]:
        return _in_turn(
            [[Action(Pass.FORWARD, stage, micro_batch) for micro_batch in group] for group in groups],
            [[Action(Pass.BACKWARD, stage, micro_batch) for micro_batch in group] for group in groups],
            ahead[stage],
        )

    ranks = tuple(tuple(of_stage(stage)) for stage in range(len(ahead)))
    return PipelineSchedule(ranks, micro_batches, receive_buffers=len(groups[0]))


def _in_turn(
    forwards: Sequence[list[Action]], backwards: Sequence[list[Action]], ahead: int
) -> Iterator[Action]:
    for group in forwards[:ahead]:
        yield from group
    for index, group in enumerate(backwards):
        yield from group
        if ahead + index < len(forwards):
            yield from forwards[ahead + index]


ORDERS: dict[str, Callable[[int, int], PipelineSchedule]] = {
    "gpipe": gpipe,
    "1f1b": one_forward_one_backward,
    "eager-1f1b": eager_one_forward_one_backward,
    "zero-bubble": zero_bubble,
}
"""Orders with one stage per rank: name -> function of (stages, micro_batches)."""
LOOPED_ORDERS: dict[str, Callable[[int, int, int], PipelineSchedule]] = {
    "interleaved": interleaved,
    "looped": looped,
}
"""Orders with several stages per rank: name -> function of (ranks, stages per rank, micro_batches)."""
