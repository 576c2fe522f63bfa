"""Compiled modules: what is predicted of them from measurements, and what they do live."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from tests.passes.jobs import DDP, WIDTH, job
from torch import nn
from torch.utils.checkpoint import checkpoint

from headway.errors import UnsupportedError, UserError
from headway.graph.computation import Item, Part, Point, Timeline
from headway.job import Job, MeasuredEffect
from headway.measuring.passes import repeated_modules
from headway.passes.compile import Compile, as_single_graphs
from headway.passes.precision import Precision
from headway.passes.recompute import Recompute
from headway.simulator.simulate import simulate
from headway.strategies.decoupled.policy import DecoupledStrategy
from headway.strategies.live.module_spec import model_spec

ALL = Compile(modules=("0", "1", "2"))
# torch looks at the gradients of whatever a graph is given, also of activations
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")


@pytest.fixture(autouse=True)
def without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs are cut and differentiated as ever, and run by torch's own operators."""
    monkeypatch.setattr("headway.passes.compile.BACKEND", "aot_eager")
    torch._dynamo.reset()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, given: torch.Tensor) -> Any:
        return given + torch.tanh(self.linear(self.norm(given)))


def blocks(count: int = 3) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(count)))


def measured(changed: Compile, forward: float, backward: float, **sizes: float) -> Job:
    effects = {
        changed.effect_name(Part.FORWARD): MeasuredEffect(forward),
        changed.effect_name(Part.BACKWARD): MeasuredEffect(backward),
    }
    return replace(job(blocks(), **sizes), measured=effects)  # type: ignore[arg-type]


@pytest.mark.parametrize(("forward", "backward", "changed_ms"), [(0.5, 0.25, -160), (1.5, 2.0, 200)])
def test_the_step_changes_as_was_measured(forward: float, backward: float, changed_ms: float) -> None:
    """Shorter where it was, and longer where it was, as for regions that graphs break up."""
    plain = measured(ALL, forward, backward)
    difference_ms = simulate(ALL.rewrite(plain), DDP).step_ms - simulate(plain, DDP).step_ms
    assert difference_ms == pytest.approx(changed_ms, abs=1)
    assert ALL.rewrite(plain).model.pass_memory is None, "nobody has watched it"


def test_gradients_that_come_together_cannot_be_hidden() -> None:
    one = Compile(modules=("0",))
    large = DecoupledStrategy(bucket_cap_bytes=2_000, gather="gradients")
    sizes = {"gbps": 0.01, "forward_ms": 10.0, "backward_ms": 20.0}
    longer = [
        simulate(each.rewrite(measured(each, 1, 1, **sizes)), large).step_ms
        - simulate(measured(each, 1, 1, **sizes), large).step_ms
        for each in (one, ALL)
    ]
    assert longer[1] > longer[0] - 1e-6
    assert longer[1] > 0.5


def test_a_region_is_one_graph_in_forward_and_one_in_backward() -> None:
    def items(*words: str) -> tuple[Item, ...]:
        kinds = {
            "u": Point.USE,
            "r": Point.READY,
            "F": Part.FORWARD,
            "B": Part.BACKWARD,
            "E": Point.BACKWARD_END,
        }
        return tuple(Item(kinds[word[0]], word[1:], 5 if word[0] in "FB" else 0) for word in words)

    before = items(
        "uhead", "F", "ua.0", "F", "ua.1", "F", "uz", "F",
        "B", "rz.w", "B", "ra.1.w", "B", "rb.w", "B", "ra.0.b", "ra.0.w", "B", "rhead.w", "E",
    )  # fmt: skip
    after = items(
        "uhead", "F", "ua.0", "ua.1", "uz", "F", "F", "F",
        "B", "rz.w", "B", "B", "rb.w", "B", "ra.1.w", "ra.0.b", "ra.0.w", "B", "rhead.w", "E",
    )  # fmt: skip
    assert as_single_graphs(Timeline(0, 0, before), ["a"]).items == after
    assert as_single_graphs(Timeline(0, 0, before + before), ["a"]).items == after + after, "each by itself"
    assert as_single_graphs(Timeline(0, 0, before), ["c"]).items == before


def test_what_was_not_measured_is_refused_and_not_proposed() -> None:
    with pytest.raises(UnsupportedError, match=r"compile 3 modules.*not measured.*headway measure compile"):
        ALL.rewrite(job(blocks()))
    assert Compile.proposed(job(blocks())) == ()
    assert Compile.proposed(measured(ALL, 0.5, 0.5)) == (ALL,)
    assert Precision.proposed(measured(ALL, 0.5, 0.5)) == ()
    with pytest.raises(UnsupportedError, match="no module of this name"):
        Compile(modules=("7",)).rewrite(measured(ALL, 1, 1))
    assert ALL.permission == "", "what is trained stays the same"


@pytest.mark.parametrize("modules", [[], ["a", "a.b"], [""]])
def test_options_are_checked(modules: list[str]) -> None:
    with pytest.raises(ValidationError):
        Compile.model_validate({"modules": modules})


def gradients(model: nn.Module) -> list[torch.Tensor]:
    given = torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(3))
    model(given).square().mean().backward()
    return [each.grad for each in model.parameters() if each.grad is not None]


def test_gradients_stay_and_so_does_all_else_of_the_model() -> None:
    mine, plain = blocks(), blocks()
    assert ALL.apply(mine, None) is mine
    for one, two in zip(gradients(mine), gradients(plain), strict=True):
        torch.testing.assert_close(one, two)
    assert list(mine.state_dict()) == list(plain.state_dict())
    assert [type(each).__name__ for each in mine] == ["Block"] * 3
    assert all(type(each) is Block for each in copy.deepcopy(mine))
    assert all(type(each) is Block for each in pickle.loads(pickle.dumps(mine)))
    assert model_spec(mine).fingerprint == model_spec(plain).fingerprint


def graphs() -> int:
    """How many graphs have been made since the counters were cleared."""
    made: int = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    return made


def test_modules_of_one_class_share_their_code_and_evaluation_is_not_compiled() -> None:
    torch._dynamo.utils.counters.clear()
    model = ALL.apply(blocks(), None)
    with torch.no_grad():
        model(torch.ones(2, WIDTH))
    assert graphs() == 0
    gradients(model)
    assert graphs() == 2, "of the first, whose input needs no gradient, and of all others"


@pytest.mark.parametrize("reentrant", [False, True])
def test_it_is_not_computed_again_in_backward(reentrant: bool) -> None:
    """Other random numbers would be drawn there, and gradients be those of another forward."""
    model = ALL.apply(blocks(), None)
    given = torch.randn(6, WIDTH, requires_grad=True)
    loss = checkpoint(model, given, use_reentrant=reentrant).sum()
    with pytest.raises(UnsupportedError, match=r"recomputed in backward.*got Block"):
        loss.backward()


def test_classes_have_compiled_forms_of_their_own() -> None:
    torch._dynamo.utils.counters.clear()
    torch.manual_seed(0)
    different = nn.Sequential(*(type(f"Kind{n}", (Block,), {})() for n in range(10)))
    Compile(modules=tuple(map(str, range(10)))).apply(different, None)
    gradients(different)
    assert graphs() == 10, "more than torch keeps of one piece of code"


def test_what_cannot_be_compiled_is_refused_live() -> None:
    with pytest.raises(UnsupportedError, match=r"no such module to compile; got '7'"):
        Compile(modules=("7",)).apply(blocks(), None)
    with pytest.raises(UnsupportedError, match="is already compiled"):
        ALL.apply(ALL.apply(blocks(), None), None)
    inside = blocks()
    inside[1].linear.compile(backend="eager")  # type: ignore[union-attr]
    with pytest.raises(UnsupportedError, match="contains a compiled module; got '1'"):
        ALL.apply(inside, None)
    with pytest.raises(UnsupportedError, match="another pass already changed"):
        ALL.apply(Recompute(modules=("1",)).apply(blocks(), None), None)
    with pytest.raises(UnsupportedError, match="another pass already changed"):
        Recompute(modules=("1",)).apply(ALL.apply(blocks(), None), None)


def test_repeated_modules_are_found() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.few = nn.ModuleList(nn.Linear(2, 2) for _ in range(5))
            self.body = blocks(2)
            self.head = nn.Linear(WIDTH, 2)

    assert repeated_modules(model_spec(Model())) == ("body.0", "body.1")
    assert repeated_modules(model_spec(blocks())) == ("0", "1", "2")
    with pytest.raises(UserError, match="no numbered modules"):
        repeated_modules(model_spec(nn.Sequential(nn.Linear(2, 2))))
