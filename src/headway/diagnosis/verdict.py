"""Writes the verdict: one sentence that names the bottleneck with numbers and says what to do about it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from headway.diagnosis.breakdown import Breakdown
from headway.diagnosis.findings import (
    HALF,
    Finding,
    drop_explained,
    listed,
    milliseconds,
    of_each_step,
    percent,
)
from headway.diagnosis.gradients import CommunicationShape, why_exposed
from headway.diagnosis.stalls import Pause, pause_advice
from headway.diagnosis.stragglers import UNKNOWN, Straggler
from headway.trace.events import Kind
from headway.trace.format import Trace

STANDS_OUT = 0.10  # of the step
REST_STANDS_OUT = 0.25
REPORTED_NOISE = 0.05  # of the step
NEEDLESS_SEARCH = "needless_find_unused"

_ADVICE = {
    "forward": "check what else that machine runs, its clock rate and temperature",
    "backward": "check what else that machine runs, its clock rate and temperature",
    "input": "check that rank's storage and its data loader's workers",
    "optimizer": "check what else that machine runs, and whether only that rank has extra work",
    "rest": "check what that rank does between its passes, such as logging, evaluation and checkpoints",
    UNKNOWN: "check that machine and its network",
}
_PART_WORDS = {
    "forward": "its forward",
    "backward": "its backward",
    "input": "its wait for input",
    "optimizer": "its optimizer",
    "rest": "its work outside forward, backward and optimizer",
}
_SHARE_WORDS = {
    "exposed_communication": "waiting for communication",
    "straggler_wait": "waiting for other ranks",
    "input": "waiting for input",
    "optimizer": "the optimizer",
    "rest": "everything else",
}


class Waits(NamedTuple):
    """How long ranks wait for one another, in ms per step averaged over ranks, and how much of that is noise.

    ``uneven`` says whether it is longer than equal workers would wait. A rank stands out if its blame is at least
    ``least_blame_ms``.
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
    """Findings from the parts of the mean step: stragglers or imbalance, communication, input, and rest.

    ``moving`` says whether ranks take turns at being late. ``pause`` is the longest pause outside training, and
    ``communication_ms`` the cost of communication per step.
    """
    step_ms = mean.total_ms
    findings = []
    if stragglers and not moving:
        worst = stragglers[0]
        late = _late_together(stragglers, hosts)
        lost_ms = (
            sum(straggler.cost_ms for straggler in late) * (world_size - 1) / max(world_size - len(late), 1)
        )
        stands_out = lost_ms >= waits.least_blame_ms
        cause = UNKNOWN if not mean.computation else worst.cause
        sentence = (
            _straggler_sentence(stragglers, late, hosts, lost_ms, step_ms, cause)
            if stands_out
            else f"The other ranks wait {of_each_step(lost_ms, step_ms)} for rank {worst.rank}, which is within "
            f"noise: over this many steps, equal ranks may differ by {milliseconds(waits.least_blame_ms)}."
        )
        # Part of the delay is hidden behind other waits; removing the straggler would gain that part as well.
        cost_ms = max(lost_ms, min(worst.late_ms, worst.own_ms - worst.others_ms))
        findings.append(
            Finding("straggler", cost_ms, sentence, tuple(straggler.rank for straggler in late), stands_out)
        )
    else:
        sentence = f"Ranks wait for one another for {of_each_step(waits.mean_ms, step_ms)}, " + (
            "each time for a different one; no single rank is to blame: check for uneven inputs or noisy machines."
            if waits.uneven
            else "which is within noise, even for equal ranks."
        )
        findings.append(Finding("moving_imbalance", waits.mean_ms, sentence, (), waits.uneven))
    of_step = f"{percent(mean.exposed_communication / step_ms)} of each {milliseconds(step_ms)} step"
    findings.append(
        Finding(
            "communication",
            communication_ms,
            f"Communication is the bottleneck: {of_step} waits for {why_exposed(mean, shape)}.",
            (),
            communication_ms >= STANDS_OUT * step_ms,
        )
    )
    of_step = f"{percent(mean.input / step_ms)} of each {milliseconds(step_ms)} step"
    findings.append(
        Finding(
            "input",
            mean.input,
            f"Input is the bottleneck: {of_step} waits for the data loader; give it more workers, prefetch, or move "
            "work out of it.",
            (),
            mean.input >= STANDS_OUT * step_ms,
        )
    )
    findings.append(_rest_finding(mean, pause))
    if stragglers and not moving:  # a part that is long mainly on the straggler is not a finding of its own
        of_mean_rank_ms = (stragglers[0].own_ms - stragglers[0].others_ms) / world_size
        findings = drop_explained(findings, findings[0], stragglers[0].cause, explained_ms=of_mean_rank_ms)
    return findings


def _rest_finding(mean: Breakdown, pause: Pause | None) -> Finding:
    step_ms = mean.total_ms
    of_step = f"{percent(mean.rest / step_ms)} of each {milliseconds(step_ms)} step"
    stands_out = mean.rest >= REST_STANDS_OUT * step_ms and mean.computation > 0
    advice = "check what the loop does between them, such as logging, copies and evaluation"
    if pause is not None and pause.mean_ms >= HALF * mean.rest:
        stands_out |= pause.mean_ms >= STANDS_OUT * step_ms
        advice = f"{milliseconds(pause.mean_ms)} of it is {pause.name}; {pause_advice(pause.name)}"
    sentence = (
        f"Time outside of the training passes is the bottleneck: {of_step} is not forward, backward, "
        f"optimizer, input or communication; {advice}."
    )
    return Finding("rest", mean.rest, sentence, (), stands_out)


def needless_search(trace: Trace, steps: Sequence[int]) -> Finding | None:
    """A finding if DDP searches for unused parameters although every recorded backward used all of them."""
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
        f"DDP runs with find_unused_parameters=True, but in the {len(steps)} recorded steps all {len(names)} parameters "
        "got gradients on every rank. Without it, DDP need not search the graph in each step and can rebuild its "
        "buckets in gradient order; turn it off if every step uses all parameters (Hugging Face: "
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
    """The verdict: the costliest finding that stands out, with a straggler named in addition.

    ``contradictions`` come first. If nothing stands out, waits for other ranks within noise are mentioned from
    ``REPORTED_NOISE`` of the step. ``silent`` says that ranks with a backend recorded no communication.
    """
    step_ms = mean.total_ms
    if step_ms <= 0:
        return "No diagnosis is possible: the recorded steps have no length."
    doubts = (
        [
            f"The trace contradicts itself: {'; '.join(contradictions)}. No rank is blamed for waits, and the rest of "
            "this diagnosis may be wrong; record again, or import only ranks of one recording."
        ]
        if contradictions
        else []
    )
    skewed = [finding.sentence for finding in findings if finding.cause == "clock_skew"]
    cheap = [finding.sentence for finding in findings if finding.cause == NEEDLESS_SEARCH]
    costly = [finding for finding in findings if finding.cause != NEEDLESS_SEARCH]
    return " ".join([*doubts, *skewed, _costliest(mean, costly, world_size, silent), *cheap])


def _costliest(mean: Breakdown, findings: Sequence[Finding], world_size: int, silent: bool) -> str:
    step_ms = mean.total_ms
    standing = [finding for finding in findings if finding.stands_out]
    if not standing:
        noise = [
            finding.sentence
            for finding in findings
            if finding.cause in ("straggler", "moving_imbalance")
            and finding.cost_ms >= REPORTED_NOISE * step_ms
        ]
        return " ".join([_nothing_stands_out(mean, step_ms, world_size, silent), *noise])
    first, *following = standing
    second = next((finding for finding in following if finding.cause == "straggler"), None)
    if second is None:
        return first.sentence
    share = percent(second.cost_ms / step_ms)
    also = f"; in addition, the other ranks wait for {listed(second.ranks)} for {share} of the step."
    return first.sentence.removesuffix(".") + also


def _late_together(stragglers: Sequence[Straggler], hosts: Mapping[int, str]) -> Sequence[Straggler]:
    """The worst straggler, or all ranks of its host if exactly these are late to a similar degree."""
    worst = stragglers[0]
    alike = [straggler for straggler in stragglers if straggler.cost_ms >= HALF * worst.cost_ms]
    on_host = {rank for rank, host in hosts.items() if host == hosts[worst.rank]}
    together = {straggler.rank for straggler in alike} == on_host != set(hosts)
    return alike if together else [worst]


def _straggler_sentence(
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
        who = f"The ranks of host {hosts[worst.rank]} ({listed([straggler.rank for straggler in late])}) are stragglers"
    it, its = ("them", "their") if several else ("it", "its")
    loss = of_each_step(lost_ms, step_ms)
    if worst.hidden_ms > worst.blame_ms:
        sentence = f"{who}: because of {it}, communication that all ranks wait for begins late by {loss}"
    else:
        sentence = f"{who}: the other ranks wait {loss} for {it}"
    if cause != UNKNOWN:
        part = _PART_WORDS[cause].replace("its", its, 1)
        sentence += f", because {part} takes longer before {'they arrive' if several else 'it arrives'}"
        if worst.own_ms > 1.05 * worst.others_ms:
            took, usual = milliseconds(worst.own_ms), milliseconds(worst.others_ms)
            sentence += f" ({took} per step, the others {usual})"
    else:
        sentence += (
            f"; {'they arrive' if several else 'it arrives'} last for a reason the trace does not show"
        )
    rest = [straggler for straggler in stragglers if straggler not in late]
    if rest:
        also = ", ".join(str(straggler.rank) for straggler in rest[:3])
        sentence += f"; rank{'s' if len(rest) > 1 else ''} {also} to a lesser degree"
    return f"{sentence}; {_ADVICE[cause]}."


def _nothing_stands_out(mean: Breakdown, step_ms: float, world_size: int, silent: bool) -> str:
    shares = {part: getattr(mean, part) / step_ms for part in _SHARE_WORDS}
    second = max(shares, key=lambda part: shares[part])
    if not mean.computation:
        return (
            "Nothing stands out in what was recorded. Computation was not recorded; it may be all of the "
            f"{percent(mean.rest / step_ms)} of each {milliseconds(step_ms)} step that is unaccounted for."
        )
    if silent:
        return (
            "Nothing stands out in what was recorded, but no communication was. Part of the computation, "
            f"{percent(mean.computation / step_ms)} of each {milliseconds(step_ms)} step, may be communication."
        )
    alone = " on the only rank" if world_size == 1 else ""
    follows = f", {_SHARE_WORDS[second]} {percent(shares[second])}" if shares[second] >= 0.01 else ""
    return (
        f"Nothing stands out: computation is {percent(mean.computation / step_ms)} of each {milliseconds(step_ms)} step"
        f"{alone}{follows}."
    )
