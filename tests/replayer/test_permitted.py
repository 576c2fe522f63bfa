from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
from tests.replayer.test_replayer import as_bucketed, cluster_of, job
from tests.synthetic import events_of, synthetic_trace

from headway.errors import UnsupportedError
from headway.replayer.replayer import Replayer, recorded_job
from headway.scheduling.buckets import GATHER_MODES, GatherMode
from headway.strategies.ddp.policy import DistributedDataParallelStrategy
from headway.strategies.decoupled.plugin import permitted_forms
from headway.strategies.decoupled.policy import DecoupledStrategy
from headway.trace.events import Event, Events, Kind
from headway.trace.format import Trace

JOB = job(forward_ms=20, backward_ms=40, gbps=1.0)


def trace_of(*optimizers: str) -> Trace:
    """A job whose optimizers step in turn."""
    ranks = events_of(JOB)
    for rows in ranks.values():
        steps = [row for row in rows if row.kind == Kind.OPTIMIZER]
        rows[:] = [row for row in rows if row.kind != Kind.OPTIMIZER]
        rows += [
            row._replace(name=name) for row, name in zip(steps, itertools.cycle(optimizers), strict=False)
        ]
    base = as_bucketed(synthetic_trace(JOB))
    return replace(base, events={rank: Events.from_rows(rows) for rank, rows in ranks.items()})


def permitted(trace: Trace) -> tuple[Sequence[GatherMode], str]:
    return permitted_forms(recorded_job(trace, cluster_of(JOB)))


@pytest.mark.parametrize(
    ("names", "forms", "said"),
    [
        (("SGD", "AdamW"), GATHER_MODES, ""),
        (("SGD", "Adafactor"), ("gradients",), "Adafactor needs whole gradients"),
        (("SGD", "LBFGS"), (), "LBFGS may read all gradients"),
        (("own.AdamW",), (), "own.AdamW may read"),
    ],
)
def test_what_the_recorded_optimizers_permit(
    names: tuple[str, ...], forms: tuple[str, ...], said: str
) -> None:
    found, note = permitted(trace_of(*names))
    assert found == forms
    assert note.startswith(said)


def again(rows: Events) -> Iterator[Event]:
    """A backward and an update more behind each update."""
    for row in rows.of_kind(Kind.OPTIMIZER):
        yield row._replace(kind=Kind.BACKWARD_PASS, start_ns=row.end_ns, duration_ns=0)
        yield row._replace(start_ns=row.end_ns + 1, duration_ns=0)


def test_no_plan_gathers_parameters_where_several_optimizers_step_in_turn() -> None:
    trace = trace_of("SGD")
    twice = {
        rank: Events.from_rows([*rows, *rows.of_kind(Kind.OPTIMIZER)]) for rank, rows in trace.events.items()
    }
    found, note = permitted(replace(trace, events=twice))
    assert found == ("gradients",)
    assert note.startswith("several optimizers step in turn")
    apart = {rank: Events.from_rows([*rows, *again(rows)]) for rank, rows in trace.events.items()}
    assert permitted(replace(trace, events=apart))[0] == GATHER_MODES, "each behind a backward of its own"


def test_what_the_decoupled_wrapper_refuses_is_not_offered() -> None:
    trace = trace_of("AdamW")
    infos = [
        info.model_copy(update={"refusals": {"decoupled": "static_graph=True"}})
        for info in trace.manifest.ranks
    ]
    refusing = replace(trace, manifest=trace.manifest.model_copy(update={"ranks": tuple(infos)}))
    assert permitted(refusing) == ((), "static_graph=True, so decoupled plans are left out")


def test_a_plan_is_predicted_as_the_optimizers_have_it_run() -> None:
    replayer = Replayer(trace_of("Adafactor"), cluster_of(JOB))
    gradients, parameters = (
        replayer.replay(DecoupledStrategy(bucket_cap_bytes=2**19, gather=form)).step_ms
        for form in GATHER_MODES[::-1]
    )
    assert parameters == gradients
    freely = Replayer(trace_of("AdamW"), cluster_of(JOB))
    assert freely.replay(DecoupledStrategy(bucket_cap_bytes=2**19)).step_ms != gradients


def test_a_plan_that_would_not_overlap_is_refused() -> None:
    replayer = Replayer(trace_of("LBFGS"), cluster_of(JOB))
    with pytest.raises(UnsupportedError, match="LBFGS may read all gradients"):
        replayer.replay(DecoupledStrategy())
    assert replayer.replay(DistributedDataParallelStrategy(bucket_cap_mb=1)).step_ms > 0
