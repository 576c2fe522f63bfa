"""Passes in the search: which are tried, which are kept, and that plans and bounds know of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar, Self

import pytest
from tests.replayer.test_replayer import as_bucketed, cluster_of, job
from tests.synthetic import synthetic_trace

from headway.errors import UnsupportedError
from headway.graph.computation import Part
from headway.job import Job, MeasuredEffect
from headway.optimization import with_passes as module
from headway.optimization.candidate import needed_bytes
from headway.optimization.result import plan_of
from headway.optimization.search import search
from headway.passes.base import Pass
from headway.passes.precision import Precision
from headway.plugins import WARNED_VARIABLE
from headway.replayer.replayer import Replayer
from headway.simulator.what_if import WhatIf
from headway.time_limit import TimeLimit, limited


class _Made(Pass):
    factor: float

    @classmethod
    def proposed(cls, job: Job) -> tuple[Self, ...]:
        del job
        return (cls(factor=cls.usual),)

    usual: ClassVar[float] = 1.0

    def rewrite(self, job: Job) -> Job:
        return WhatIf(compute=self.factor).rewrite(job)

    def apply(self, module: Any, optimizer: Any) -> Any:
        raise NotImplementedError

    def describe(self) -> str:
        return f"{self.name} by {self.factor:g}"


class Faster(_Made):
    name: ClassVar[str] = "faster"
    usual: ClassVar[float] = 0.5


class Fails(_Made):
    name: ClassVar[str] = "fails"

    @classmethod
    def proposed(cls, job: Job) -> tuple[Self, ...]:
        raise ZeroDivisionError(f"no ranks in {job.world_size}")


class Slower(_Made):
    name: ClassVar[str] = "slower"
    usual: ClassVar[float] = 1.5


class Rounded(_Made):
    name: ClassVar[str] = "rounded"
    usual: ClassVar[float] = 0.8

    @property
    def changes_training(self) -> str:
        return "numbers are rounded"


class Early(_Made):
    name: ClassVar[str] = "early"
    usual: ClassVar[float] = 0.9
    stands_first: ClassVar[bool] = True


class Smaller(_Made):
    name: ClassVar[str] = "smaller"
    usual: ClassVar[float] = 1.1
    saves_memory_alone: ClassVar[bool] = True

    def rewrite(self, job: Job) -> Job:
        (model,) = job.stages
        return replace(super().rewrite(job), stages=(model.model_copy(update={"activation_bytes": 0}),))


class Unknown(_Made):
    name: ClassVar[str] = "unknown"

    def rewrite(self, job: Job) -> Job:
        raise UnsupportedError("nobody measured it")


@pytest.fixture(scope="module")
def replayer() -> Replayer:
    one = job(forward_ms=20, backward_ms=40, gbps=1.0)
    trace = as_bucketed(synthetic_trace(one))
    model = trace.model.model_copy(update={"activation_bytes": 10**9})
    return Replayer(replace(trace, model=model), cluster_of(one))


def there_are(monkeypatch: pytest.MonkeyPatch, *kinds: type[Pass]) -> None:
    monkeypatch.setattr(module, "passes", lambda: {each.name: each for each in kinds})


def test_a_pass_that_makes_plans_faster_is_kept(replayer: Replayer, monkeypatch: pytest.MonkeyPatch) -> None:
    there_are(monkeypatch)
    without = search(replayer)
    there_are(monkeypatch, Slower, Faster, Smaller, Unknown)
    found = search(replayer)
    best = found.best()
    assert [each.name for each in best.passes] == ["faster"]
    assert best.predicted_ms < without.best().predicted_ms
    assert "faster by 0.5" in best.changes
    assert found.bound_ms <= best.predicted_ms * (1 + 1e-9)
    assert found.bound_ms < without.bound_ms
    assert plan_of(best, replayer).passes == best.passes
    assert not any(
        each.name in ("slower", "smaller", "unknown") for c in found.candidates for each in c.passes
    )


def test_a_pass_of_another_package_that_raises_is_left_out(
    replayer: Replayer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(WARNED_VARIABLE, "")
    there_are(monkeypatch, Fails, Faster)
    assert [applied.name for applied in search(replayer).best().passes] == ["faster"]
    warning = capsys.readouterr().err
    assert f"the pass fails of {__name__} is left out: it raised ZeroDivisionError: no ranks in 2" in warning


def test_a_pass_that_stands_first_does_so_when_it_is_added_later(
    replayer: Replayer, monkeypatch: pytest.MonkeyPatch
) -> None:
    there_are(monkeypatch, Faster, Early)
    best = search(replayer).best()
    assert [each.name for each in best.passes] == ["early", "faster"]
    assert plan_of(best, replayer).passes == best.passes


class First(_Made):
    name: ClassVar[str] = "first"
    usual: ClassVar[float] = 0.8
    stands_first: ClassVar[bool] = True


def test_of_passes_that_stand_first_there_is_one(replayer: Replayer, monkeypatch: pytest.MonkeyPatch) -> None:
    there_are(monkeypatch, Faster, First, Early)
    best = search(replayer).best()
    assert [each.name for each in best.passes] == ["first", "faster"]
    assert plan_of(best, replayer).passes == best.passes


@pytest.mark.parametrize(
    ("forward", "backward", "taken"), [(0.5, 0.7, True), (1.3, 0.5, True), (0.7, 1.5, False)]
)
def test_mixed_precision_is_taken_where_it_was_measured_to_help(
    monkeypatch: pytest.MonkeyPatch, forward: float, backward: float, taken: bool
) -> None:
    """Of 20 ms of forward and 40 ms of backward."""
    one = job(forward_ms=20, backward_ms=40, gbps=100.0)
    known = Replayer(as_bucketed(synthetic_trace(one)), cluster_of(one))
    whole = Precision(dtype="bfloat16")
    effects = {
        whole.effect_name(Part.FORWARD): MeasuredEffect(forward),
        whole.effect_name(Part.BACKWARD): MeasuredEffect(backward),
    }
    monkeypatch.setattr(known, "job", replace(known.job, measured=effects))
    assert not any(each.passes for each in search(known).candidates), "not permitted"
    found = search(known, allow=("precision",))
    assert any(each.passes == (whole,) for each in found.candidates) == taken
    best = found.best()
    assert best.passes == ((whole,) if taken else ())
    assert bool(best.changes_training) == taken


def test_steps_are_not_left_out_where_they_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    one = job(forward_ms=20, backward_ms=40, gbps=1.0)
    known = Replayer(as_bucketed(synthetic_trace(one)), cluster_of(one))
    lower = Precision(dtype="float16")
    effects = {lower.effect_name(part): MeasuredEffect(0.5) for part in (Part.FORWARD, Part.BACKWARD)}
    monkeypatch.setattr(known, "job", replace(known.job, measured=effects))
    found = search(known, allow=("precision", "asynchronous")).candidates
    assert any(each.strategy.counts_steps for each in found)
    assert any(each.passes == (lower,) for each in found)
    assert not any(each.passes and each.strategy.counts_steps for each in found)


def test_what_changes_training_needs_a_permission(
    replayer: Replayer, monkeypatch: pytest.MonkeyPatch
) -> None:
    there_are(monkeypatch, Rounded)
    assert not any(each.passes for each in search(replayer).candidates)
    best = search(replayer, allow=("precision",)).best()
    assert [each.name for each in best.passes] == ["rounded"]
    assert best.changes_training == "numbers are rounded"
    assert plan_of(best, replayer).changes_training == "numbers are rounded"


def test_a_pass_that_saves_memory_is_tried_under_a_limit_alone(
    replayer: Replayer, monkeypatch: pytest.MonkeyPatch
) -> None:
    there_are(monkeypatch)
    least = min(needed_bytes(each) for each in search(replayer).candidates)
    there_are(monkeypatch, Smaller, Faster)
    found = search(replayer, memory_limit_bytes=least - 10**8)
    assert found.candidates
    for each in found.candidates:
        assert {one.name for one in each.passes} == {"smaller", "faster"}
        assert needed_bytes(each) <= least - 10**8


def test_no_pass_is_tried_when_time_is_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "passes", lambda: {"faster": Faster})
    one = job(forward_ms=20, backward_ms=40, gbps=1.0)
    replayer = Replayer(as_bucketed(synthetic_trace(one)), cluster_of(one))
    candidates = search(replayer).candidates
    limit = TimeLimit.of(0.0)
    with limited(limit):
        found = module.with_passes(replayer, candidates, None, ())
    assert (found.replays, found.candidates) == (0, ())
    assert limit.cut_short
