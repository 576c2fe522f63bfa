"""Which tensors of a worker are averaged, and their copies."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from headway.errors import UnsupportedError, UserError
from headway.strategies.decentralised.averaged import Layout, check_module


def module() -> nn.Sequential:
    found = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    found.register_buffer("mask", torch.full((2,), -torch.inf))
    found.get_parameter("2.bias").requires_grad_(False)
    return found


def names(layout: Layout) -> list[str]:
    return [each.name for each in layout.tensors]


def test_policies() -> None:
    model = module()
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(5, 3)).sum().backward()
    optimizer.step()
    parameters = [f"parameter/{name}" for name in ("0.weight", "0.bias", "1.weight", "1.bias", "2.weight")]
    assert names(Layout(model, optimizer, buffers="local", moments="local")) == parameters
    statistics = ["buffer/1.running_mean", "buffer/1.running_var"]
    assert names(Layout(model, optimizer, buffers="averaged", moments="local")) == parameters + statistics
    found = names(Layout(model, optimizer, buffers="local", moments="averaged"))
    assert found[5:7] == ["moment/0.weight/exp_avg", "moment/0.weight/exp_avg_sq"]
    assert not any("step" in name for name in found)


def test_a_round_trip_is_exact_also_in_half_precision_and_in_two_buffers() -> None:
    model = module()
    model[0].half()
    model[2].double()
    layout = Layout(model, None, buffers="averaged", moments="local")
    flat = layout.empty()
    assert layout.fits(flat)
    assert [whole.dtype for whole in flat.wholes] == [torch.float32, torch.float64]
    before = [each.tensor.clone() for each in layout.tensors if each.tensor is not None]
    layout.read(flat)
    for each in layout.tensors:
        assert each.tensor is not None
        each.tensor.zero_()
    layout.write(flat)
    after = [each.tensor for each in layout.tensors if each.tensor is not None]
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))


def test_moments_that_a_worker_lacks_count_as_zeros_and_have_their_place() -> None:
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model[0](torch.ones(2)).sum().backward()  # the second is not used
    optimizer.step()
    some = Layout(model, optimizer, buffers="local", moments="averaged")
    flat = some.empty()
    some.read(flat)
    assert flat.wholes[0][-4:].tolist() == [0.0] * 4
    some.add(flat)  # the worker's own state does not grow
    assert not optimizer.state[model.get_parameter("1.weight")]
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    assert Layout(model, optimizer, buffers="local", moments="averaged").digest == some.digest


def test_what_is_never_negative_stays_so() -> None:
    model = nn.BatchNorm1d(2)
    layout = Layout(model, None, buffers="averaged", moments="local")
    change = layout.empty()
    change.wholes[0].fill_(-3.0)
    layout.add(change)
    assert model.running_var is not None
    assert model.running_var.tolist() == [0.0, 0.0]
    assert model.running_mean is not None
    assert model.running_mean.tolist() == [-3.0, -3.0]


def test_models_that_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="SyncBatchNorm"):
        check_module(nn.Sequential(nn.Linear(1, 1), nn.SyncBatchNorm(1)))
    with pytest.raises(UserError, match="no parameter"):
        check_module(nn.ReLU())
    with pytest.raises(UnsupportedError, match="dtype"):
        check_module(nn.Linear(1, 1, dtype=torch.complex64))
