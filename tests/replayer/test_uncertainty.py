"""What is said of answers that are worth little."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.replayer.test_replayer import as_bucketed, cluster_of, job
from tests.synthetic import synthetic_trace

from headway.cluster import AlgorithmCost
from headway.collectives.algorithms import GLOO_ALL_REDUCE
from headway.replayer.replayer import Replayer
from headway.simulator.expectation import doubts


def test_steps_that_stand_out_are_named() -> None:
    steady = {step: 70.0 + step / 10 for step in range(5, 25)}
    assert doubts(steady, 0.0) == ()
    (said,) = doubts({**steady, 12: 770.0}, 0.0)
    assert said.startswith(
        "1 of 20 recorded steps took more than 2 times the median (step 12: 770.0 ms, median: 71."
    )


def test_costs_that_do_not_fit_what_was_measured_are_named() -> None:
    assert doubts({0: 1.0}, 0.2) == ()
    (said,) = doubts({0: 1.0}, 0.657)
    assert "by 66% in the median" in said


@pytest.mark.parametrize("missed", [0.0, 0.5])
def test_a_replay_notes_them(missed: float) -> None:
    cost = AlgorithmCost(fit_error=missed)
    cluster = cluster_of(job()).model_copy(update={"algorithms": {GLOO_ALL_REDUCE: cost}})
    trace = as_bucketed(synthetic_trace(replace(job(), steps=4)))
    assert len(Replayer(trace, cluster).notes) == (missed > 0)
