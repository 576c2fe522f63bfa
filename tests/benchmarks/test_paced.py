from __future__ import annotations

import math
import threading

import pytest
import torch
from paced_training import paced
from paced_training.paced import PacedDevice, PacedModel, Pacing

from headway.models.catalogue import MODELS
from headway.models.roofline import step_s
from headway.models.table import Layer, LayerTable, Parameter, Work

TIED = LayerTable(
    "tied",
    "one",
    1,
    (
        Layer("front.words", (Parameter("weight", (8, 4)),), Work(1, 1, 1)),
        Layer("middle", (Parameter("weight", (4, 4)), Parameter("bias", (4,))), Work(1, 1, 1)),
        Layer("head", (Parameter("bias", (8,)),), Work(1, 1, 1), tied=("front.words.weight",)),
    ),
)
AT_ONCE = Pacing(dilation=0.0)


@pytest.mark.parametrize("name", ["resnet50", "bert-base"])
def test_parameters_keep_their_names_order_and_count(name: str) -> None:
    table = MODELS[name]()
    model = PacedModel(table, Pacing(scale=1 / 4096, dilation=0.0))
    assert [key for key, _ in model.named_parameters()] == list(table.parameters)
    for key, parameter in model.named_parameters():
        assert parameter.numel() == max(1, round(table.parameters[key].numel / 4096))


def test_scale_one_keeps_shapes() -> None:
    model = PacedModel(TIED, AT_ONCE)
    assert {key: tuple(p.shape) for key, p in model.named_parameters()} == {
        key: p.shape for key, p in TIED.parameters.items()
    }


def gradient(model: PacedModel, name: str) -> torch.Tensor:
    found = model.get_parameter(name).grad
    assert found is not None
    return found


def test_gradients_follow_the_value_the_step_and_the_rank() -> None:
    first, second = PacedModel(TIED, AT_ONCE), PacedModel(TIED, Pacing(dilation=0.0, rank=1))
    for model in (first, second):
        model().backward()
    value = first.get_parameter("middle.weight")
    assert torch.equal(value, second.get_parameter("middle.weight"))
    assert not torch.equal(gradient(first, "middle.weight"), gradient(second, "middle.weight"))
    noise = (gradient(first, "middle.weight") - 0.1 * value.detach()) / math.cos(1)
    value.grad = None
    first().backward()
    torch.testing.assert_close(gradient(first, "middle.weight"), 0.1 * value.detach() + math.cos(2) * noise)


def test_a_tied_gradient_is_complete_only_at_the_end_of_backward() -> None:
    model = PacedModel(TIED, AT_ONCE)
    order: list[str] = []
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: order.append(name))
    model().backward()
    assert order == ["head.bias", "middle.weight", "middle.bias", "front.words.weight"]


def test_backward_runs_on_the_calling_thread() -> None:
    model = PacedModel(TIED, AT_ONCE)
    threads: list[int] = []
    model.get_parameter("middle.weight").register_hook(lambda _: threads.append(threading.get_ident()))
    model().backward()
    assert threads == [threading.get_ident()]


def test_frozen_parameters_get_no_gradient() -> None:
    model = PacedModel(TIED, AT_ONCE)
    model.get_parameter("middle.weight").requires_grad_(False)
    model().backward()
    assert model.get_parameter("middle.weight").grad is None
    assert gradient(model, "middle.bias").shape == (4,)


class Clocks:
    """Time that passes only when somebody sleeps, computes or waits."""

    def __init__(self) -> None:
        self.now = self.cpu = 0.0
        self.overshoot = 0.0

    def perf_counter(self) -> float:
        return self.now

    def thread_time(self) -> float:
        return self.cpu

    def sleep(self, seconds: float) -> None:
        self.now += seconds + self.overshoot

    def compute(self, seconds: float) -> None:
        self.now += seconds
        self.cpu += seconds


@pytest.fixture
def clocks(monkeypatch: pytest.MonkeyPatch) -> Clocks:
    fake = Clocks()
    monkeypatch.setattr(paced, "time", fake)
    return fake


def test_what_the_host_computes_hides_behind_the_device(clocks: Clocks) -> None:
    device = PacedDevice()
    for _ in range(4):
        device.hold(0.010)
        clocks.compute(0.003)
    device.hold(0.010)
    assert clocks.now == pytest.approx(0.050)


def test_late_waking_does_not_add_up(clocks: Clocks) -> None:
    device = PacedDevice()
    clocks.overshoot = 0.0002
    for _ in range(10):
        device.hold(0.010)
    assert clocks.now == pytest.approx(0.1002)


def test_a_host_slower_than_the_device_decides(clocks: Clocks) -> None:
    device = PacedDevice()
    for _ in range(4):
        device.hold(0.001)
        clocks.compute(0.005)
    assert clocks.now == pytest.approx(0.021)


def test_a_long_computation_is_caught_up_over_several_layers(clocks: Clocks) -> None:
    device = PacedDevice()
    clocks.compute(0.025)
    for _ in range(4):
        device.hold(0.010)
    assert clocks.now == pytest.approx(0.040)


def test_a_wait_delays_the_device(clocks: Clocks) -> None:
    device = PacedDevice()
    device.hold(0.010)
    clocks.now += 0.020
    device.hold(0.010)
    assert clocks.now == pytest.approx(0.040)


def test_a_layer_never_begins_before_the_wait_that_precedes_it_ends(clocks: Clocks) -> None:
    device = PacedDevice()
    clocks.compute(0.015)
    device.hold(0.010)  # the host is 5 ms late, which is not the device's fault
    clocks.now += 0.020  # communication arrives at 35 ms
    device.hold(0.010)
    assert clocks.now == pytest.approx(0.045)


def test_restart_forgets_what_the_host_did_before(clocks: Clocks) -> None:
    device = PacedDevice()
    clocks.compute(5.0)
    device.restart()
    device.hold(0.010)
    assert clocks.now == pytest.approx(5.010)


def test_mark_tells_a_wait_from_what_follows(clocks: Clocks) -> None:
    device = PacedDevice()
    clocks.now += 0.010  # a wait
    device.mark()
    clocks.compute(0.004)  # the optimizer's step, which a device would do later
    device.mark()
    device.hold(0.010)
    assert clocks.now == pytest.approx(0.020)


def test_a_step_takes_the_modelled_time(clocks: Clocks) -> None:
    table = MODELS["resnet50"]()
    model = PacedModel(table, Pacing(scale=1 / 4096, dilation=0.5))
    loss = model()
    assert clocks.now == pytest.approx(0.5 * step_s(table)[0])
    loss.backward()
    assert clocks.now == pytest.approx(0.5 * sum(step_s(table)))
