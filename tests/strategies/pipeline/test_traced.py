"""Modules traced and cut, in one process: stage after stage computes what the module does."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.traced_models import GPT, BasicBlock, GPTConfig, ResNet, images, made, tokens
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.checkpoint import checkpoint

from headway.errors import PlanError, UnsupportedError, UserError
from headway.strategies.pipeline.cutting import TracedCut, traced_cut

CPU = torch.device("cpu")


def cut(model: nn.Module, points: tuple[str, ...] = (), stages: int = 0, example: Any = None) -> TracedCut:
    return traced_cut(
        model, stages or len(points) + 1, points, tokens(4) if example is None else example, 2, CPU
    )


def through(found: TracedCut, model: nn.Module, *given: torch.Tensor, training: bool = True) -> Any:
    """What all stages make of a micro-batch."""
    held: Any = given
    for stage in range(len(found.programs)):
        part = found.module(model, stage).train(training)
        held = part(*held) if isinstance(held, tuple) else part(held)
    return found.output(held, training=training)


class Odd(nn.Module):
    """Linear layers ``a`` and ``b``, and what is odd between them."""

    def __init__(self, odd: Callable[[Any, torch.Tensor], Any]) -> None:
        super().__init__()
        self.a, self.b, self.odd = nn.Linear(6, 6), nn.Linear(6, 6), odd
        self.register_buffer("steps", torch.zeros(6))
        self.drop = nn.Dropout(0.5)
        self.act, self.remembering = nn.ReLU(inplace=True), Remembering()
        self.found: Any = None

    def forward(self, x: torch.Tensor) -> Any:
        return self.odd(self, self.a(x))


def rows(count: int = 4) -> torch.Tensor:
    return torch.randn(count, 6, generator=torch.Generator().manual_seed(1))


class Doubled(torch.autograd.Function):
    """Its gradient is thrice what it is."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0] * 6


def random_mask(self: Any, x: torch.Tensor) -> torch.Tensor:
    noise = torch.rand(x.shape[0], 1, device=x.device)
    found: torch.Tensor = self.b(x * (noise > 0.5))
    return found


def in_place(self: Any, x: torch.Tensor) -> torch.Tensor:
    x = x * 1
    x[:, 0] = 0
    x += self.steps + 1
    found: torch.Tensor = self.b(x)
    return found


def without_gradients(self: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        scale = x.abs().max()
    found: torch.Tensor = self.b(x / scale)
    return found


def in_double(self: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        x = F.linear(x, self.a.weight)
    found: torch.Tensor = self.b(x.float())
    return found


@pytest.mark.parametrize(
    "odd",
    [
        random_mask, in_place, without_gradients, in_double,
        lambda self, x: self.b(Doubled.apply(x)),  # type: ignore[no-untyped-call]
        lambda self, x: {"logits": self.b(x), "more": [x.mT, 3], "shape": x.shape},
        lambda self, x: self.b(x) if isinstance(x, torch.Tensor) and x.shape[0] < 9 else None,
        lambda self, x: self.b(F.dropout(x, 0.5, self.training)),
        lambda self, x: self.b(x) + F.linear(x, self.a.weight),
        lambda self, x: self.a(self.b(x)),
        lambda self, x: self.b(x).split(3, dim=1)[1],
        lambda self, x: torch.max(self.b(x), dim=1),
        lambda self, x: self.b(checkpoint(self.drop, x, use_reentrant=False)),
    ],
)  # fmt: skip
@pytest.mark.parametrize("training", [True, False])
def test_stages_compute_what_the_module_does(odd: Callable[[Any, torch.Tensor], Any], training: bool) -> None:
    """Outputs, random numbers, and gradients, those of weights of several stages added up."""
    torch.manual_seed(0)
    model = Odd(odd).train(training)
    found = cut(model, ("b",), example=rows())
    torch.manual_seed(3)
    expected = model(rows(2))
    tensors = [each for each in torch.utils._pytree.tree_leaves(expected) if isinstance(each, torch.Tensor)]
    gradients = torch.autograd.grad(tensors[0].double().sum(), [*model.parameters()], retain_graph=True)
    torch.manual_seed(3)
    once = through(found, model, rows(2), training=training)
    torch.testing.assert_close(once, expected, rtol=0, atol=0)
    assert type(once) is type(expected)
    tensors = [each for each in torch.utils._pytree.tree_leaves(once) if isinstance(each, torch.Tensor)]
    for own, other in zip(
        torch.autograd.grad(tensors[0].double().sum(), [*model.parameters()]), gradients, strict=True
    ):
        torch.testing.assert_close(own, other)


def assigns(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.found = x
    found: torch.Tensor = self.b(x)
    return found


def changes_a_buffer(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.steps += 1
    found: torch.Tensor = self.b(x)
    return found


def checkpoints_a_function(self: Any, x: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = self.b(checkpoint(lambda y: self.drop(y) * 2, x, use_reentrant=False))
    return found


class Memory:
    """Of what it was given."""

    def __init__(self) -> None:
        self.seen: list[torch.Tensor] = []


class Remembering(nn.Module):
    """Adds up what it was given."""

    def forward(self, x: torch.Tensor, memory: Memory) -> torch.Tensor:
        memory.seen.append(x)
        return torch.stack(memory.seen).sum(0)


def remembers(self: Any, x: torch.Tensor) -> torch.Tensor:
    memory = Memory()
    found: torch.Tensor = self.b(self.remembering(self.remembering(x, memory), memory))
    return found


def decides(self: Any, x: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = self.b(x) if x.sum() > 0 else self.a(x)
    return found


@pytest.mark.parametrize(
    ("odd", "says"),
    [
        (decides, "cannot be traced: it branches on the value of a tensor"),
        (lambda self, x: self.b(x * x.max().item()), "branches on the value of a tensor"),
        (lambda self, x: self.b(x * random.random()), "draws random numbers with Python or numpy"),
        (assigns, "assigns attributes, which the stages would not; got model.found"),
        (changes_a_buffer, "changes a parameter or a buffer between modules; got steps"),
        (checkpoints_a_function, "passes on a closure or a function with default arguments"),
        (remembers, "passes on an object that holds tensors .*; got Memory"),
        (lambda self, x: (self.b(x), self.a.bias), "returns a tensor that it did not compute"),
        (lambda self, x: self.b(self.missing(x)), "failed on tensors without values; got AttributeError"),
    ],
)  # fmt: skip
def test_a_forward_that_calls_do_not_tell_all_of_is_refused(odd: Any, says: str) -> None:
    """And the model is left as it was."""
    model = Odd(odd)
    before = {name: each.clone() for name, each in model.state_dict().items()}
    drawn = random.getstate()
    with pytest.raises(UnsupportedError, match=says):
        cut(model, ("b",), example=rows())
    assert random.getstate() == drawn
    assert model.found is None
    assert nn.Module.__call__.__name__ != "called"
    for name, each in model.state_dict().items():
        assert torch.equal(each, before[name])


@pytest.mark.parametrize(
    ("other", "is_refused"),
    [(lambda x: x.mT, True), (lambda x: x.detach(), True), (lambda x: x * 2, False), (torch.sigmoid, False)],
)
def test_a_stage_may_change_what_it_is_given_unless_another_tensor_has_its_memory(
    other: Callable[[torch.Tensor], torch.Tensor], is_refused: bool
) -> None:
    """Changed in place by a module, whose call does not say so."""

    def odd(self: Any, x: torch.Tensor) -> torch.Tensor:
        y = other(x)
        found: torch.Tensor = self.b(self.act(x) + y.reshape(x.shape))
        return found

    model = Odd(odd)
    if is_refused:
        with pytest.raises(UnsupportedError, match="another received tensor shares its memory; got act"):
            cut(model, ("act",), example=rows())
        return
    found = cut(model, ("act",), example=rows())
    assert torch.equal(through(found, model, rows(2)), model(rows(2)))


def test_a_model_is_as_it_was_before() -> None:
    """Statistics of batch norm, gradients, modes, random numbers."""
    model = made(ResNet)
    model.get_submodule("bn1").eval()
    before = {name: each.clone() for name, each in model.state_dict().items()}
    modes, state = [each.training for each in model.modules()], torch.random.get_rng_state()
    cut(model, ("layer2",), example=images(4))
    assert all(torch.equal(each, before[name]) for name, each in model.state_dict().items())
    assert [each.training for each in model.modules()] == modes
    assert torch.equal(torch.random.get_rng_state(), state)
    assert all(each.grad is None for each in model.parameters())


def test_names_of_all_stages_are_those_of_the_model() -> None:
    model = made(lambda: GPT(GPTConfig(layers=3)))
    found = cut(model, ("transformer.h.1", "transformer.ln_f"))
    parts = [found.module(model, stage) for stage in range(3)]
    assert set().union(*(part.state_dict() for part in parts)) == model.state_dict().keys()
    assert found.stages_of("lm_head.weight") == (2,)
    assert parts[0].get_parameter("transformer.wte.weight") is parts[2].get_parameter("lm_head.weight")
    assert [name for name, _ in parts[2].named_parameters()] == [
        "transformer.ln_f.weight", "transformer.ln_f.bias", "lm_head.weight",
    ]  # fmt: skip


def test_masks_are_made_by_every_stage_and_not_sent() -> None:
    class Causal(GPT):
        def forward(self, idx: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
            length = idx.shape[1]
            mask = torch.ones(length, length, dtype=torch.bool, device=idx.device).tril()
            x = self.transformer["wte"](idx)
            for block in self.transformer["h"].children():
                x = block(x, mask)
            found: torch.Tensor = self.lm_head(x)
            return found

    model = made(Causal)
    found = cut(model, ("transformer.h.1", "transformer.h.3"))
    assert [len(own) for own in found.boundaries] == [1, 1]
    assert torch.equal(through(found, model, tokens(2)), model(tokens(2)))


def test_the_default_cut_looks_into_what_is_large() -> None:
    """A wrapper around a model is no obstacle."""

    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.backbone = GPT(GPTConfig(layers=4))

        def forward(self, idx: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = self.backbone(idx)
            return found

    model = made(Wrapped)
    found = cut(model, stages=2)
    first = [name for name in found.names[0] if name.endswith("ln_1.weight")]
    assert len(first) == 2
    assert torch.equal(through(found, model, tokens(2)), model(tokens(2)))


@pytest.mark.parametrize(
    ("points", "stages", "says"),
    [
        (("transformer.g.1",), 2, "that the model does not have; got transformer.g.1; expected .*transformer.h.1"),
        (("transformer.h",), 2, "a module that forward does not call; got transformer.h; expected .*transformer.h.0"),
        (("transformer.h.3", "transformer.h.1"), 3, "do not give one stage per rank"),
        (("transformer.h.1",), 3, "do not give one stage per rank; .* expected 2 modules"),
        (("transformer.wte",), 2, "a stage has no parameters to train; got stage 0"),
        (("transformer.drop", "transformer.h.0"), 3, "a stage has no parameters to train; got stage 1"),
        ((), 40, "too few places where a single tensor passes on; .* Choose split_points from transformer.wpe"),
    ],
)  # fmt: skip
def test_points_at_which_no_stage_can_begin_are_refused(
    points: tuple[str, ...], stages: int, says: str
) -> None:
    with pytest.raises(PlanError, match=says):
        cut(made(GPT), points, stages)


def test_calls_of_pipe_split_have_to_be_as_many_as_stages() -> None:
    model = made(lambda: GPT(GPTConfig(splits=True)))
    with pytest.raises(
        PlanError, match=r"pipe_split\(\) calls do not give one stage per rank; got 2 calls; expected 1"
    ):
        cut(model, stages=2)
    assert cut(model, stages=3).stages_of("transformer.h.2.ln_1.weight") == (1,)
    assert cut(model, ("transformer.h.2",)).stages_of("transformer.h.2.ln_1.weight") == (1,), (
        "points go first"
    )


def test_what_several_stages_would_keep_statistics_of_is_refused() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = BasicBlock(3, 3, 1), nn.Conv2d(3, 3, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = self.a(self.b(self.a(x)))
            return found

    with pytest.raises(UnsupportedError, match="several stages call a module with running statistics"):
        cut(Shared().double(), ("b",), example=images(4))


def test_hooks_of_what_is_divided_are_refused_and_others_are_called() -> None:
    model, calls = made(GPT), list[int]()
    model.get_submodule("transformer.h.1").register_forward_hook(lambda *_: calls.append(1))
    found = cut(model, ("transformer.h.2",))
    calls.clear()
    through(found, model, tokens(2))
    assert calls == [1]
    model.register_forward_hook(lambda *_: None)
    with pytest.raises(UnsupportedError, match="has hooks, which no rank could call"):
        cut(model, ("transformer.h.2",))


def test_an_evaluation_that_hands_on_something_else_is_said() -> None:
    class Auxiliary(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

        def forward(self, x: torch.Tensor) -> Any:
            x = self.a(x)
            return (self.b(x), x) if self.training else self.b(x.double().float())

    assert cut(Auxiliary(), ("b",), example=rows()).not_evaluated == ""

    class Wider(Auxiliary):
        def forward(self, x: torch.Tensor) -> Any:
            x = self.a(x)
            y = x * 2
            found = self.b(x)
            return found + y if self.training else found

    said = cut(Wider(), ("b",), example=rows()).not_evaluated
    assert "exchange different tensors in evaluation than in training" in said


@pytest.mark.parametrize("example", [tokens(5), torch.tensor(1.0), {}, (tokens(4), tokens(6))])
def test_examples_that_do_not_split_are_refused(example: Any) -> None:
    with pytest.raises(UserError, match="cannot split example_batch into micro-batches of equal size"):
        cut(made(GPT), ("transformer.h.2",), example=example)


def test_models_of_dtensors_are_refused() -> None:
    class DTensorLike(torch.Tensor): ...

    model = made(GPT)
    model.register_buffer("sharded", torch.zeros(2).as_subclass(DTensorLike))
    with pytest.raises(
        UnsupportedError, match="cannot split a model with DTensor parameters into stages; got sharded"
    ):
        cut(model, ("transformer.h.2",))
