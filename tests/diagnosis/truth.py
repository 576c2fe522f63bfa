"""What is planted in a synthetic job costs, and what the diagnosis says of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tests.synthetic import SyntheticJob, synthetic_trace

from headway.diagnosis import Diagnosis, diagnose
from headway.diagnosis.findings import Finding
from headway.trace.events import Kind
from headway.trace.format import Trace

JOB = SyntheticJob(steps=30, jitter=0.05)
"""A healthy job, noisy enough that nothing is exact."""


def planted_ms(job: SyntheticJob, **without: Any) -> float:
    """By how much a mean step would be shorter ``without``: the same job, with the same noise, runs again."""
    return _step_ms(job) - _step_ms(replace(job, **without))


def found_in(job: SyntheticJob) -> Diagnosis:
    """The diagnosis of a job."""
    return diagnose(synthetic_trace(job))


def standing(diagnosis: Diagnosis) -> list[str]:
    """The causes that stand out, the costliest first."""
    return [one.cause for one in diagnosis.findings if one.stands_out]


def only_finding(diagnosis: Diagnosis, cause: str) -> Finding:
    """The finding of this cause, which is the only one that stands out and is told in the verdict."""
    (found,) = [one for one in diagnosis.findings if one.stands_out]
    assert found.cause == cause
    assert diagnosis.verdict.endswith(found.sentence)
    return found


def check_findings(trace: Trace, diagnosis: Diagnosis) -> None:
    """What holds of the findings of any trace."""
    assert [one.stands_out for one in diagnosis.findings] == sorted(
        (one.stands_out for one in diagnosis.findings), reverse=True
    )
    for one in diagnosis.findings:
        assert 0 <= one.cost_ms <= diagnosis.step_ms
        assert one.sentence.isprintable()
        assert one.sentence.endswith((".", "…"))
        assert set(one.ranks) <= set(trace.events) | {info.rank for info in trace.manifest.ranks}
    costs = [one.cost_ms for one in diagnosis.findings if one.stands_out]
    assert costs == sorted(costs, reverse=True)
    causes = [one.cause for one in diagnosis.findings]
    assert len(causes) == len(set(causes))


def _step_ms(job: SyntheticJob) -> float:
    trace = synthetic_trace(job)
    lengths = [events.of_kind(Kind.STEP).duration_ns.mean() / 1e6 for events in trace.events.values()]
    return float(sum(lengths) / len(lengths))
