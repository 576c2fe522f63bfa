"""Local SGD's decision, what a rank holds, and a job of it over a time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from pydantic import ValidationError
from tests.interop.settings.plans import asked, meshed, with_passes
from tests.models import layered_model
from tests.planning.jobs import layered_job

from headway.cluster import Cluster, Host
from headway.errors import PlanError, UnsupportedError
from headway.graph.build import GraphBuilder
from headway.graph.computation import Computation, Item, Part, Point, Timeline
from headway.interop.settings.request import CollectiveOptions, SettingsRequest
from headway.interop.settings.tools import settings_for
from headway.job import Job
from headway.passes.accumulate import Accumulate
from headway.passes.precision import Precision
from headway.passes.recompute import Recompute
from headway.permission import LOCAL_STEPS
from headway.plan import Plan
from headway.plan.plan import PlannedModel
from headway.simulator.simulate import simulate
from headway.simulator.what_if import WhatIf
from headway.strategies.ddp.policy import DistributedDataParallelStrategy
from headway.strategies.partial_all_reduce.matrices import Consensus
from headway.strategies.registry import plugin_of
from headway_baselines.local_sgd.footprint import footprint
from headway_baselines.local_sgd.horizon import mean_spread, over_a_horizon
from headway_baselines.local_sgd.plugin import PLUGIN
from headway_baselines.local_sgd.policy import LocalSGDStrategy
from headway_baselines.local_sgd.schedule import OuterStep, PeriodicSchedule

STEP_NS = 10_000_000


def job(world_size: int, factors: dict[int, float] | None = None) -> Job:
    """Ranks whose steps take 10 ms and then 12 ms in turn, in the recorded order; each has a host of its own."""
    hosts = tuple(Host(name=f"h{i}", workers=1, up_gbps=1, down_gbps=1) for i in range(world_size))
    steps = tuple(
        Timeline(0, step, (Item(Part.FORWARD, "", STEP_NS + step * 2_000_000), Item(Point.STEP)))
        for step in range(2)
    )
    computation = Computation({0: steps}).scaled(1.0, factors or {})
    return Job((layered_model(3),), world_size, Cluster(hosts=hosts), computation)


def test_the_outer_step_has_diloco_s_defaults_and_only_where_it_is_asked_for() -> None:
    assert LocalSGDStrategy().outer is None
    assert LocalSGDStrategy(outer_optimizer="sgd").outer == OuterStep(0.7, 0.9, nesterov=True)
    assert LocalSGDStrategy(outer_optimizer="sgd", outer_momentum=0).outer == OuterStep(
        0.7, 0, nesterov=False
    )
    assert "DiLoCo" in LocalSGDStrategy(outer_optimizer="sgd").describe()
    schedule = LocalSGDStrategy(steps=4).decide(job(2))
    assert schedule == PeriodicSchedule(2, 4)
    assert [each for each in range(1, 13) if schedule.averages_after(each)] == [4, 8, 12]


@pytest.mark.parametrize(
    "options",
    [
        {"outer_momentum": 0.5},
        {"outer_optimizer": "sgd", "outer_momentum": 0, "nesterov": True},
        {"steps": 0},
    ],
)
def test_options_that_say_nothing_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"outer|steps"):
        LocalSGDStrategy(**options)


def test_ranks_meet_at_the_end_of_each_period_only() -> None:
    outcome = over_a_horizon(job(4, {3: 3.0}), PeriodicSchedule(4, 8))
    assert outcome.iterations == (40,) * 4
    period_ns = 3 * (4 * STEP_NS + 4 * 12_000_000)
    first, *_, last = outcome.groups
    took_ns = (last.end_ns - first.end_ns) / 5
    assert period_ns < took_ns < period_ns * 1.2
    assert outcome.step_ms == pytest.approx(took_ns / 8 / 1e6)
    assert outcome.forming_ns[3] == 0, "nobody is later"
    assert outcome.forming_ns[0] == pytest.approx(5 * period_ns * 2 / 3, rel=0.01)
    ends = [own[8] - own[7] for own in outcome.finished_ns]
    assert min(ends) > STEP_NS, "the average is between two periods"
    assert "trains otherwise" in outcome.describe()


def test_ranks_that_are_late_in_turn_wait_less_the_longer_a_period_is() -> None:
    fast, slow = (Timeline(0, 0, (Item(Part.FORWARD, "", STEP_NS * n),)) for n in (1, 5))
    steps = {rank: tuple(slow if turn == rank else fast for turn in range(4)) for rank in range(4)}
    four = job(4)
    of = Job((layered_model(3),), 4, four.cluster, Computation(steps))
    each, whole = (over_a_horizon(of, PeriodicSchedule(4, count)) for count in (1, 4))
    assert each.step_ms > 5 * STEP_NS / 1e6
    assert 2 * STEP_NS / 1e6 < whole.step_ms < 2.3 * STEP_NS / 1e6


def test_a_rank_alone_averages_with_nobody() -> None:
    outcome = over_a_horizon(job(1), PeriodicSchedule(1, 5))
    assert outcome.step_ms == pytest.approx(11.0, rel=0.01)
    assert outcome.standing_ms == 0


def test_how_far_apart_models_are_is_what_mixing_says() -> None:
    consensus, apart = Consensus(3), []
    for _ in range(4):
        apart.append(consensus.spread(range(3)))
        for rank in range(3):
            consensus.iterated(rank)
    assert mean_spread(PeriodicSchedule(3, 4)) == pytest.approx(sum(apart) / 4)
    assert mean_spread(PeriodicSchedule(3, 1)) == 0


def test_what_a_rank_holds() -> None:
    model = layered_model(3)
    plain = footprint(model, PeriodicSchedule(4, 8)).buffers_bytes
    assert plain == model.size_bytes
    outer = footprint(model, PeriodicSchedule(4, 8, outer=OuterStep(0.7, 0.9, nesterov=True))).buffers_bytes
    assert outer == 3 * model.size_bytes


def test_no_steps_are_laid_out() -> None:
    of, strategy = job(2), LocalSGDStrategy()
    with pytest.raises(UnsupportedError, match="DDP"):
        PLUGIN.reactions(GraphBuilder(of.on, strategy.decide(of)), of, strategy)


def test_periods_are_proposed_to_who_permits_steps_of_each_rank_s_own() -> None:
    of = job(2)
    assert {each.permission for each in PLUGIN.propose(of).strategies} == {LOCAL_STEPS}
    refused = replace(of, refusals={"local-sgd": "it is compiled"})
    assert PLUGIN.propose(refused).strategies == ()
    assert PLUGIN.propose(refused).about_permitted == LOCAL_STEPS
    assert PLUGIN.propose(job(1)).strategies == ()


def test_local_steps_help_where_all_reduces_show_and_hurt_where_they_hide() -> None:
    """Averages hide under nothing, however rare they are."""
    slow, hidden = (layered_job([2**20] * 8, communication=rate).job for rate in (3.0, 0.2))
    ddp_ms = [simulate(on, DistributedDataParallelStrategy(bucket_cap_mb=1)).step_ms for on in (slow, hidden)]
    assert over_a_horizon(slow, PeriodicSchedule(4, 8)).step_ms < 0.7 * ddp_ms[0]
    assert over_a_horizon(hidden, PeriodicSchedule(4, 1)).step_ms > ddp_ms[1]


@pytest.mark.parametrize("factors", [None, {1: 2.0}])
def test_better_is_never_slower_where_models_are_averaged_once_a_period(
    factors: dict[int, float] | None,
) -> None:
    of, strategy = job(4, factors), LocalSGDStrategy(steps=4)

    def iteration_ms(what_if: WhatIf) -> float:
        outcome = plugin_of(strategy).over_a_horizon(what_if.rewrite(of), strategy)
        assert outcome is not None
        return outcome.step_ms

    worse = WhatIf(bandwidth=0.01, latency=4, compute=2)
    better = [worse, replace(worse, bandwidth=0.1), replace(worse, latency=0.1), replace(worse, compute=0.5)]
    worst_ms, *better_ms = map(iteration_ms, better)
    assert all(ms <= worst_ms for ms in better_ms)


def test_its_steps_are_counted() -> None:
    model = PlannedModel(parameters=0, size_bytes=0, fingerprint="")
    passes = (Precision(dtype="float16"),)
    with pytest.raises(ValidationError, match="may skip a step"):
        Plan(mesh={"data": 2}, parallel={"data": LocalSGDStrategy()}, model=model, passes=passes)


def test_settings_are_torchs_own_and_say_what_they_leave_to_each_rank() -> None:
    whole = settings_for("ddp", asked("local-sgd", steps=8, buffers="local"))
    assert whole.complete
    assert "STEPS = 8 " in whole.files["ddp_settings.py"]
    less = settings_for("ddp", asked("local-sgd", outer_optimizer="sgd", moments="averaged"))
    assert [lack.split()[1] for lack in less.lacks] == ["outer", "optimizer's", "buffers"]
    for tool in ("fsdp2", "deepspeed", "megatron"):
        with pytest.raises(PlanError, match="no settings for this plan"):
            settings_for(tool, asked("local-sgd"))


def test_settings_have_passes_in_a_file_of_their_own() -> None:
    passes = (Recompute(modules=("0",)), Accumulate(micro_batches=2))
    found = settings_for("ddp", with_passes(*passes, name="local-sgd", buffers="local"))
    assert "def prepare(module)" in found.files["passes_settings.py"]
    assert "prepare() of passes_settings.py" in found.use
    assert [lack.partition(":")[0] for lack in found.lacks] == ["the pass accumulate"]


def test_settings_in_pipelines_say_that_their_order_is_not_its_own() -> None:
    plan = meshed(DistributedDataParallelStrategy()).plan
    plan = plan.model_copy(update={"parallel": {**plan.parallel, "data": LocalSGDStrategy(steps=4)}})
    assert any("order of micro-batches" in lack for lack in settings_for("ddp", SettingsRequest(plan)).lacks)


def test_nccl_is_left_to_choose() -> None:
    assert "nothing needs to be set" in settings_for("nccl", asked("local-sgd")).sentence()
    replayed = asked("local-sgd", collectives=CollectiveOptions(as_replayed=True))
    assert settings_for("nccl", replayed).environment["NCCL_ALGO"] == "allreduce:ring"
