"""What plug-ins of other packages may say, beyond what the page's package does."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import pytest
from tests.synthetic import synthetic_trace, trace_of

from headway.compression import registry as codec_registry
from headway.compression.cast import Cast
from headway.errors import TraceError, UnsupportedError, UserError
from headway.ext import (
    ALL_REDUCE,
    BucketSchedule,
    Codec,
    Exchange,
    Footprint,
    Gradients,
    GraphBuilder,
    InRecordedOrder,
    Job,
    MeasuredEffect,
    MeasuredPass,
    Part,
    Pass,
    Permission,
    RankCursor,
    Reduced,
    Reduction,
    Sent,
    Strategy,
    StrategyPlugin,
    make_buckets,
    whole,
)
from headway.ext.testing import (
    check_codec,
    check_feedback,
    check_pass,
    check_strategy,
    check_training,
    example_job,
)
from headway.graph.computation import Computation, Timeline
from headway.measuring.passes import pass_of
from headway.passes.registry import passes
from headway.permission import permitted
from headway.plan.permissions import check_allowed, permissions
from headway.plugins import WARNED_VARIABLE
from headway.replayer.fidelity import check_fidelity
from headway.simulator.simulate import simulate
from headway.strategies import registry
from headway.strategies.ddp.policy import DistributedDataParallelStrategy
from headway.trace.events import Event, Kind, Stream
from headway.trace.format import Trace

LATE = Permission("late-gradients", "gradients of some buckets are carried to a later step")


class Alternate(Strategy):
    """One bucket in each of ``period`` steps."""

    name: ClassVar[str] = "alternate"
    declared_permissions: ClassVar[tuple[Permission, ...]] = (LATE,)

    period: int = 3

    def decide(self, job: Job) -> BucketSchedule:
        parameters = job.model.ready_parameters()
        last = self.period - 1
        groups = [*([one] for one in parameters[:last]), parameters[last:]]
        return BucketSchedule(make_buckets([[whole(one) for one in group] for group in groups], job.model))

    @property
    def repeats_after(self) -> int:
        return self.period

    @property
    def changes_training(self) -> str:
        return "gradients are late"

    @property
    def permission(self) -> str:
        return LATE.name

    def describe(self) -> str:
        return f"alternate {self.period}"


class _Layout(InRecordedOrder):
    def __init__(self, graph: GraphBuilder[BucketSchedule], period: int) -> None:
        super().__init__(graph)
        self._period = period

    def ready(self, cursor: RankCursor, parameter: str) -> None:
        pass

    def backward_end(self, cursor: RankCursor) -> None:
        graph, index = self._graph, cursor.step % self._period
        size_bytes = graph.schedule.buckets[index].size_bytes
        selection = graph.selection_of(ALL_REDUCE, size_bytes)
        number = graph.launch(cursor, ALL_REDUCE, 0, size_bytes, bucket=index, selection=selection)
        graph.wait(cursor, "gradients", number)
        graph.compute(cursor, Part.FINALIZE, 0)


class _Plugin(StrategyPlugin[Alternate]):
    policy = Alternate

    def reactions(self, graph: GraphBuilder[BucketSchedule], job: Job, strategy: Alternate) -> _Layout:
        return _Layout(graph, strategy.period)

    def footprint(self, job: Job, schedule: BucketSchedule, stage: int) -> Footprint:
        return Footprint(job.model.size_bytes, 0, True, 1.0)

    def wrap(self, module: Any, strategy: Alternate, **ddp_options: Any) -> Any:
        raise NotImplementedError


class Eighth(Codec):
    """All as it is, for a permission of its own."""

    name: ClassVar[str] = "eighth"
    codec: Literal["eighth"] = "eighth"

    def exchanges(self, shapes: Any, dtype: str, world_size: int) -> tuple[Exchange, ...]:
        return (Exchange(ALL_REDUCE, world_size),)

    def reduce(self, gradients: Gradients) -> Reduction:
        raise NotImplementedError

    def describe(self) -> str:
        return "eighth"

    @property
    def loses(self) -> str:
        return ""

    def default_us(self, size_bytes: int, world_size: int) -> tuple[float, ...]:
        return 1.0, 1.0


class Slower(MeasuredPass):
    """Input that takes another time."""

    name: ClassVar[str] = "slower"
    parts: ClassVar[tuple[str, ...]] = (Part.INPUT,)
    block: int = 16

    def apply(self, module: Any, optimizer: Any) -> Any:
        return module

    def describe(self) -> str:
        return f"slower by {self.block}"


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry.plugins(), "alternate", _Plugin())
    monkeypatch.setitem(passes(), "slower", Slower)


def test_a_replay_is_a_mean_over_whole_periods_whatever_was_recorded() -> None:
    job = example_job(2)
    assert len(job.steps.timelines[0]) == 4
    played = simulate(job, Alternate(period=3))
    counted = [c for c in played.graph.collectives if c.step >= played.first_step]
    assert Counter(c.bucket for c in counted) == {0: 2, 1: 2, 2: 2}
    assert played.first_step == 3
    assert len(played.step_times_ms) == 6
    assert len(simulate(job, DistributedDataParallelStrategy()).step_times_ms) == 4


def recorded(count: int, size_bytes: tuple[int, ...]) -> Trace:
    """``count`` steps of two ranks, whose all-reduces have these sizes in turn."""
    rows = []
    for step in range(count):
        rows.append(Event(Kind.STEP, "", Stream.COMPUTE, step, step * 1000, 1000))
        of_step = Event(
            Kind.COLLECTIVE, ALL_REDUCE, Stream.COMMUNICATION, step, step * 1000 + 10, 100, bucket=0
        )
        rows.append(of_step._replace(size_bytes=size_bytes[step % len(size_bytes)]))
    return trace_of({0: rows, 1: rows})


def test_a_recording_agrees_to_within_a_period() -> None:
    """It may begin with any step of a period."""
    strategy = Alternate(period=3)
    job = example_job(2)
    items = job.steps.timelines[0][0].items
    steps = Computation({0: tuple(Timeline(0, step, items) for step in range(7))})
    job = replace(job, computation=steps)
    sizes = tuple(bucket.size_bytes for bucket in strategy.decide(job).buckets)
    assert len(set(sizes)) > 1
    check_fidelity(recorded(7, (*sizes[1:], sizes[0])), strategy, job)
    with pytest.raises(TraceError, match="cannot reproduce"):
        check_fidelity(recorded(7, (2 * sum(sizes),)), strategy, job)


def test_the_kit_names_what_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    check_strategy(Alternate())
    with pytest.raises(AssertionError, match="need a permission"):
        monkeypatch.setattr(Alternate, "permission", "")
        check_strategy(Alternate())
    monkeypatch.setattr(Alternate, "permission", "no-such")
    with pytest.raises(AssertionError, match="permission not declared: no-such"):
        check_strategy(Alternate())
    with pytest.raises(AssertionError, match="not registered"):
        check_codec(Eighth())


class Halved(Cast):
    name: ClassVar[str] = "halved"
    codec: Literal["halved"] = "halved"  # type: ignore[assignment]

    def describe(self) -> str:
        return "halved"


def _no_generator(_: Any, gradients: Gradients) -> Any:
    return Reduced(gradients.flat, gradients.flat[:0])


def _bare(_: Any, gradients: Gradients) -> Any:
    mean = yield Sent(ALL_REDUCE, gradients.flat.clone())
    return mean


def _silent(_: Any, gradients: Gradients) -> Any:
    if gradients.rank != 1:
        yield Sent(ALL_REDUCE, gradients.flat.clone())
    return Reduced(gradients.flat, gradients.flat[:0])


def _not_a_number(_: Any, gradients: Gradients) -> Any:
    mean = yield Sent(ALL_REDUCE, gradients.flat.bfloat16())
    return Reduced(mean.to(gradients.flat.dtype) * float("nan"), gradients.flat[:0])


@pytest.mark.parametrize(
    ("reduce", "said"),
    [
        (_no_generator, r"halved: reduce\(\) must be a generator"),
        (_bare, r"halved: reduce\(\) returns Tensor on rank 0, expected Reduced"),
        (_silent, "halved: rank 1 requests no collective"),
        (_not_a_number, "the mean is not finite"),
    ],
)
def test_the_kit_names_what_is_wrong_with_a_codec(
    monkeypatch: pytest.MonkeyPatch, reduce: Any, said: str
) -> None:
    monkeypatch.setattr(Halved, "reduce", reduce)
    monkeypatch.setitem(codec_registry.codecs(), "halved", Halved)
    with pytest.raises(AssertionError, match=said):
        check_codec(Halved(dtype="bfloat16"), world_sizes=(2,))


def test_the_kit_says_what_rounding_is_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def rounded(_: Any, gradients: Gradients) -> Any:
        mean = yield Sent(ALL_REDUCE, gradients.flat.bfloat16())
        return Reduced(mean.to(gradients.flat.dtype) / gradients.world_size, gradients.flat * 0)

    monkeypatch.setattr(Halved, "reduce", rounded)
    monkeypatch.setattr(Halved, "feeds_back", True)
    with pytest.raises(AssertionError, match=r"neither sent nor kept.*pass check_codec\(\.\.\., rounding=\)"):
        check_feedback(Halved(dtype="bfloat16"), 2)


def test_the_kit_says_that_decide_is_not_pure(monkeypatch: pytest.MonkeyPatch) -> None:
    decided: list[Job] = []
    decide = Alternate.decide

    def impure(strategy: Alternate, job: Job) -> Any:
        decided.append(job)
        return decide(strategy.model_copy(update={"period": 2 + len(decided)}), job)

    monkeypatch.setattr(Alternate, "decide", impure)
    with pytest.raises(AssertionError, match=r"decide\(\) is not pure"):
        check_strategy(Alternate())
    monkeypatch.setattr(Alternate, "decide", lambda *_: None)
    with pytest.raises(AssertionError, match=r"alternate 3: .*decide\(\) returned NoneType"):
        check_strategy(Alternate())


class Smooth(Pass):
    """Another activation than GELU."""

    name: ClassVar[str] = "smooth"

    def rewrite(self, job: Job) -> Job:
        return job

    def apply(self, module: Any, optimizer: Any) -> Any:
        from torch import nn

        if not isinstance(module[1], nn.GELU):
            raise UnsupportedError("there is no GELU", fix="Leave it out.")
        return module

    def describe(self) -> str:
        return "smooth"


def test_the_kit_tries_a_pass_on_a_model_of_its_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch
    from torch import nn

    def module() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(12, 8), nn.GELU(), nn.Linear(8, 4))

    monkeypatch.setitem(passes(), "smooth", Smooth)
    with pytest.raises(UnsupportedError, match="no GELU"):
        check_pass(Smooth())
    check_pass(Smooth(), module=module)
    monkeypatch.setattr(Smooth, "apply", lambda *_: None)
    with pytest.raises(AssertionError, match=r"apply\(\) returned NoneType"):
        check_pass(Smooth())


def test_permissions_of_other_packages_are_permissions() -> None:
    assert permissions()[LATE.name] is LATE
    check_allowed(["precision", LATE.name])
    with pytest.raises(UserError, match=r"randomness or late-gradients"):
        check_allowed(["late"])
    assert permitted(Alternate().permissions, [LATE.name])
    assert not permitted(Alternate().permissions, ["asynchronous"])
    several = DistributedDataParallelStrategy(wire=(Cast(dtype="bfloat16"), None))
    assert several.permissions == {"precision"}


def test_a_codec_that_cannot_propose_is_left_out_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken() -> tuple[Codec, ...]:
        raise RuntimeError("planted")

    monkeypatch.setenv(WARNED_VARIABLE, "")
    monkeypatch.setattr(Eighth, "proposed", broken)
    monkeypatch.setitem(codec_registry.codecs(), "eighth", Eighth)
    codec_registry.proposed.cache_clear()
    try:
        assert codec_registry.proposed()
        warning = capsys.readouterr().err
        assert (
            f"the codec eighth of {Eighth.__module__} is left out: it raised RuntimeError: planted" in warning
        )
    finally:
        codec_registry.proposed.cache_clear()


def test_a_codec_that_fails_is_not_measured_and_ends_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import torch.distributed as dist

    from headway.measuring.codecs import codec_costs

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        costs = codec_costs((Eighth(), Cast(dtype="bfloat16")), busy_cores=False)
    finally:
        dist.destroy_process_group()
    assert set(costs) == {"bfloat16"}
    assert "eighth was not measured, its defaults count: NotImplementedError" in capsys.readouterr().err


def test_any_measured_pass_is_measured_by_its_name() -> None:
    found = pass_of(synthetic_trace(), ("slower", "block=64"))
    assert found == Slower(block=64)
    for words, said in (
        ((), "no pass of this name can be measured"),
        (("recompute",), "no pass of this name can be measured"),
        (("slower", "block"), "options with values"),
    ):
        with pytest.raises(UserError, match=said):
            pass_of(synthetic_trace(), words)
    with pytest.raises(UnsupportedError, match=r"headway measure slower TRACE 'block=64' -- COMMAND"):
        found.rewrite(example_job())


def test_a_measured_pass_may_change_another_part_than_forward() -> None:
    job = example_job()
    effects = {Slower().effect_name(Part.INPUT): MeasuredEffect(2.0)}
    measured = Job(job.stages, job.world_size, job.cluster, job.computation, measured=effects)
    assert Slower.proposed(measured) == (Slower(),)
    assert Slower().rewrite(measured).world_size == job.world_size
    assert json.loads(Slower().model_dump_json()) == {"block": 16}


def test_training_that_is_off_is_found_out() -> None:
    def run(world_size: int, name: str, options: dict[str, Any], injected: bool) -> Any:
        from headway.ext.testing import Trained

        return [Trained((1.0,) * 548, "a"), Trained((1.0,) * 548, "a" if injected else "b")]

    with pytest.raises(AssertionError, match="different bits"):
        check_training(DistributedDataParallelStrategy(), run=run)
    with pytest.raises(AssertionError, match="differs from the reference"):
        check_training(DistributedDataParallelStrategy(), run=run, ranks_equal=False)
