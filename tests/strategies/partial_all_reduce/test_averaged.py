"""Which tensors of a worker are averaged, and their copies."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from headway.errors import UnsupportedError, UserError
from headway.strategies.live.averaged import (
    Flat,
    Layout,
    check_module,
    training_layout,
    whole_layout,
)
from headway.strategies.partial_all_reduce.rounds import mean_of


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
    assert names(training_layout(model, optimizer, buffers="local", moments="local")) == parameters
    statistics = ["buffer/1.running_mean", "buffer/1.running_var"]
    assert (
        names(training_layout(model, optimizer, buffers="averaged", moments="local"))
        == parameters + statistics
    )
    found = names(training_layout(model, optimizer, buffers="local", moments="averaged"))
    assert found[5:7] == ["moment/0.weight/exp_avg", "moment/0.weight/exp_avg_sq"]
    assert not any("step" in name for name in found)


def test_a_round_trip_is_exact_also_in_half_precision_and_in_two_buffers() -> None:
    model = module()
    model[0].half()
    model[2].double()
    layout = training_layout(model, None, buffers="averaged", moments="local")
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
    some = training_layout(model, optimizer, buffers="local", moments="averaged")
    flat = some.empty()
    some.read(flat)
    assert flat.wholes[0][-4:].tolist() == [0.0] * 4
    some.add(flat)  # the worker's own state does not grow
    assert not optimizer.state[model.get_parameter("1.weight")]
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    assert training_layout(model, optimizer, buffers="local", moments="averaged").digest == some.digest


def test_what_would_become_negative_and_never_is_stays_as_it_is() -> None:
    model = nn.BatchNorm1d(2)
    layout = training_layout(model, None, buffers="averaged", moments="local")
    change = layout.empty()
    change.wholes[0].fill_(-3.0)
    layout.add(change)
    assert model.running_var is not None
    assert model.running_var.tolist() == [1.0, 1.0]
    assert model.running_mean is not None
    assert model.running_mean.tolist() == [-3.0, -3.0]


def test_moments_stay_together_where_one_would_become_negative() -> None:
    """A first moment without its second one would make the next step huge."""
    model = nn.Linear(2, 1, bias=False)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    state = optimizer.state[model.weight]
    before = {key: value.clone() for key, value in state.items()}
    layout = training_layout(model, optimizer, buffers="local", moments="averaged")
    change = layout.empty()
    change.wholes[0].copy_(torch.tensor([1.0, 1.0, -0.05, -0.05, -1.0, -1e-4]))  # weight, exp_avg, exp_avg_sq
    layout.add(change)
    added = {key: (state[key] - before[key]).flatten().tolist() for key in ("exp_avg", "exp_avg_sq")}
    assert added["exp_avg"] == pytest.approx([0.0, -0.05])
    assert added["exp_avg_sq"] == pytest.approx([0.0, -1e-4])


def test_what_was_averaged_goes_on_being_so_when_it_is_frozen() -> None:
    model = module()
    layout = training_layout(model, None, buffers="local", moments="local")
    model.get_parameter("0.weight").requires_grad_(False)
    later = training_layout(model, None, buffers="local", moments="local", earlier=layout.parameters)
    assert later.digest == layout.digest
    assert "parameter/2.bias" not in names(later)


def test_the_whole_model_has_frozen_parameters_and_all_saved_buffers() -> None:
    model = module()
    model.register_buffer("scratch", torch.ones(3), persistent=False)
    model.register_buffer("odd", torch.tensor([True, False, True]))
    layout = whole_layout(model, buffers="averaged")
    assert "parameter/2.bias" in names(layout)
    assert [each.name for each in layout.tensors if each.wire is torch.uint8] == [
        "torch.float32/mask", "torch.bool/odd", "torch.int64/1.num_batches_tracked"
    ]  # fmt: skip
    before = {name: value.clone() for name, value in model.state_dict().items()}
    flat = layout.empty()
    layout.read(flat)
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.zero_()
    layout.write(flat)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    local = whole_layout(model, buffers="local")
    assert {each.name for each in local.tensors if each.wire is torch.uint8} >= {
        "torch.float32/1.running_mean"
    }


def test_a_mean_of_equal_values_is_exact_and_what_is_no_number_is_the_first_ones() -> None:
    own = Flat([torch.tensor([0.1, 0.7, -torch.inf]), torch.tensor([1, 2], dtype=torch.uint8)])
    other = Flat([torch.tensor([0.1, 0.1, -torch.inf]), torch.tensor([9, 9], dtype=torch.uint8)])
    into = Flat([torch.empty(3), torch.empty(2, dtype=torch.uint8)])
    mean_of([own, own, other], into)
    assert into.wholes[0][:2].tolist() == pytest.approx([0.1, 0.5])
    assert into.wholes[0][0] == own.wholes[0][0]
    assert into.wholes[1].tolist() == [1, 2]


def test_models_that_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="SyncBatchNorm"):
        check_module(nn.Sequential(nn.Linear(1, 1), nn.SyncBatchNorm(1)))
    with pytest.raises(UserError, match="no parameter"):
        check_module(nn.ReLU())
    with pytest.raises(UnsupportedError, match="dtype"):
        check_module(nn.Linear(1, 1, dtype=torch.complex64))
