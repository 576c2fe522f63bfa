from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.exhaustive import examples
from tests.graph.event_loop import Workers, paired_first_come
from tests.graph.pairing import PairedTraining, step_ends_ns
from tests.graph.throughput import steps_finished, steps_per_s

from headway.graph.deciding import Decision
from headway.simulation import engine, kernel
from headway.simulation.deciding import DeadlockError

PLAYERS = pytest.mark.parametrize(
    "simulate", [kernel.simulate, engine._compiled()], ids=["plain", "compiled"]
)


@st.composite
def drawn_workers(draw: st.DrawFn) -> Workers:
    """Ranks of different speeds, links and numbers of steps, one of them slow; some compute for equal times."""
    ranks = draw(st.integers(2, 6))
    step_ns = st.integers(1, 5) | st.integers(1, 10**6)
    slow = draw(st.integers(0, ranks - 1))
    compute_ns = []
    for rank in range(ranks):
        factor = draw(st.integers(2, 9)) if rank == slow else 1
        compute_ns.append(tuple(factor * each for each in draw(st.lists(step_ns, min_size=1, max_size=6))))
    gbps = st.sampled_from([0.5, 1.0, 2.5, 10.0])
    up, down = (tuple(draw(st.lists(gbps, min_size=ranks, max_size=ranks))) for _ in range(2))
    return Workers(tuple(compute_ns), up, down, draw(st.integers(0, 50_000)), 2 * draw(st.integers(0, 10**5)))


@PLAYERS
@pytest.mark.parametrize("ahead", [True, False], ids=["laid out before", "growing"])
@settings(deadline=None, max_examples=examples(150))
@given(workers=drawn_workers())
def test_workers_that_pair_as_they_come_take_the_times_of_a_plain_event_loop(
    simulate: Callable[..., kernel.PlayState], ahead: bool, workers: Workers
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "simulate_for", lambda _count: simulate)
        training = PairedTraining(workers, ahead=ahead)
        played = training.play()
        again = PairedTraining(workers, ahead=ahead).play()
    assert step_ends_ns(training, played) == paired_first_come(workers)
    assert played.start_ns.tolist() == again.start_ns.tolist()
    assert played.end_ns.tolist() == again.end_ns.tolist()


STEADY = Workers(((1000,) * 50, (1000,) * 50, (5000,) * 50), (10.0,) * 3, (10.0,) * 3, 0, 0)


def test_throughput_counts_the_steps_that_each_rank_finishes_in_a_time() -> None:
    training = PairedTraining(STEADY, ahead=False)
    until_ns = 20_000
    played = training.play(until_ns=until_ns)
    ends_ns = paired_first_come(STEADY)
    expected = tuple(sum(end_ns <= until_ns for end_ns in own) for own in ends_ns)
    assert steps_finished(training.graph.boundaries, played, until_ns - 1) == tuple(
        sum(end_ns < until_ns for end_ns in own) for own in ends_ns
    )
    assert expected[0] > expected[2]
    early = sum(end_ns <= 10_000 for own in ends_ns for end_ns in own)
    late = sum(end_ns < until_ns for own in ends_ns for end_ns in own)
    rate = steps_per_s(training.graph.boundaries, played, 10_000, until_ns - 1)
    assert rate == pytest.approx((late - early) / 9_999e-9)


def test_ranks_that_nobody_lets_go_on_are_named() -> None:
    class Forgetful(PairedTraining):
        def decide(self, now_ns: int, asked: Sequence[Decision]) -> None:
            super().decide(now_ns, [each for each in asked if (each.rank, each.step) != (2, 1)])

    workers = Workers(((10, 10), (10, 10), (25, 10)), (1.0,) * 3, (1.0,) * 3, 0, 0)
    with pytest.raises(
        DeadlockError, match=r"the decider lets no rank continue: .*rank 2 since 35 ns \(step 1, arrived\)"
    ):
        Forgetful(workers, ahead=True).play()
