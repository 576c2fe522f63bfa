"""Pipelines in the graph: step times held against closed forms and a plain event loop."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from fractions import Fraction

import pytest

from headway.cluster import Cluster, Host
from headway.graph.build import GraphBuilder
from headway.graph.computation import Item, Part, Timeline
from headway.graph.step_layout import lay_out_ranks
from headway.scheduling.pipeline.orders import (
    eager_one_forward_one_backward,
    gpipe,
    grouped,
    interleaved,
    one_forward_one_backward,
    zero_bubble,
)
from headway.scheduling.pipeline.schedule import Action, Pass, PipelineSchedule
from headway.simulation.engine import play
from headway.strategies.pipeline.layout import PipelineLayout

UNIT_NS = 1_000_000
UNITS = {Pass.FORWARD: 1, Pass.BACKWARD: 2}


def a_cluster(ranks: int, *, latency: float = 0.0, gbps: float = 1e6) -> Cluster:
    hosts = tuple(Host(name=f"h{r}", workers=1, up_gbps=gbps, down_gbps=gbps) for r in range(ranks))
    # The models that it is held against let receives be posted while something is sent.
    return Cluster(hosts=hosts, latency_us=latency * UNIT_NS / 1e3, library="nccl")


def timelines(schedule: PipelineSchedule, units: dict[Pass, float]) -> list[list[Timeline]]:
    """A step of every rank, recorded in some order: which one is not what counts."""
    ranks = []
    for rank, actions in enumerate(gpipe_like(schedule)):
        items = tuple(
            Item(
                Part.FORWARD if kind is Pass.FORWARD else Part.BACKWARD,
                duration_ns=round(units[kind] * UNIT_NS),
                stage=stage,
                micro_batch=m,
            )
            for kind, stage, m in actions
        )
        ranks.append([Timeline(rank, 0, items)])
    return ranks


def gpipe_like(schedule: PipelineSchedule) -> list[list[Action]]:
    return [
        [
            Action(kind, stage, m)
            for kind in (Pass.FORWARD, Pass.BACKWARD)
            for stage in sorted({action.stage for action in actions})
            for m in range(schedule.micro_batches)
        ]
        for actions in schedule.ranks
    ]


def step_units(
    schedule: PipelineSchedule,
    cluster: Cluster,
    size_bytes: int = 0,
    units: dict[Pass, float] | None = None,
    receive_buffers: int = 100,
) -> float:
    schedule = replace(schedule, receive_buffers=receive_buffers)
    graph = GraphBuilder(cluster, schedule)
    layout = PipelineLayout(graph, schedule, (size_bytes,) * (schedule.stages - 1))
    lay_out_ranks(graph, layout, timelines(schedule, units or dict(UNITS)))
    return float(play(graph.close()).end_ns.max()) / UNIT_NS


@pytest.mark.parametrize(
    ("latency", "expected"),
    [(0.5, (71, 60, 60, 60, 60)), (1, (85, 63, 63, 63, 63)), (2, (113, 74, 69, 69, 75))],
)
def test_latency_as_another_simulator_has_it(latency: float, expected: tuple[float, ...]) -> None:
    """Four stages, sixteen micro-batches: k = 1, 2, 4, 8, and eager 1F1B."""
    schedules = [*(grouped(4, 16, k) for k in (1, 2, 4, 8)), eager_one_forward_one_backward(4, 16)]
    cluster = a_cluster(4, latency=latency)
    assert [step_units(each, cluster) for each in schedules] == pytest.approx(expected, abs=1e-3)


def test_a_busy_link() -> None:
    """A message takes its link for 1.5 units: where activations and gradients never meet, as another simulator says.

    That one has a link for each pair of stages, where hosts here have one for both neighbours: so groups, which send
    both ways at a time, take longer here.
    """
    size_bytes = 10**6
    cluster = a_cluster(4, gbps=size_bytes * 8 / (1.5 * UNIT_NS))
    assert step_units(gpipe(4, 16), cluster, size_bytes) == pytest.approx(73.5, abs=1e-3)
    assert step_units(grouped(4, 16, 2), cluster, size_bytes) > 68


def test_groups_help_over_latency_and_hurt_where_a_link_is_busy() -> None:
    """What large groups send both ways at a time shares a host's link."""
    size_bytes = 10**6
    far, busy = a_cluster(4, latency=1.0), a_cluster(4, gbps=size_bytes * 8 / (1.5 * UNIT_NS))
    assert step_units(grouped(4, 16, 2), far) < 0.9 * step_units(grouped(4, 16, 1), far)
    of_four, of_eight = (step_units(grouped(4, 16, k), busy, size_bytes) for k in (4, 8))
    assert of_eight > 1.02 * of_four


def test_the_closed_form_where_groups_hide_latency() -> None:
    """(M + S - 1)(tf + tb) + 2 (S - 1) c as long as c is at most (k - 1) min(tf, tb)."""
    for stages, k, latency in itertools.product((2, 3, 4), (2, 3, 4), (0.25, 1.0, 2.0, 3.0)):
        if latency > k - 1:
            continue
        micro_batches = 4 * k
        expected = (micro_batches + stages - 1) * 3 + 2 * (stages - 1) * latency
        found = step_units(grouped(stages, micro_batches, k), a_cluster(stages, latency=latency))
        assert found == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize("seed", range(3))
def test_against_a_plain_event_loop(seed: int) -> None:
    """Random schedules, times, latencies and rates; receives that are posted late make senders wait."""
    draw = random.Random(seed)
    for _ in range(60):
        stages, micro_batches = draw.randint(1, 4), draw.randint(1, 6)
        schedules = [
            grouped(stages, micro_batches, draw.randint(1, micro_batches)),
            eager_one_forward_one_backward(stages, micro_batches),
            zero_bubble(stages, micro_batches),
        ]
        # With more stages hosts have one link for two neighbours, which the loop knows nothing of.
        message = draw.choice([0.0, 0.5, 1.5]) if stages == 2 else 0.0
        if not message:
            schedules.append(interleaved(stages, 2, micro_batches * stages))
        schedule = draw.choice(schedules)
        latency, ahead = draw.choice([0.0, 0.5, 1.25, 4.0]), draw.randint(1, 4)
        units: dict[Pass, float] = {Pass.FORWARD: draw.choice([1, 2]), Pass.BACKWARD: draw.choice([1, 2, 4])}
        size_bytes = 10**6 if message else 0
        gbps = size_bytes * 8 / (message * UNIT_NS) if message else 1e6
        cluster = a_cluster(len(schedule.ranks), latency=latency, gbps=gbps)
        found = step_units(schedule, cluster, size_bytes, units, ahead)
        expected = looped(schedule, Fraction(latency), Fraction(message), units, ahead)
        assert found == pytest.approx(float(expected), abs=1e-3)


def looped(
    schedule: PipelineSchedule, latency: Fraction, message: Fraction, units: dict[Pass, float], ahead: int
) -> Fraction:
    """The end of a step, by going through everybody's actions again and again until all are known."""
    lasts = {kind: Fraction(value) for kind, value in units.items()}
    lasts[Pass.INPUT_GRADIENT] = lasts[Pass.WEIGHT_GRADIENT] = lasts[Pass.BACKWARD] / 2
    begins: dict[Action, Fraction] = {}
    ends: dict[Action, Fraction] = {}
    arrives: dict[Action, Fraction] = {}
    queues = [
        posts(schedule, sender, receiver, ahead)
        for sender, receiver in itertools.permutations(range(len(schedule.ranks)), 2)
    ]
    remote = {(need, action) for queue in queues for need, action, _ in queue}
    while len(ends) < sum(map(len, schedule.ranks)):
        known = len(ends) + len(arrives)
        for actions in schedule.ranks:
            free = Fraction(0)
            for action in actions:
                if action not in ends:
                    needs = [
                        (arrives if (need, action) in remote else ends).get(need)
                        for need in schedule.needs(action)
                    ]
                    if None in needs:
                        break
                    begins[action] = max(free, *(each or Fraction(0) for each in needs), Fraction(0))
                    ends[action] = begins[action] + lasts[action.kind]
                free = ends[action]
        for queue in queues:
            link_free = Fraction(0)
            for need, _, post in queue:
                posted = Fraction(0) if post is None else begins.get(post)
                if need not in ends or posted is None:
                    break
                link_free = max(link_free, ends[need], posted) + message
                arrives[need] = link_free + latency
        assert len(ends) + len(arrives) > known
    return max(ends.values())


def posts(
    schedule: PipelineSchedule, sender: int, receiver: int, ahead: int
) -> list[tuple[Action, Action, Action | None]]:
    """What one rank sends another, in order: what of, who needs it, and at whose begin its receive is posted."""
    users = {
        need: action
        for action in schedule.ranks[receiver]
        for need in schedule.needs(action)
        if need.stage != action.stage and schedule.rank_of_stage[need.stage] == sender
    }
    sent = [need for need in schedule.ranks[sender] if need in users]
    order = [action for action in schedule.ranks[receiver] if action in users.values()]
    assert [users[need] for need in sent] == order, "needed in the order in which they are sent"
    return [
        (need, users[need], None if index < ahead else order[index - ahead])
        for index, need in enumerate(sent)
    ]


def test_several_steps_follow_each_other() -> None:
    """Each rank begins its next step when its own is over."""
    schedule = one_forward_one_backward(2, 4)
    graph = GraphBuilder(a_cluster(2), schedule)
    steps = [[own[0], own[0]] for own in timelines(schedule, dict(UNITS))]
    lay_out_ranks(graph, PipelineLayout(graph, schedule, (10,)), steps)
    ends = play(graph.close()).end_ns
    lengths = [ends[graph.boundaries[1][rank]] - ends[graph.boundaries[0][rank]] for rank in range(2)]
    assert lengths[0] / UNIT_NS == pytest.approx(15, abs=0.01)
    assert gpipe(2, 4).transfers == 8
