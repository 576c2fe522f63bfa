"""Models in float16, whose gradients are scaled within them: against torch's own autocast and GradScaler."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from headway.errors import HeadwayWarning, UnsupportedError
from headway.graph.computation import Item, Part, Point, Timeline
from headway.passes import loss_scale
from headway.passes.accumulate import Accumulate
from headway.passes.base import Pass
from headway.passes.loss_scale import LossScale
from headway.passes.precision import Precision
from headway.passes.recompute import Recompute
from headway.trace.events import Read

FLOAT16 = Precision(dtype="float16")
WIDTH = 8
Optimizer = torch.optim.Optimizer
MAKERS: dict[str, Callable[..., Optimizer]] = {
    "sgd": lambda own: torch.optim.SGD(own, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adam": lambda own: torch.optim.Adam(own, lr=0.01, foreach=True),
    "fused": lambda own: torch.optim.AdamW(own, lr=0.01, fused=True),
}


def blocks() -> nn.Sequential:
    torch.manual_seed(0)
    each = (nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3))
    return nn.Sequential(*each)


def planned(*others: Pass) -> nn.Module:
    model: nn.Module = blocks()
    for each in (FLOAT16, *others):
        model = each.apply(model, None)
    return model


def scale_of(model: nn.Module) -> LossScale:
    return loss_scale._scales[model]


def batch(step: int) -> torch.Tensor:
    return torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(step))


def values(model: nn.Module) -> torch.Tensor:
    return torch.cat([each.detach().flatten() for each in model.parameters()])


def loss(out: torch.Tensor, times: float = 1.0) -> torch.Tensor:
    return out.square().mean() * times


@pytest.fixture(autouse=True)
def _forgotten() -> Iterator[None]:
    """Models of other tests, which may not be collected yet, are none of a test's."""
    yield
    loss_scale._scales.clear()


@pytest.mark.parametrize("made", MAKERS)
def test_training_is_that_of_torchs_own_scaler_bit_for_bit(made: str) -> None:
    """With steps that overflow, after which the scale is another one."""
    times = [1.0, 1e3, 1e34, 1.0, 1e36, 1e-5, 1.0, 1.0]
    mine, reference = planned(), blocks()
    optimizer = MAKERS[made](mine.parameters())
    for step, factor in enumerate(times):
        optimizer.zero_grad()
        loss(mine(batch(step)), factor).backward()
        optimizer.step()
    theirs, scaler = MAKERS[made](reference.parameters()), torch.amp.GradScaler("cpu")
    for step, factor in enumerate(times):
        theirs.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            out = reference(batch(step))
        scaler.scale(loss(out.float(), factor)).backward()
        scaler.step(theirs)
        scaler.update()
    assert scaler.get_scale() == scale_of(mine).value < loss_scale.FIRST_SCALE
    assert torch.equal(values(mine), values(reference))
    assert not torch.equal(values(mine), values(blocks()))


@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_script_that_leaves_out_steps_by_itself_trains_as_torchs_scaler_does(set_to_none: bool) -> None:
    """It looks at the norm, as many do, and so no optimizer ever asks about a step that overflows."""
    times = [1.0, 1e36, 1e36, 1.0, 1e36, 1.0, 1.0]
    mine, reference = planned(), blocks()
    optimizer = MAKERS["sgd"](mine.parameters())
    for step, factor in enumerate(times):
        loss(mine(batch(step)), factor).backward()
        if torch.isfinite(nn.utils.clip_grad_norm_(mine.parameters(), 1.0)):
            optimizer.step()
        optimizer.zero_grad(set_to_none=set_to_none)
    theirs, scaler = MAKERS["sgd"](reference.parameters()), torch.amp.GradScaler("cpu")
    for step, factor in enumerate(times):
        with torch.autocast("cpu", dtype=torch.float16):
            out = reference(batch(step))
        scaler.scale(loss(out.float(), factor)).backward()
        scaler.unscale_(theirs)
        nn.utils.clip_grad_norm_(reference.parameters(), 1.0)
        scaler.step(theirs)
        scaler.update()
        theirs.zero_grad()
    assert scaler.get_scale() == scale_of(mine).value < loss_scale.FIRST_SCALE
    assert torch.equal(values(mine), values(reference))


def test_gradients_that_accumulate_are_not_thrown_away() -> None:
    mine = planned()
    optimizer = MAKERS["sgd"](mine.parameters())
    before = values(mine)
    for factor in (1e36, 1.0):
        loss(mine(batch(0)), factor).backward()
    assert scale_of(mine).value == loss_scale.FIRST_SCALE
    optimizer.step()
    assert scale_of(mine).value == loss_scale.FIRST_SCALE * loss_scale.SHRINKS
    assert torch.equal(values(mine), before)


def test_gradients_that_would_vanish_do_not() -> None:
    exact, mine, unscaled = blocks(), planned(), blocks()
    loss(exact(batch(0)), 1e-5).backward()
    loss(mine(batch(0)), 1e-5).backward()
    with torch.autocast("cpu", dtype=torch.float16):
        loss(unscaled(batch(0)).float(), 1e-5).backward()
    (one, two, three) = (each[0][1].weight.grad for each in (exact, mine, unscaled))  # type: ignore[index]
    assert float((two - one).norm() / one.norm()) < 0.01
    assert float((three - one).norm() / one.norm()) > 0.1


def test_who_looks_sees_gradients_not_scaled_ones() -> None:
    mine, exact = planned(), blocks()
    given, same = (batch(0).requires_grad_() for _ in range(2))
    loss(mine(given)).backward()
    loss(exact(same)).backward()
    assert given.grad is not None
    torch.testing.assert_close(given.grad, same.grad, rtol=0.05, atol=1e-3)
    norms = [float(nn.utils.clip_grad_norm_(each.parameters(), 0.1)) for each in (mine, exact)]
    assert norms[0] == pytest.approx(norms[1], rel=0.01)


@pytest.mark.parametrize(
    "others",
    [(Recompute(modules=("0", "1", "2")),), (Accumulate(micro_batches=2),)],
    ids=["recompute", "accumulate"],
)
def test_other_passes_go_along(others: Sequence[Pass]) -> None:
    alone, both = planned(), planned(*others)
    for each in (alone, both):
        loss(each(batch(0))).backward()
    for one, two in zip(alone.parameters(), both.parameters(), strict=True):
        assert one.grad is not None
        exact = others[0].name == "recompute"
        torch.testing.assert_close(
            two.grad, one.grad, rtol=0, atol=0 if exact else 0.02 * float(one.grad.abs().max())
        )


def stepped(model: nn.Module, optimizer: Optimizer, step: int, times: float = 1.0) -> None:
    optimizer.zero_grad()
    loss(model(batch(step)), times).backward()
    optimizer.step()


def test_the_scale_grows_when_many_steps_were_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_scale, "GROWS_AFTER", 3)
    model = planned()
    optimizer, other = (MAKERS["sgd"](each.parameters()) for each in (model[:2], model[2:]))  # type: ignore[index]
    for step in range(6):
        stepped(model, optimizer, step)
        other.step()
    assert scale_of(model).value == loss_scale.FIRST_SCALE * 4, "once for each three steps of both"
    stepped(model, optimizer, 7, 1e38)
    assert scale_of(model).value == loss_scale.FIRST_SCALE * 2


def test_a_model_that_does_not_train_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_scale, "MANY_LEFT_OUT", 3)
    model = planned()
    optimizer, before = MAKERS["sgd"](model.parameters()), values(model)
    stepped(model, optimizer, 0, 1e38)
    stepped(model, optimizer, 0, 1e38)
    with pytest.warns(HeadwayWarning, match="3 consecutive steps were skipped"):
        stepped(model, optimizer, 0, 1e38)
    assert torch.equal(values(model), before)
    assert scale_of(model).left_out == 3


def test_parameters_that_train_later_are_scaled_too() -> None:
    model = planned()
    model[0].requires_grad_(False)  # type: ignore[index]
    optimizer = MAKERS["sgd"](model.parameters())
    stepped(model, optimizer, 0)
    model[0].requires_grad_(True)  # type: ignore[index]
    reference = copy.deepcopy(model)
    assert type(reference) is nn.Sequential
    optimizer.zero_grad()
    for each in (model, reference):
        loss(each(batch(1))).backward()
    for one, two in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(one.grad, two.grad, rtol=0.1, atol=2e-3)


def test_closures_that_compute_gradients_are_called_once() -> None:
    mine, plain = planned(), planned()
    optimizer, other = (MAKERS["sgd"](each.parameters()) for each in (mine, plain))
    calls: list[float] = []

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        value = loss(mine(batch(0)))
        value.backward()
        calls.append(float(value.detach()))
        return value

    found: Any = optimizer.step(closure)  # type: ignore[arg-type]
    assert found.item() == calls[0]
    assert len(calls) == 1
    stepped(plain, other, 0)
    assert torch.equal(values(mine), values(plain))


def test_copies_and_pickles_are_plain_and_say_nothing() -> None:
    model = planned()
    loss(model(batch(0))).backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        back = pickle.loads(pickle.dumps(model))
    assert type(back) is nn.Sequential
    assert torch.equal(values(back), values(model))
    with torch.no_grad():
        assert model(batch(0)).dtype is torch.float32


def test_optimizers_of_other_models_step_as_ever() -> None:
    planned()
    other = blocks()
    optimizer = torch.optim.LBFGS(other.parameters(), max_iter=2)
    before = values(other)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        value = loss(other(batch(0)))
        value.backward()
        return value

    optimizer.step(closure)
    assert not torch.equal(values(other), before)


def test_who_looked_before_the_plan_sees_gradients_too() -> None:
    model, seen = blocks(), []
    model[0][1].weight.register_hook(lambda gradient: seen.append(float(gradient.abs().max())))  # type: ignore[index]
    FLOAT16.apply(model, None)
    loss(model(batch(0))).backward()
    assert seen[0] < 1


def test_outputs_may_be_written_into_and_inputs_are_the_scripts_own() -> None:
    class Telling(nn.Linear):
        def forward(self, given: torch.Tensor, told: list[Any] | None = None) -> torch.Tensor:
            out = super().forward(given)
            if told is not None:
                told.append(out.float().square().mean())
            return out

    written, plain = (Telling(WIDTH, WIDTH) for _ in range(2))
    plain.load_state_dict(written.state_dict())
    for each in (written, plain):
        FLOAT16.apply(each, None)
    told: list[Any] = []
    out = written(batch(0), told)
    out[0] = 0.0
    out /= 2
    loss(out).backward()
    (one,) = told
    assert one > 0
    loss(torch.cat([torch.zeros(1, WIDTH), plain(batch(0))[1:] / 2])).backward()
    assert torch.equal(written.weight.grad, plain.weight.grad)  # type: ignore[arg-type]


@pytest.mark.parametrize("reentrant", [True, False])
def test_models_that_recompute_by_themselves(reentrant: bool) -> None:
    class Recomputing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.all = blocks()

        def forward(self, given: torch.Tensor) -> Any:
            for each in self.all:
                given = checkpoint(each, given, use_reentrant=reentrant)
            return given

    mine, plain = Recomputing(), planned()
    FLOAT16.apply(mine, None)
    loss(mine(batch(0).requires_grad_())).backward()
    loss(plain(batch(0).requires_grad_())).backward()
    for one, two in zip(mine.parameters(), plain.parameters(), strict=True):
        assert torch.equal(one.grad, two.grad)  # type: ignore[arg-type]


def test_optimizers_of_one_backward_halve_the_scale_once() -> None:
    model = planned()
    optimizers = [MAKERS["sgd"](each.parameters()) for each in (model[:2], model[2:])]  # type: ignore[index]
    for _ in range(2):
        loss(model(batch(0)), 1e38).backward()
        for each in optimizers:
            each.step()
            each.zero_grad()
    assert scale_of(model).value == loss_scale.FIRST_SCALE / 4


def test_gradients_that_nobody_steps_with_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_scale, "MANY_BACKWARDS", 3)
    model = planned()
    optimizer = MAKERS["sgd"](model.parameters())
    for _ in range(2):
        loss(model(batch(0))).backward()
    optimizer.step()
    for _ in range(2):
        loss(model(batch(0))).backward()
    with pytest.warns(HeadwayWarning, match="no optimizer has stepped in 3 backwards"):
        loss(model(batch(0))).backward()


def test_the_replay_knows_that_gradients_are_looked_at() -> None:
    items = FLOAT16.rearranged(Timeline(0, 1, (Item(Part.BACKWARD, duration_ns=5), Item(Point.STEP)))).items
    assert [item.kind for item in items] == [Part.BACKWARD, Part.READ, Point.STEP]
    assert items[1].name == Read.UNSCALE


def _by_value(model: Any, optimizer: Optimizer) -> None:
    loss(model(batch(0)), 1e38).backward()
    nn.utils.clip_grad_value_(model.parameters(), 1.0)
    for each in model.parameters():
        each.grad.nan_to_num_()
    optimizer.step()


def _no_parameter(model: Any, _optimizer: Optimizer) -> None:
    other = torch.ones(WIDTH, requires_grad=True)
    model[2].register_forward_hook(lambda _module, _given, out: out * other)
    loss(model(batch(0))).backward()


def _own_class(model: Any, _optimizer: Optimizer) -> None:
    class Own(torch.optim.SGD):
        """It may call its closure twice."""

    model(batch(0))
    Own(model.parameters(), lr=0.1).step(lambda: 0.0)


def _penalty(model: Any, _optimizer: Optimizer) -> None:
    (loss(model(batch(0))) + 0.01 * model[0][1].weight.square().sum()).backward()


def _a_part_alone(model: Any, _optimizer: Optimizer) -> None:
    model(batch(0))
    torch.autograd.grad(loss(model[1](batch(0))), list(model[1].parameters()))


def _in_backward(model: Any, optimizer: Optimizer) -> None:
    model(batch(0))
    next(model.parameters()).register_post_accumulate_grad_hook(lambda _: optimizer.step())
    loss(model(batch(0))).backward()


def _lbfgs(model: Any, _optimizer: Optimizer) -> None:
    loss(model(batch(0))).backward()
    torch.optim.LBFGS(model.parameters()).step(lambda: 0.0)


@pytest.mark.parametrize(
    ("use", "said"),
    [(_penalty, "uses float16 parameters directly.*shape \\(8, 8\\)"), (_a_part_alone, "parameters directly"),
     (_in_backward, "step inside backward"), (_lbfgs, "call a closure once.*; got LBFGS"),
     (_own_class, "got Own"), (_by_value, "made finite before the optimizer's step"),
     (_no_parameter, "not one of its parameters.*shape \\(8,\\)")],
)  # fmt: skip
def test_what_would_train_otherwise_is_refused(use: Callable[[Any, Optimizer], None], said: str) -> None:
    model = planned()
    with pytest.raises(UnsupportedError, match=said):
        use(model, MAKERS["sgd"](model.parameters()))


def test_a_scheduler_that_holds_the_step_already_is_refused() -> None:
    model = planned()
    optimizer = MAKERS["sgd"](model.parameters())
    loss(model(batch(0))).backward()
    ungated = torch.optim.Optimizer.profile_hook_step(torch.optim.SGD.step.__wrapped__)  # type: ignore[attr-defined]
    with pytest.raises(UnsupportedError, match=r"cannot be skipped.*scheduler"):
        ungated(optimizer)
