"""Other implementations of the script's optimizer: what is predicted of them, and what they do live."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from headway.cluster import Cluster, Host
from headway.errors import UnsupportedError
from headway.graph.computation import Computation, Item, Part, Point, Timeline
from headway.job import Job, MeasuredEffect, OptimizerUse
from headway.model import PassMemory
from headway.passes.optimizer import Implementation, OptimizerImplementation
from headway.simulator.simulate import simulate
from headway.strategies.ddp.policy import DistributedDataParallelStrategy
from headway.strategies.live.module_spec import model_spec

DDP = DistributedDataParallelStrategy()
FUSED = OptimizerImplementation(implementation="fused")
FOREACH = OptimizerImplementation(implementation="foreach")
MS = 1_000_000
Make = Callable[..., torch.optim.Optimizer]


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 2)).double()


def job(measured: Mapping[str, MeasuredEffect], names: tuple[str, ...] = ("AdamW",)) -> Job:
    ready = [Item(Point.READY, name) for name, _ in reversed(list(model().named_parameters()))]
    items = (
        Item(Part.FORWARD, "", 4 * MS), Item(Part.BACKWARD, "", 8 * MS), *ready, Item(Point.BACKWARD_END),
        Item(Point.STEP), Item(Part.OPTIMIZER, "", 3 * MS), Item(Part.OPTIMIZER, "", 3 * MS),
    )  # fmt: skip
    spec = model_spec(model()).model_copy(
        update={"pass_memory": PassMemory(forward_bytes=10, backward=(), update_bytes=1000)}
    )
    return replace(
        Job.of(spec, 2),
        cluster=Cluster(
            hosts=tuple(Host(name=f"h{i}", workers=1, up_gbps=10, down_gbps=10) for i in range(2))
        ),
        computation=Computation({0: (Timeline(0, 0, items),)}),
        optimizers=OptimizerUse(names, 1),
        measured=measured,
    )


@pytest.mark.parametrize(("factor", "changed_ms"), [(0.25, -4.5), (2.0, 6.0)])
def test_the_step_changes_as_was_measured(factor: float, changed_ms: float) -> None:
    """Faster where the measurement was, and slower where it was slower, as of ``foreach`` on large tensors of a CPU."""
    plain = job({"optimizer fused AdamW": MeasuredEffect(factor, 24)})
    changed = FUSED.rewrite(plain)
    difference_ms = simulate(changed, DDP).step_ms - simulate(plain, DDP).step_ms
    assert difference_ms == pytest.approx(changed_ms, abs=0.01)
    assert changed.model.pass_memory is not None
    assert changed.model.pass_memory.update_bytes == 24


def test_work_off_the_main_threads_changes_too() -> None:
    plain = job({"optimizer fused AdamW": MeasuredEffect(0.5)})
    (timeline,) = plain.steps.timelines[0]
    shared = replace(plain, computation=Computation({0: (replace(timeline, background_ns=8 * MS),)}))
    (changed,) = FUSED.rewrite(shared).steps.timelines[0]
    assert changed.background_ns == changed.optimizer_ns == 4 * MS


def test_what_was_not_measured_is_refused_and_not_proposed() -> None:
    for unknown in (job({}), job({"optimizer fused SGD": MeasuredEffect(0.5)})):
        with pytest.raises(
            UnsupportedError, match=r"AdamW was not measured.*headway measure optimizer TRACE"
        ):
            FUSED.rewrite(unknown)
        assert OptimizerImplementation.proposed(unknown) == ()
    with pytest.raises(UnsupportedError, match="one class of optimizers; got AdamW, SGD"):
        FUSED.rewrite(job({"optimizer fused SGD": MeasuredEffect(0.5)}, ("AdamW", "SGD")))


def test_what_was_faster_or_smaller_is_proposed() -> None:
    def proposed(foreach: MeasuredEffect, fused: MeasuredEffect) -> tuple[OptimizerImplementation, ...]:
        return OptimizerImplementation.proposed(
            job({"optimizer foreach AdamW": foreach, "optimizer fused AdamW": fused})
        )

    assert proposed(MeasuredEffect(1.5, 2000), MeasuredEffect(0.3, 2000)) == (FUSED,)
    assert proposed(MeasuredEffect(1.5, 10), MeasuredEffect(1.3, 2000)) == (FOREACH,)
    assert FUSED.changes_training == ""


def trained(network: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 4) -> None:
    data = torch.Generator().manual_seed(3)
    for _ in range(steps):
        optimizer.zero_grad()
        network(torch.randn(6, 5, generator=data, dtype=torch.float64)).square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize("implementation", ["foreach", "fused"])
@pytest.mark.parametrize(
    ("make", "options"),
    [(torch.optim.AdamW, {}), (torch.optim.Adam, {"amsgrad": True}), (torch.optim.SGD, {"momentum": 0.9}),
     (torch.optim.Adagrad, {})],
)  # fmt: skip
@pytest.mark.parametrize("known", [True, False], ids=["given", "met in its step"])
def test_training_stays_the_same(
    make: Make, options: dict[str, Any], implementation: Implementation, known: bool
) -> None:
    stock, other = model(), model()
    optimizer = make(other.parameters(), lr=0.05, **options)
    changed = OptimizerImplementation(implementation=implementation)
    assert changed.apply(other, optimizer if known else None) is other
    assert bool(optimizer.param_groups[0][implementation]) is known
    trained(other, optimizer)
    assert optimizer.param_groups[0][implementation] is True
    reference = make(stock.parameters(), lr=0.05, foreach=False, **options)
    trained(stock, reference)
    for one, two in zip(stock.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-12, atol=1e-14)


def test_a_state_that_is_loaded_is_gone_on_with() -> None:
    stock, other = model(), model()
    first, second = (torch.optim.AdamW(each.parameters(), lr=0.05) for each in (stock, other))
    trained(stock, first)
    other.load_state_dict(copy.deepcopy(stock.state_dict()))
    FUSED.apply(other, second)
    trained(other, second, 1)
    other.load_state_dict(copy.deepcopy(stock.state_dict()))
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    assert not second.param_groups[0]["fused"]
    for network, optimizer in ((stock, first), (other, second)):
        trained(network, optimizer)
    assert second.param_groups[0]["fused"] is True
    for one, two in zip(stock.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-12, atol=1e-14)


def test_a_state_that_was_saved_under_another_plan_is_gone_on_with() -> None:
    saving, loading = model(), model()
    first, second = (torch.optim.AdamW(each.parameters(), lr=0.05) for each in (saving, loading))
    FUSED.apply(saving, first)
    trained(saving, first)
    FOREACH.apply(loading, None)
    loading.load_state_dict(copy.deepcopy(saving.state_dict()))
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    for network, optimizer in ((saving, first), (loading, second)):
        trained(network, optimizer)
    assert (second.param_groups[0]["foreach"], second.param_groups[0]["fused"]) == (True, None)
    for one, two in zip(saving.parameters(), loading.parameters(), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-12, atol=1e-14)


def test_what_the_script_names_itself_is_neither_proposed_nor_predicted() -> None:
    effects = {"optimizer fused AdamW": MeasuredEffect(0.5)}
    named = replace(job(effects), refusals={"optimizer": "the script has fused=True itself"})
    assert OptimizerImplementation.proposed(named) == ()
    with pytest.raises(UnsupportedError, match="does not fit this job; got the script has fused=True itself"):
        FUSED.rewrite(named)


def test_optimizers_of_other_models_stay_as_they_are() -> None:
    own, foreign = model(), model()
    FUSED.apply(own, None)
    optimizer = torch.optim.AdamW(foreign.parameters(), lr=0.05)
    trained(foreign, optimizer, 1)
    assert not optimizer.param_groups[0]["fused"]


class Own(torch.optim.AdamW):
    """May do anything in its step."""


@pytest.mark.parametrize(
    ("make", "options", "said"),
    [
        (Own, {}, "implementation; got Own"),
        (torch.optim.LBFGS, {}, "implementation; got LBFGS"),
        (torch.optim.RMSprop, {}, "implementation; got RMSprop"),
        (torch.optim.AdamW, {"foreach": True}, "chooses an implementation.*foreach=True"),
        (torch.optim.AdamW, {"fused": False}, "chooses an implementation.*fused=False"),
        (torch.optim.SGD, {"differentiable": True}, "differentiable"),
    ],
)
def test_what_would_train_otherwise_is_refused(make: Make, options: dict[str, Any], said: str) -> None:
    network = model()
    optimizer = make(network.parameters(), lr=0.05, **options)
    before = copy.deepcopy(optimizer.param_groups[0])
    with pytest.raises(UnsupportedError, match=said):
        FUSED.apply(network, optimizer)
    for option in ("foreach", "fused"):
        assert optimizer.param_groups[0].get(option) == before.get(option)


def test_types_that_a_kernel_does_not_take_are_refused_in_the_first_step() -> None:
    network = nn.Module()
    network.weight = nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    optimizer = torch.optim.AdamW(network.parameters(), lr=0.05)
    FUSED.apply(network, None)
    with pytest.raises(UnsupportedError, match="torch does not support the fused implementation here"):
        optimizer.step()
