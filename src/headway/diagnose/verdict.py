"""The verdict: one plain sentence that names the bottleneck, with numbers, and says what to do."""

from __future__ import annotations

from headway.diagnose.breakdown import Breakdown
from headway.diagnose.gradients import CommunicationShape
from headway.diagnose.stragglers import UNKNOWN, Straggler
from headway.units import format_bytes

STANDS_OUT = 0.10  # of the step
STRAGGLER_STANDS_OUT = 0.05
REST_STANDS_OUT = 0.25
SMALL_BYTES = 256 * 1024
MANY = 16  # collectives a step

_ADVICE = {
    "forward": "look at what else that machine runs, its clock rate and temperature",
    "backward": "look at what else that machine runs, its clock rate and temperature",
    "input": "look at that rank's storage and its data loader's workers",
    "optimizer": "look at what else that machine runs, and whether only that rank has extra work",
    "rest": "look at what that rank does between its passes, such as logging, evaluation and checkpoints",
    UNKNOWN: "look at that machine and its network",
}
_PART_WORDS = {
    "forward": "its forward",
    "backward": "its backward",
    "input": "its wait for input",
    "optimizer": "its optimizer",
    "rest": "its work outside of forward, backward and optimizer",
}
_SHARE_WORDS = {
    "exposed_communication": "waiting for communication",
    "straggler_wait": "waiting for other ranks",
    "input": "waiting for input",
    "optimizer": "the optimizer",
    "rest": "everything else",
}


def verdict(
    mean: Breakdown,
    stragglers: tuple[Straggler, ...],
    shape: CommunicationShape,
    *,
    world_size: int,
) -> str:
    """Name what costs the step most. ``mean`` is the breakdown averaged over ranks."""
    step_ms = mean.total_ms
    if step_ms <= 0:
        return "Nothing can be said: the recorded steps have no length."
    taking_turns = not stragglers or _alike(stragglers, world_size)
    worst_ms = 0.0 if taking_turns else stragglers[0].blame_ms
    shares = {
        "straggler": (worst_ms / step_ms, STRAGGLER_STANDS_OUT),
        "jitter": (mean.straggler_wait / step_ms if taking_turns else 0.0, STANDS_OUT),
        "communication": (mean.exposed_communication / step_ms, STANDS_OUT),
        "input": (mean.input / step_ms, STANDS_OUT),
        "rest": (mean.rest / step_ms, REST_STANDS_OUT),
    }
    standing = {name: share for name, (share, floor) in shares.items() if share >= floor}
    worst = max(standing, key=lambda name: standing[name], default="")
    if not worst:
        return _nothing(mean, step_ms, world_size)
    of_step = f"{_percent(standing[worst])} of each {_ms(step_ms)} step"
    if worst == "straggler":
        return _straggler(stragglers, step_ms)
    if worst == "communication":
        besides = ""
        if worst_ms / step_ms >= STRAGGLER_STANDS_OUT:
            besides = (
                f"; besides, the others wait for rank {stragglers[0].rank} for {_percent(worst_ms / step_ms)}"
            )
        return f"Communication is the bottleneck: {of_step} waits for {_why_exposed(mean, shape)}{besides}."
    return {
        "jitter": f"Ranks wait for one another for {of_step}, for a different one each time; look for uneven inputs "
        "or noisy machines, as no single rank is to blame.",
        "input": f"Input is the bottleneck: {of_step} waits for the data loader; give it more workers, prefetch, or "
        "move work out of it.",
        "rest": f"Time outside of the training passes is the bottleneck: {of_step} is neither forward, backward, "
        "optimizer, input nor communication; look at what the loop does between them, such as logging, copies and "
        "evaluation.",
    }[worst]


def _alike(stragglers: tuple[Straggler, ...], world_size: int) -> bool:
    """Whether most ranks are late now and then, none of them far more than the others."""
    middle = stragglers[len(stragglers) // 2].blame_ms
    return len(stragglers) > world_size / 2 and middle > 0.5 * stragglers[0].blame_ms


def _straggler(stragglers: tuple[Straggler, ...], step_ms: float) -> str:
    worst = stragglers[0]
    sentence = (
        f"Rank {worst.rank} is a straggler: the other ranks wait {_ms(worst.blame_ms)} of each {_ms(step_ms)} step "
        f"({_percent(worst.blame_ms / step_ms)}) for it"
    )
    if worst.cause != UNKNOWN:
        sentence += f", because {_PART_WORDS[worst.cause]} takes longer before it arrives"
        if worst.own_ms > 1.05 * worst.others_ms:
            sentence += f" ({_ms(worst.own_ms)} a step, the others {_ms(worst.others_ms)})"
    else:
        sentence += ", and no recorded part of its own work explains it"
    if len(stragglers) > 1:
        also = ", ".join(str(one.rank) for one in stragglers[1:4])
        sentence += f"; rank{'s' if len(stragglers) > 2 else ''} {also} to a lesser degree"
    return f"{sentence}; {_ADVICE[worst.cause]}."


def _why_exposed(mean: Breakdown, shape: CommunicationShape) -> str:
    """What is waited for, why, and what to do."""
    if shape.blocking_ms > 0.5 * mean.exposed_communication:
        return (
            f"{shape.blocking_name or 'communication'} outside of the gradients, because the program waits on the "
            f"spot for {shape.blocking_count:.3g} of them a step; drop them, do them less often, or start them "
            "asynchronously"
        )
    many_small = shape.collectives >= MANY and shape.mean_bytes < SMALL_BYTES
    if many_small:
        return (
            f"gradients, because they travel in {shape.collectives:.0f} collectives of "
            f"{format_bytes(shape.mean_bytes)} on average and each pays the network's latency; try larger buckets "
            "(headway optimize)"
        )
    share = shape.largest_bytes / shape.gradient_bytes if shape.gradient_bytes else 0.0
    late = 0.5 if share >= 0.9 else 0.8
    if share >= 0.5 and shape.largest_ready >= late:
        of_them = "all" if shape.buckets == 1 else f"{_percent(share)} of them"
        one = f"one {format_bytes(shape.largest_bytes)} bucket carries {of_them}"
        when = (
            "starts only when backward ends"
            if shape.largest_ready >= 0.95
            else f"starts only when {_percent(shape.largest_ready)} of backward is done"
        )
        return f"gradients, because {one} and {when}; try smaller buckets (headway optimize)"
    if shape.buckets and shape.first_ready >= 0.6:
        return (
            f"gradients, because the first bucket starts only when {_percent(shape.first_ready)} of backward is done; "
            "try smaller buckets (headway optimize)"
        )
    if shape.backward_ms and shape.busy_ms > shape.backward_ms:
        return (
            f"gradients, because the links are busy for {_ms(shape.busy_ms)} of it and backward, which could hide "
            f"that, takes only {_ms(shape.backward_ms)}; send less (larger batches, accumulation, lower precision) or "
            "hide it under forward as well (headway optimize)"
        )
    return "gradients, which start too late to hide under backward; try other buckets (headway optimize)"


def _nothing(mean: Breakdown, step_ms: float, world_size: int) -> str:
    others = {part: getattr(mean, part) / step_ms for part in _SHARE_WORDS}
    second = max(others, key=lambda part: others[part])
    alone = " on the only rank" if world_size == 1 else ""
    follows = f", {_SHARE_WORDS[second]} {_percent(others[second])}" if others[second] >= 0.01 else ""
    return (
        f"Nothing stands out: computation is {_percent(mean.computation / step_ms)} of each {_ms(step_ms)} step"
        f"{alone}{follows}."
    )


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _ms(value: float) -> str:
    return f"{value:.0f} ms" if value >= 99.5 else f"{value:.3g} ms"
