"""Mixed precision: what is predicted of it from measurements, and what it does to a live model."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from pydantic import ValidationError
from tests.passes.jobs import DDP, WIDTH, job, predicted_peak
from torch import nn

from headway.errors import UnsupportedError
from headway.graph.computation import Part
from headway.job import Job, MeasuredEffect
from headway.model import PassMemory
from headway.passes.accumulate import Accumulate
from headway.passes.base import Pass
from headway.passes.optimizer import OptimizerImplementation
from headway.passes.precision import Precision
from headway.passes.recompute import Recompute
from headway.plan import Plan
from headway.plan.plan import PlannedModel
from headway.simulator.simulate import simulate
from headway.strategies.base import Strategy
from headway.strategies.partial_all_reduce.policy import PartialAllReduceStrategy

WHOLE = Precision(dtype="bfloat16")
MIDDLE = Precision(dtype="bfloat16", modules=("1",))


def blocks() -> nn.Sequential:
    torch.manual_seed(0)
    each = (nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3))
    return nn.Sequential(*each)


def measured(changed: Precision, forward: float, backward: float, memory: PassMemory | None = None) -> Job:
    """A job of 80 ms of forward and 160 ms of backward."""
    effects = {
        changed.effect_name(Part.FORWARD): MeasuredEffect(forward, memory=memory),
        changed.effect_name(Part.BACKWARD): MeasuredEffect(backward),
    }
    return replace(job(blocks()), measured=effects)


@pytest.mark.parametrize(("forward", "backward", "changed_ms"), [(0.5, 0.25, -160), (1.5, 2.0, 200)])
@pytest.mark.parametrize("changed", [WHOLE, MIDDLE])
def test_the_step_changes_as_was_measured(
    changed: Precision, forward: float, backward: float, changed_ms: float
) -> None:
    """Shorter where it was, and longer where it was, as on processors without such arithmetic."""
    plain = measured(changed, forward, backward)
    difference_ms = simulate(changed.rewrite(plain), DDP).step_ms - simulate(plain, DDP).step_ms
    assert difference_ms == pytest.approx(changed_ms, abs=0.5)


def test_memory_is_that_which_was_watched() -> None:
    plain = measured(WHOLE, 1, 1)
    known = plain.model.pass_memory
    assert known is not None
    half = known.model_copy(
        update={
            "forward_bytes": known.forward_bytes // 2,
            "backward": tuple((name, size // 2) for name, size in known.backward),
            "update_bytes": 7,
        }
    )
    changed = WHOLE.rewrite(measured(WHOLE, 1, 1, half))
    assert changed.model.pass_memory == half.model_copy(update={"update_bytes": known.update_bytes})
    assert predicted_peak(changed) < predicted_peak(plain)
    assert WHOLE.rewrite(plain).model.pass_memory is None, "nobody knows"


def test_what_was_not_measured_is_refused_and_not_proposed() -> None:
    with pytest.raises(UnsupportedError, match=r"bfloat16 autocast.*not measured.*headway measure precision"):
        WHOLE.rewrite(job(blocks()))
    with pytest.raises(UnsupportedError, match=r"autocast in 1 .*not measured"):
        MIDDLE.rewrite(measured(WHOLE, 0.5, 0.5))
    assert Precision.proposed(job(blocks())) == ()
    assert Precision.proposed(measured(MIDDLE, 0.5, 0.5)) == (MIDDLE,)
    odd = replace(job(blocks()), measured={'precision {"dtype":"fp4"} forward': MeasuredEffect(0.1)})
    assert Precision.proposed(odd) == ()


def test_models_that_it_is_not_for_are_refused_in_replay() -> None:
    plain = measured(WHOLE, 0.5, 0.5)
    first, *others = plain.model.parameters
    half = (first.model_copy(update={"dtype": "bfloat16"}), *others)
    model = plain.model.model_copy(update={"parameters": half})
    with pytest.raises(UnsupportedError, match="needs float32 parameters; got bfloat16"):
        WHOLE.rewrite(replace(plain, stages=(model,)))
    with pytest.raises(UnsupportedError, match="no module of this name"):
        Precision(dtype="bfloat16", modules=("7",)).rewrite(plain)


def test_it_needs_a_permission_and_says_what_it_changes() -> None:
    assert WHOLE.permission == MIDDLE.permission == "precision"
    assert WHOLE.changes_training == "the model computes in bfloat16"
    lower = Precision(dtype="float16")
    assert lower.permission == "precision"
    assert (
        lower.changes_training
        == "the model computes in float16, and steps whose gradients overflow are skipped"
    )


@pytest.mark.parametrize(
    ("options", "said"),
    [({"dtype": "float16", "modules": ["a"]}, "whole model"), ({"dtype": "float8"}, "bfloat16"), ({}, "dtype"),
     ({"dtype": "bfloat16", "modules": ["a", "a.b"]}, "lies within another")],
)  # fmt: skip
def test_options_are_checked(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        Precision.model_validate(options)


def test_it_stands_first_in_a_plan() -> None:
    def plan(*passes: Pass) -> Plan:
        model = PlannedModel(parameters=0, size_bytes=0, fingerprint="")
        return Plan(mesh={"data": 2}, parallel={"data": DDP}, model=model, passes=passes)

    recompute = Recompute(modules=("0",))
    assert plan(WHOLE, recompute).passes == (WHOLE, recompute)
    for wrong in ((recompute, WHOLE), (WHOLE, MIDDLE)):
        with pytest.raises(ValidationError, match="precision must be the first pass"):
            plan(*wrong)


@pytest.mark.parametrize(
    ("strategy", "counts"),
    [(PartialAllReduceStrategy(groups="static"), True),
     (PartialAllReduceStrategy(groups="first-come"), False), (DDP, False)],
)  # fmt: skip
def test_steps_are_not_left_out_where_they_are_counted(strategy: Strategy, counts: bool) -> None:
    model = PlannedModel(parameters=0, size_bytes=0, fingerprint="")
    for dtype in ("bfloat16", "float16"):
        refused = counts and dtype == "float16"
        with pytest.raises(ValidationError, match="may skip a step") if refused else nullcontext():
            Plan(mesh={"data": 2}, parallel={"data": strategy}, model=model, passes=(Precision(dtype=dtype),))


def gradients(model: nn.Module, forward: Callable[[torch.Tensor], torch.Tensor]) -> list[torch.Tensor]:
    given = torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(3))
    forward(given).square().mean().backward()
    return [each.grad for each in model.parameters() if each.grad is not None]


def test_gradients_are_those_of_torchs_own_autocast() -> None:
    for changed in (WHOLE, MIDDLE):
        mine, reference, exact = blocks(), blocks(), blocks()
        assert changed.apply(mine, None) is mine

        def forward(given: torch.Tensor, of: nn.Sequential = reference, changed: Precision = changed) -> Any:
            for name, module in of.named_children():
                if changed is WHOLE or name == "1":
                    with torch.autocast("cpu", dtype=torch.bfloat16):
                        given = module(given)
                    given = given if changed is WHOLE else given.float()
                else:
                    given = module(given)
            return given.float()

        found, expected = gradients(mine, mine), gradients(reference, forward)
        assert len(found) == len(expected) == 12
        assert all(each.dtype is torch.float32 for each in found)
        for one, two in zip(found, expected, strict=True):
            assert torch.equal(one, two)
        different = zip(found, gradients(exact, exact), strict=True)
        assert any(not torch.equal(one, two) for one, two in different), "something is rounded"
        assert copy.deepcopy(mine).__class__ is nn.Sequential


@pytest.mark.parametrize("other", [Recompute(modules=("0", "1", "2")), Accumulate(micro_batches=2)])
def test_other_passes_around_it_keep_its_gradients(other: Pass) -> None:
    for first in (WHOLE, MIDDLE):
        alone, both = blocks(), blocks()
        first.apply(alone, None)
        other.apply(first.apply(both, None), None)
        for one, two in zip(gradients(alone, alone), gradients(both, both), strict=True):
            tolerance = 0 if other.name == "recompute" else 0.02 * float(one.abs().max())
            torch.testing.assert_close(two, one, rtol=0, atol=tolerance)


def test_the_optimizer_pass_goes_along() -> None:
    model = blocks()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    OptimizerImplementation(implementation="fused").apply(WHOLE.apply(model, optimizer), optimizer)
    gradients(model, model)
    optimizer.step()


class Pair(NamedTuple):
    low: Any
    number: int


@dataclasses.dataclass
class Named:
    low: Any
    kept: object


class Several(nn.Module):
    """Puts out what it computes in many containers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.seen = torch.float32

    def forward(self, given: torch.Tensor) -> Any:
        low = self.linear(given)
        self.seen = low.dtype
        return Pair(low, 3), [low, given.long()], {"a": (low,), "b": Named(low, self)}


def test_what_is_put_out_is_float32_in_every_container() -> None:
    model = Several()
    WHOLE.apply(model, None)
    pair, items, named = model(torch.ones(2, 4))
    assert model.seen is torch.bfloat16
    assert isinstance(pair, Pair)
    assert pair.number == 3
    assert named["b"].kept is model
    low = (pair.low, items[0], named["a"][0], named["b"].low)
    assert all(each.dtype is torch.float32 for each in low)
    assert items[1].dtype is torch.int64


def test_what_would_train_otherwise_is_refused_live() -> None:
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        with pytest.raises(UnsupportedError, match=f"needs float32 parameters; got {dtype}"):
            WHOLE.apply(blocks().to(dtype), None)
    with pytest.raises(UnsupportedError, match="no such module to run under autocast"):
        Precision(dtype="bfloat16", modules=("7",)).apply(blocks(), None)
    with pytest.raises(UnsupportedError, match="one type of device"):
        WHOLE.apply(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta")), None)
    with pytest.raises(UnsupportedError, match="one type of device"):
        WHOLE.apply(nn.Tanh(), None)
    model = WHOLE.apply(blocks(), None)
    with (
        pytest.raises(
            UnsupportedError, match=r"already calls its model under autocast; got autocast to torch\.bfloat16"
        ),
        torch.autocast("cpu", dtype=torch.bfloat16),
    ):
        model(torch.ones(1, WIDTH))
    again = Recompute(modules=("1",)).apply(blocks(), None)
    with pytest.raises(UnsupportedError, match="another pass already changed"):
        WHOLE.apply(again, None)
