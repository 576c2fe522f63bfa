"""Graphs in GOAL, read back and played by rules of their own."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.graph.goal_player import ends_ns, parse
from tests.replayer.test_folding import STRATEGIES
from tests.replayer.test_replayer import as_bucketed, job
from tests.synthetic import synthetic_trace

from headway.cluster import AlgorithmCost, Cluster, Host
from headway.collectives.algorithms import RING
from headway.errors import UserError
from headway.graph import goal
from headway.replayer.replayer import Replayer
from headway.simulation.engine import play
from headway.strategies.base import Strategy
from headway.strategies.decoupled.policy import DecoupledStrategy


def instant(world_size: int) -> Cluster:
    """Links that cost next to nothing."""
    hosts = tuple(Host(name=f"h{rank}", workers=1, up_gbps=1e6, down_gbps=1e6) for rank in range(world_size))
    return Cluster(hosts=hosts, latency_us=0)


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda one: one.describe())
def test_it_plays_as_the_graph_does_where_links_cost_nothing(
    tmp_path: Path, strategy: Strategy, world_size: int
) -> None:
    replayer = Replayer(
        as_bucketed(synthetic_trace(job(world_size=world_size, slow={(0, "forward"): 5.0}))),
        instant(world_size),
    )
    graph, dataflow = replayer.lay_out(strategy)
    count = goal.GoalWriter(graph, dataflow).write(tmp_path / "out.goal")
    text = (tmp_path / "out.goal").read_text()
    assert count == len(parse(text))
    ends, played = ends_ns(text), play(dataflow).end_ns
    for rank, operation in ((span.rank, span.operation) for span in graph.spans):
        # Links of a million Gb/s still take some microseconds for all messages.
        assert ends[rank, f"o{operation}"] == pytest.approx(int(played[operation]), abs=20_000)
    messages = [one for one in parse(text).values() if one.what == "send"]
    assert bool(messages) is (world_size > 1)


def test_long_computation_is_cut_into_what_can_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replayer = Replayer(as_bucketed(synthetic_trace(job())), instant(2))
    graph, dataflow = replayer.lay_out()
    goal.GoalWriter(graph, dataflow).write(tmp_path / "whole.goal")
    monkeypatch.setattr(goal, "LONGEST_NS", 1_000_000)
    goal.GoalWriter(graph, dataflow).write(tmp_path / "cut.goal")
    whole, cut = (ends_ns((tmp_path / name).read_text()) for name in ("whole.goal", "cut.goal"))
    assert len(cut) > len(whole)
    assert {label: cut[label] for label in whole} == whole


def test_what_goes_on_at_the_same_time_has_processors_of_its_own(tmp_path: Path) -> None:
    """Simulators do one thing at a time on each, and an update of one bucket does not wait for that of another."""
    strategy = DecoupledStrategy(bucket_cap_bytes=1, gather="parameters", channels=2)
    cost = AlgorithmCost(overhead_us=7, message_us=3, message_cpu_us=3)
    cluster = instant(2).model_copy(update={"algorithms": {RING: cost}})
    replayer = Replayer(as_bucketed(synthetic_trace(job(world_size=2))), cluster)
    graph, dataflow = replayer.lay_out(strategy)
    goal.GoalWriter(graph, dataflow).write(tmp_path / "out.goal")
    lines = [line for line in (tmp_path / "out.goal").read_text().splitlines() if " cpu " in line]
    own = {line.partition(":")[0]: int(line.rpartition(" ")[2]) for line in lines}
    updates = {work.bucket: own[f"o{work.operation}"] for work in graph.works}
    sends = {own[line.partition(":")[0]] for line in lines if ": send " in line}
    receipts = {own[line.partition(":")[0]] for line in lines if ": recv " in line}
    costs = {
        own[line.partition(":")[0]] for line in lines if ": calc 7000 " in line or ": calc 3000 " in line
    }
    main = {own[f"o{span.operation}"] for span in graph.spans}
    assert (main, costs) == ({goal.MAIN}, {goal.COSTS})
    assert len(updates) > 1
    assert len(set(updates.values())) == len(updates)
    assert len(sends) == len(receipts) == min(goal.APART, len(graph.collectives))
    groups = (main, costs, set(updates.values()), sends, receipts)
    assert len(set.union(*groups)) == sum(map(len, groups))


def test_processors_are_no_more_than_a_byte_can_tell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    strategy = DecoupledStrategy(bucket_cap_bytes=1, gather="gradients", channels=2)
    replayer = Replayer(as_bucketed(synthetic_trace(job(world_size=2))), instant(2))
    graph, dataflow = replayer.lay_out(strategy)
    monkeypatch.setattr(goal, "APART", 3)
    assert len(graph.collectives) > goal.APART
    goal.GoalWriter(graph, dataflow).write(tmp_path / "out.goal")
    found = {int(each) for each in re.findall(r" tag \d+ cpu (\d+)", (tmp_path / "out.goal").read_text())}
    assert found == set(range(goal.SENDING, goal.SENDING + 2 * goal.APART))
    assert goal.UPDATES + 3 * 80 <= 256


def test_what_nobody_can_read_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(goal, "MAX_OPERATIONS", 10)
    with pytest.raises(UserError, match="too large for GOAL"):
        goal.GoalWriter(*Replayer(as_bucketed(synthetic_trace(job())), instant(2)).lay_out())
