"""The verdict: one plain sentence that names the bottleneck, with numbers, and says what to do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from headway.diagnosis.breakdown import Breakdown
from headway.diagnosis.findings import HALF, Finding, listed, milliseconds, of_each_step, percent, unexplained
from headway.diagnosis.gradients import CommunicationShape, why_exposed
from headway.diagnosis.stalls import Pause, pause_advice
from headway.diagnosis.stragglers import UNKNOWN, Straggler
from headway.trace.events import Kind
from headway.trace.format import Trace

STANDS_OUT = 0.10  # of the step
REST_STANDS_OUT = 0.25
TOLD_OF_NOISE = 0.05  # of the step
NEEDLESS_SEARCH = "needless_find_unused"

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


class Waits(NamedTuple):
    """How long ranks wait for the last to arrive, ``mean_ms`` a step averaged over ranks, and what of that is noise.

    ``uneven`` is whether it is more than equal workers wait for one another; blame on a rank stands out from
    ``least_blame_ms`` upwards.
    """

    mean_ms: float
    uneven: bool
    least_blame_ms: float


def usual_findings(
    mean: Breakdown,
    stragglers: tuple[Straggler, ...],
    shape: CommunicationShape,
    *,
    moving: bool,
    waits: Waits,
    pause: Pause | None,
    communication_ms: float,
    hosts: Mapping[int, str],
    world_size: int,
) -> list[Finding]:
    """What the parts of the mean step say: stragglers, imbalance, communication, input, and what is left.

    ``moving`` says whether ranks take turns in being late, ``pause`` what the program does most besides training;
    ``communication_ms`` is what communication costs a step.
    """
    step_ms = mean.total_ms
    found = []
    if stragglers and not moving:
        worst = stragglers[0]
        late = _late_together(stragglers, hosts)
        lost_ms = sum(one.cost_ms for one in late) * (world_size - 1) / max(world_size - len(late), 1)
        stands_out = lost_ms >= waits.least_blame_ms
        cause = UNKNOWN if not mean.computation else worst.cause
        sentence = (
            _straggler(stragglers, late, hosts, lost_ms, step_ms, cause)
            if stands_out
            else f"The other ranks wait {of_each_step(lost_ms, step_ms)} for rank {worst.rank}, which is within "
            f"noise: in so many steps, equal ranks may differ by {milliseconds(waits.least_blame_ms)}."
        )
        # Part of what it is late by is hidden under what others wait for anyway, and would be gained as well.
        cost_ms = max(lost_ms, min(worst.late_ms, worst.own_ms - worst.others_ms))
        found.append(Finding("straggler", cost_ms, sentence, tuple(one.rank for one in late), stands_out))
    else:
        sentence = f"Ranks wait for one another for {of_each_step(waits.mean_ms, step_ms)}, " + (
            "each time for a different one; no single rank is to blame: look for uneven inputs or noisy machines."
            if waits.uneven
            else "which is within noise: equal ranks may do so."
        )
        found.append(Finding("moving_imbalance", waits.mean_ms, sentence, (), waits.uneven))
    of_step = f"{percent(mean.exposed_communication / step_ms)} of each {milliseconds(step_ms)} step"
    found.append(
        Finding(
            "communication",
            communication_ms,
            f"Communication is the bottleneck: {of_step} waits for {why_exposed(mean, shape)}.",
            (),
            communication_ms >= STANDS_OUT * step_ms,
        )
    )
    of_step = f"{percent(mean.input / step_ms)} of each {milliseconds(step_ms)} step"
    found.append(
        Finding(
            "input",
            mean.input,
            f"Input is the bottleneck: {of_step} waits for the data loader; give it more workers, prefetch, or move "
            "work out of it.",
            (),
            mean.input >= STANDS_OUT * step_ms,
        )
    )
    found.append(_rest(mean, pause))
    if stragglers and not moving:  # a part that is long on the straggler above all is not the job's
        of_mean_rank_ms = (stragglers[0].own_ms - stragglers[0].others_ms) / world_size
        found = unexplained(found, found[0], stragglers[0].cause, explained_ms=of_mean_rank_ms)
    return found


def _rest(mean: Breakdown, pause: Pause | None) -> Finding:
    step_ms = mean.total_ms
    of_step = f"{percent(mean.rest / step_ms)} of each {milliseconds(step_ms)} step"
    stands_out = mean.rest >= REST_STANDS_OUT * step_ms and mean.computation > 0
    look = "look at what the loop does between them, such as logging, copies and evaluation"
    if pause is not None and pause.mean_ms >= HALF * mean.rest:
        stands_out |= pause.mean_ms >= STANDS_OUT * step_ms
        look = f"{milliseconds(pause.mean_ms)} of it is {pause.name}; {pause_advice(pause.name)}"
    sentence = (
        f"Time outside of the training passes is the bottleneck: {of_step} is neither forward, backward, "
        f"optimizer, input nor communication; {look}."
    )
    return Finding("rest", mean.rest, sentence, (), stands_out)


def needless_search(trace: Trace, steps: Sequence[int]) -> Finding | None:
    """DDP's search for unused parameters, where every recorded backward of every rank has used all of them."""
    if not trace.model.find_unused_parameters or trace.missing_ranks or trace.stages:
        return None
    names = set(trace.model.by_name)
    for events in trace.events.values():
        passes = events.of_kind(Kind.BACKWARD_PASS)
        ready = events.of_kind(Kind.GRADIENT_READY)
        if not set(steps) <= set(passes.step.tolist()):
            return None
        for start_ns, end_ns in zip(passes.start_ns.tolist(), passes.end_ns.tolist(), strict=True):
            within = (ready.start_ns >= start_ns) & (ready.start_ns <= end_ns)
            if not names <= set(ready.name[within].tolist()):
                return None
    sentence = (
        f"DDP is told find_unused_parameters=True, but in the {len(steps)} recorded steps all {len(names)} parameters "
        "got gradients on every rank: without it DDP need not search the graph in each step, and can rebuild its "
        "buckets in the order of gradients; leave it out if no step leaves a parameter unused (Hugging Face: "
        "ddp_find_unused_parameters=False)."
    )
    return Finding(NEEDLESS_SEARCH, 0.0, sentence)


def verdict(
    mean: Breakdown,
    findings: Sequence[Finding],
    *,
    world_size: int,
    silent: bool = False,
    contradictions: Sequence[str] = (),
) -> str:
    """The first sentence: the costliest finding that stands out, and what comes next to it.

    Waiting for other ranks that is within noise is told where nothing else is and where it is longer than
    ``TOLD_OF_NOISE`` of the step. ``contradictions`` come before everything else. ``silent`` says that ranks
    which have a backend recorded no communication.
    """
    step_ms = mean.total_ms
    if step_ms <= 0:
        return "Nothing can be said: the recorded steps have no length."
    doubts = (
        [
            f"The trace contradicts itself: {'; '.join(contradictions)}. So nothing is said of who waits for whom, and "
            "what follows may be wrong; record again, or import ranks of one recording only."
        ]
        if contradictions
        else []
    )
    skewed = [finding.sentence for finding in findings if finding.cause == "clock_skew"]
    cheap = [one.sentence for one in findings if one.cause == NEEDLESS_SEARCH]
    others = [one for one in findings if one.cause != NEEDLESS_SEARCH]
    return " ".join([*doubts, *skewed, _costliest(mean, others, world_size, silent), *cheap])


def _costliest(mean: Breakdown, findings: Sequence[Finding], world_size: int, silent: bool) -> str:
    step_ms = mean.total_ms
    standing = [finding for finding in findings if finding.stands_out]
    if not standing:
        noise = [
            one.sentence
            for one in findings
            if one.cause in ("straggler", "moving_imbalance") and one.cost_ms >= TOLD_OF_NOISE * step_ms
        ]
        return " ".join([_nothing(mean, step_ms, world_size, silent), *noise])
    first, *others = standing
    second = next((one for one in others if one.cause == "straggler"), None)
    if second is None:
        return first.sentence
    share = percent(second.cost_ms / step_ms)
    also = f"; in addition, the others wait for {listed(second.ranks)} for {share} of the step."
    return first.sentence.removesuffix(".") + also


def _late_together(stragglers: Sequence[Straggler], hosts: Mapping[int, str]) -> Sequence[Straggler]:
    """The worst straggler, or all ranks of its host where they are late alike, and not those of other hosts."""
    worst = stragglers[0]
    alike = [straggler for straggler in stragglers if straggler.cost_ms >= HALF * worst.cost_ms]
    beside = {rank for rank, host in hosts.items() if host == hosts[worst.rank]}
    together = {one.rank for one in alike} == beside != set(hosts)
    return alike if together else [worst]


def _straggler(
    stragglers: Sequence[Straggler],
    late: Sequence[Straggler],
    hosts: Mapping[int, str],
    lost_ms: float,
    step_ms: float,
    cause: str,
) -> str:
    worst = stragglers[0]
    several = len(late) > 1
    who = f"Rank {worst.rank} is a straggler"
    if several:
        who = f"The ranks of host {hosts[worst.rank]} ({listed([one.rank for one in late])}) are stragglers"
    it, its = ("them", "their") if several else ("it", "its")
    loss = of_each_step(lost_ms, step_ms)
    if worst.hidden_ms > worst.blame_ms:
        sentence = f"{who}: communication that all ranks wait for later begins {loss} late because of {it}"
    else:
        sentence = f"{who}: the other ranks wait {loss} for {it}"
    if cause != UNKNOWN:
        part = _PART_WORDS[cause].replace("its", its, 1)
        sentence += f", because {part} takes longer before {'they arrive' if several else 'it arrives'}"
        if worst.own_ms > 1.05 * worst.others_ms:
            own, others = milliseconds(worst.own_ms), milliseconds(worst.others_ms)
            sentence += f" ({own} a step, the others {others})"
    else:
        sentence += f"; {'they arrive' if several else 'it arrives'} last, and the trace does not show why"
    rest = [straggler for straggler in stragglers if straggler not in late]
    if rest:
        also = ", ".join(str(one.rank) for one in rest[:3])
        sentence += f"; rank{'s' if len(rest) > 1 else ''} {also} to a lesser degree"
    return f"{sentence}; {_ADVICE[cause]}."


def _nothing(mean: Breakdown, step_ms: float, world_size: int, silent: bool) -> str:
    others = {part: getattr(mean, part) / step_ms for part in _SHARE_WORDS}
    second = max(others, key=lambda part: others[part])
    if not mean.computation:
        return (
            "Nothing stands out in what was recorded. Computation was not recorded, and may be all of the "
            f"{percent(mean.rest / step_ms)} of each {milliseconds(step_ms)} step that nothing else accounts for."
        )
    if silent:
        return (
            "Nothing stands out in what was recorded, but no communication was. What counts as computation, "
            f"{percent(mean.computation / step_ms)} of each {milliseconds(step_ms)} step, may be communication in part."
        )
    alone = " on the only rank" if world_size == 1 else ""
    follows = f", {_SHARE_WORDS[second]} {percent(others[second])}" if others[second] >= 0.01 else ""
    return (
        f"Nothing stands out: computation is {percent(mean.computation / step_ms)} of each {milliseconds(step_ms)} step"
        f"{alone}{follows}."
    )
