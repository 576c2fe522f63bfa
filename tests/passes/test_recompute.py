from __future__ import annotations

import copy
import pickle
from dataclasses import replace

import pytest
import torch
from tests.passes.jobs import BATCH, DDP, MS, WIDTH, job, predicted_peak, time_ns
from torch import nn
from torch.nn.utils import parametrizations

from headway.errors import UnsupportedError
from headway.graph.computation import Part
from headway.job import Job
from headway.passes.recompute import Recompute
from headway.simulator.simulate import simulate
from headway.strategies.live.module_spec import model_spec

BLOCKS = 6
ALL = tuple(f"blocks.{number}" for number in range(BLOCKS))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.widen = nn.Linear(WIDTH, 4 * WIDTH)
        self.drop = nn.Dropout(0.3)
        self.narrow = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        narrowed: torch.Tensor = self.narrow(
            self.drop(torch.nn.functional.gelu(self.widen(self.norm(given))))
        )
        return given + narrowed


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(BLOCKS)))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.blocks(self.stem(given)))
        return out


def stack() -> Stack:
    torch.manual_seed(0)
    return Stack()


@pytest.mark.parametrize("modules", [ALL, ALL[:3], ALL[3:], ("blocks",), ("blocks.2",)], ids=len)
def test_the_predicted_peak_is_the_one_that_is_watched(modules: tuple[str, ...]) -> None:
    recompute = Recompute(modules=modules)
    plain = job(stack())
    live = stack()
    assert recompute.apply(live, None) is live
    measured = job(live)
    before, predicted, found = map(predicted_peak, (plain, recompute.rewrite(plain), measured))
    assert predicted == pytest.approx(found, rel=0.05)
    if modules == ALL:
        assert found < 0.75 * before


def test_gradients_buffers_and_random_numbers_stay_the_same() -> None:
    models = [stack(), stack()]
    Recompute(modules=ALL).apply(models[1], None)
    drawn: list[torch.Tensor] = []
    given = torch.randn(BATCH, WIDTH)
    for model in models:
        torch.manual_seed(1)
        for _ in range(2):
            model(given).square().mean().backward()
        drawn.append(torch.rand(3))  # the generator is where it would be
    for (name, one), other in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        assert one.grad is not None
        assert other.grad is not None
        assert torch.equal(one.grad, other.grad), name
    kept = [dict(model.named_buffers()) for model in models]
    assert kept[0].keys() == kept[1].keys()
    for name, buffer in kept[0].items():
        assert torch.equal(buffer, kept[1][name]), name
    assert torch.equal(*drawn)
    assert models[0].state_dict().keys() == models[1].state_dict().keys()


class Remembering(nn.Module):
    """Its forward uses a buffer that it has just changed; another begins to change at ``begins``."""

    level: torch.Tensor
    late: torch.Tensor

    def __init__(self, begins: int = 1000) -> None:
        super().__init__()
        self.inner = parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))
        self.register_buffer("level", torch.ones(WIDTH))
        self.register_buffer("late", torch.ones(WIDTH))
        self.begins, self.calls = begins, 0

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.level = 0.9 * self.level + 0.1 * given.detach().mean(0)
        if self.calls > self.begins:
            self.late.mul_(0.5)
        used: torch.Tensor = self.inner(given) * self.level * self.late
        return used


def test_buffers_that_forward_changes_and_uses_are_as_it_found_them() -> None:
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(nn.Sequential(nn.Linear(WIDTH, WIDTH), Remembering(), Remembering()))
    Recompute(modules=("1", "2")).apply(models[1], None)
    torch.manual_seed(2)
    for _ in range(3):
        given = torch.randn(2, BATCH, WIDTH)
        for model in models:
            (model(given[0]).square().mean() + model(given[1]).square().mean()).backward()
    for (name, one), other in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        assert one.grad is not None
        assert other.grad is not None
        assert torch.equal(one.grad, other.grad), name
    for (name, own), others in zip(models[0].named_buffers(), models[1].buffers(), strict=True):
        assert torch.equal(own, others), name


def test_statistics_that_are_switched_on_later_are_those_of_one_forward() -> None:
    """As in fine-tuning, whose first epochs leave batch norm as it is."""
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Sequential(nn.BatchNorm1d(WIDTH), nn.Tanh())))
    Recompute(modules=("1",)).apply(models[1], None)
    given = torch.randn(BATCH, WIDTH)
    for training in (False, True, True, False):
        for model in models:
            model.train(training)
            model.zero_grad()
            model(given).square().mean().backward()
        for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
            assert one.grad is not None
            assert other.grad is not None
            assert torch.equal(one.grad, other.grad)
        for own, others in zip(models[0].buffers(), models[1].buffers(), strict=True):
            assert torch.equal(own, others)


def test_a_buffer_that_begins_to_change_later_is_refused() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Remembering(begins=2))
    Recompute(modules=("1",)).apply(model, None)
    given = torch.randn(BATCH, WIDTH)
    model(given).square().mean().backward()
    with pytest.raises(UnsupportedError, match="late of a Remembering"):
        model(given).square().mean().backward()


def test_a_copy_is_of_the_original_class_and_of_its_own_parameters() -> None:
    model = stack()
    Recompute(modules=ALL).apply(model, None)
    pickled = pickle.loads(pickle.dumps(model))
    assert all(type(each) is Block for each in pickled.blocks)
    copied = copy.deepcopy(model)
    assert all(type(each) is Block for each in copied.blocks)
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.zero_()
    assert copied(torch.ones(BATCH, WIDTH)).abs().sum() == 0


def test_backward_takes_as_much_longer_as_the_modules_take() -> None:
    plain = job(stack())
    (before,) = plain.steps.timelines[0]
    (after,) = Recompute(modules=ALL[1:3]).rewrite(plain).steps.timelines[0]
    assert time_ns(after, Part.FORWARD) == time_ns(before, Part.FORWARD)
    own_ns = 2 * 3 * 80 * MS / (2 + 3 * BLOCKS)
    assert time_ns(after, Part.BACKWARD) - time_ns(before, Part.BACKWARD) == pytest.approx(own_ns, abs=10)
    # Gradients of what is behind the regions are ready no later.
    moments = []
    for timeline in (before, after):
        now, ready = 0, {}
        for item in timeline.items:
            now += item.duration_ns
            if item.kind == "ready":
                ready[item.name] = now
        moments.append(ready)
    late_ns = {name: moments[1][name] - moments[0][name] for name in moments[0]}
    assert late_ns["head.weight"] == late_ns["blocks.3.norm.weight"] == 0
    assert late_ns["blocks.2.narrow.bias"] == pytest.approx(own_ns / 2, abs=10)
    assert late_ns["stem.weight"] == pytest.approx(own_ns, abs=10)


def test_it_slows_a_job_that_computes_and_hardly_one_that_communicates() -> None:
    """It costs time, and less where backward waits for the network; it always saves memory."""
    changes = []
    for gbps in (1000.0, 0.01):
        plain = job(stack(), gbps=gbps, forward_ms=8, backward_ms=16)
        again = Recompute(modules=ALL).rewrite(plain)
        changes.append(simulate(again, DDP).step_ms / simulate(plain, DDP).step_ms)
        assert predicted_peak(again) < predicted_peak(plain)
    quick, slow = changes
    assert quick == pytest.approx(1 + 8 * 18 / 20 / 24, rel=0.02)
    assert 1 <= slow < quick


def test_what_is_proposed_is_ever_more_of_the_blocks() -> None:
    found = Recompute.proposed(job(stack()))
    assert [len(each.modules) for each in found] == [2, 3, 6]
    assert set(found[-1].modules) == set(ALL)
    assert Recompute.proposed(Job.of(model_spec(stack()))) == ()


@pytest.mark.parametrize(
    ("modules", "said"),
    [(("nowhere",), "no module of this name"), (("blocks.1.drop",), "no module of this name")],
)
def test_modules_that_there_are_not_are_refused_in_replay(modules: tuple[str, ...], said: str) -> None:
    with pytest.raises(UnsupportedError, match=said):
        Recompute(modules=modules).rewrite(job(stack()))


def test_what_was_not_watched_is_refused() -> None:
    plain = job(stack())
    unwatched = replace(plain, stages=(plain.model.model_copy(update={"pass_memory": None}),))
    with pytest.raises(UnsupportedError, match="lacks the memory that modules keep"):
        Recompute(modules=ALL).rewrite(unwatched)


def test_modules_that_cannot_recompute_are_refused_live() -> None:
    with pytest.raises(UnsupportedError, match="no such module to recompute"):
        Recompute(modules=("nowhere",)).apply(stack(), None)
    twice = stack()
    Recompute(modules=("blocks.1",)).apply(twice, None)
    with pytest.raises(UnsupportedError, match="already changed the module"):
        Recompute(modules=("blocks",)).apply(twice, None)
    patched = stack()
    patched.stem.forward = lambda given: given  # type: ignore[method-assign,assignment]
    with pytest.raises(UnsupportedError, match="forward was replaced"):
        Recompute(modules=("stem",)).apply(patched, None)


def test_regions_within_each_other_are_no_pass() -> None:
    with pytest.raises(ValueError, match="lies within another"):
        Recompute(modules=("blocks", "blocks.1"))
