"""The tuner of pipelines, told of steps that are played on networks that are known."""

from __future__ import annotations

import pytest
from tests.strategies.pipeline.tuning.simulated import followed

from headway.cluster import Cluster, Host, SlowPath
from headway.graph.computation import Computation, Item, Part, Timeline
from headway.job import Job
from headway.model import ModelSpec
from headway.strategies.pipeline.policy import PipelineStrategy
from headway.strategies.pipeline.tuning.follower import decision_document, decision_from
from headway.strategies.pipeline.tuning.observed import Columns
from headway.strategies.pipeline.tuning.tuner import PlayedSteps, Tuner, candidates_of, step_times_ms

RANKS, MICRO_BATCHES, BOUNDARY_BYTES = 4, 8, 2**20
FOLLOWING = PipelineStrategy(
    order="kfkb", group_sizes=(2, 4), other_orders=("zero-bubble",), micro_batches=MICRO_BATCHES
)
CANDIDATES = candidates_of(FOLLOWING)
SLOW = SlowPath(source="host1", target="host2", gbps=0.1)
NETWORKS = {"fast": (1.0, ()), "slow": (0.15, ()), "very slow": (0.08, ()), "one slow path": (1.0, (SLOW,))}


def job(gbps: float, paths: tuple[SlowPath, ...] = ()) -> Job:
    """One step of stages that take 40 and 80 ms."""
    hosts = tuple(Host(name=f"host{n}", workers=1, up_gbps=gbps, down_gbps=gbps) for n in range(RANKS))
    parts = ((Part.FORWARD, 40_000_000), (Part.BACKWARD, 80_000_000))
    timelines = {
        rank: (
            Timeline(
                rank, 0,
                (
                    Item(Part.REST, duration_ns=5_000_000),
                    *(
                        Item(part, duration_ns=took_ns, stage=rank, micro_batch=number)
                        for part, took_ns in parts
                        for number in range(MICRO_BATCHES)
                    ),
                ),
            ),
        )
        for rank in range(RANKS)
    }  # fmt: skip
    return Job(
        stages=(ModelSpec(parameters=()),) * RANKS,
        world_size=RANKS,
        cluster=Cluster(hosts=hosts, latency_us=100, paths=paths),
        computation=Computation(timelines),
        boundary_bytes=(BOUNDARY_BYTES,) * (RANKS - 1),
    )


def tuner() -> Tuner:
    return Tuner(CANDIDATES, (BOUNDARY_BYTES,) * (RANKS - 1))


def times_ms(on: Job) -> list[float]:
    return [step_times_ms(on, each.schedule_of(RANKS))[0] for each in CANDIDATES]


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("candidate", range(len(CANDIDATES)))
def test_one_step_under_any_order_foretells_all_of_them(network: str, candidate: int) -> None:
    on = job(*NETWORKS[network])
    step = PlayedSteps(on, CANDIDATES[candidate].schedule_of(RANKS)).observed(0, candidate)
    decision = tuner().after(step).latest
    assert decision is not None
    assert decision.predicted_ms == pytest.approx(times_ms(on), rel=0.02)
    assert decision.measured_ms == pytest.approx(times_ms(on)[candidate], rel=0.01)


def test_links_are_seen_each_in_its_direction() -> None:
    on = job(*NETWORKS["one slow path"])
    decision = tuner().after(PlayedSteps(on, CANDIDATES[0].schedule_of(RANKS)).observed(0, 0)).latest
    assert decision is not None
    assert decision.links_gbps[1, 2] == pytest.approx(0.1, rel=0.05)
    assert decision.links_gbps[2, 1] > 0.8


def test_the_order_follows_the_network() -> None:
    """Two steps after a change the order is the best for it, and there it stays."""
    phases = ["slow"] * 6 + ["one slow path"] * 6 + ["slow"] * 6
    steps = list(followed(tuner(), (job(*NETWORKS[each]) for each in phases)))
    best = {name: times_ms(job(*NETWORKS[name])) for name in set(phases)}
    for number, (phase, step) in enumerate(zip(phases, steps, strict=True)):
        if number >= 2 and phases[number - 2] == phase:
            assert step.time_ms <= 1.01 * min(best[phase]), (number, phase, step)
    assert sum(step.decision.switches for step in steps) == 3 + 3  # the step that goes by is told of the same
    assert "the network changed" in steps[6].decision.reason


def test_a_gain_that_is_not_worth_a_switch_is_left() -> None:
    two = Tuner((CANDIDATES[1], CANDIDATES[2]), (BOUNDARY_BYTES,) * (RANKS - 1))
    on = job(*NETWORKS["fast"])
    decision = two.after(PlayedSteps(on, CANDIDATES[1].schedule_of(RANKS)).observed(0, 0)).latest
    assert decision is not None
    assert not decision.switches
    assert abs(decision.predicted_ms[1] / decision.predicted_ms[0] - 1) < 0.01


def test_the_same_is_decided_about_the_same() -> None:
    phases = [job(*NETWORKS[each]) for each in ("slow", "fast", "very slow", "very slow")]
    assert list(followed(tuner(), phases)) == list(followed(tuner(), phases))


def test_steps_and_decisions_travel_unchanged() -> None:
    schedule = CANDIDATES[1].schedule_of(RANKS)
    step = PlayedSteps(job(*NETWORKS["slow"]), schedule).observed(7, 1)
    for rank, own in enumerate(step.ranks):
        columns = Columns(schedule, rank)
        row = columns.row(7, 1, own)
        assert len(row) == columns.length
        assert columns.step([*row, 0, 0, 0]) == own
    decision = tuner().after(step).latest
    assert decision is not None
    assert decision_from(decision_document(decision)) == decision


def test_only_groups_have_other_sizes() -> None:
    with pytest.raises(ValueError, match="group_sizes is an option of the order kfkb"):
        PipelineStrategy(order="gpipe", group_sizes=(2,))
    with pytest.raises(ValueError, match="other_orders is an option of the order kfkb"):
        PipelineStrategy(order="gpipe", other_orders=("zero-bubble",))
    assert "following the network" in FOLLOWING.describe()
