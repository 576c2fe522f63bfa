"""Where buckets lie and what carries them, what is refused, and what a rank answers while its device is behind."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from headway import torch_private
from headway.errors import UnsupportedError
from headway.strategies.decoupled.checks import check_device_ids, check_module
from headway.strategies.decoupled.shard import ShardedState
from headway.strategies.live.channels.streams import Streams
from headway.strategies.live.channels.wiring import wiring_of

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 1)


@pytest.mark.parametrize(
    ("device", "backends", "native", "buffers", "messages"),
    [
        (CPU, {"cpu": "gloo"}, False, CPU, CPU),
        (CPU, {"cpu": "gloo", "cuda": "nccl"}, False, CPU, CPU),
        (CUDA, {"cpu": "gloo", "cuda": "gloo"}, False, CPU, CPU),
        (CUDA, {"cpu": "gloo", "cuda": "nccl"}, True, CUDA, CPU),
        (CUDA, {"cuda": "nccl"}, True, CUDA, CUDA),
    ],
)
def test_wiring(
    monkeypatch: pytest.MonkeyPatch,
    device: torch.device,
    backends: dict[str, str],
    native: bool,
    buffers: torch.device,
    messages: torch.device,
) -> None:
    monkeypatch.setattr(torch_private, "backends_of", lambda _: backends)
    group: Any = None
    wiring = wiring_of(device, group)
    assert (wiring.native, wiring.buffers, wiring.messages) == (native, buffers, messages)
    assert wiring.pinned == (device == CUDA and buffers == CPU)


def test_a_group_without_the_models_device_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_private, "backends_of", lambda _: {"cuda": "nccl"})
    group: Any = None
    with pytest.raises(UnsupportedError, match=r"device, cpu; got nccl for cuda"):
        wiring_of(CPU, group)


def test_models_on_several_or_other_devices_are_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"0\.weight on meta"):
        check_module(nn.Sequential(nn.Linear(2, 2, device="meta")))
    frozen = nn.Linear(2, 2).requires_grad_(False)
    check_module(nn.Sequential(nn.Linear(2, 2), frozen))


def test_device_ids_may_name_the_models_own_device() -> None:
    assert check_device_ids(CUDA, [1], None)
    assert check_device_ids(CUDA, [torch.device("cuda", 1)], 1)
    assert not check_device_ids(CUDA, None, 1)
    assert not check_device_ids(CPU, None, None)
    assert not check_device_ids(CPU, [], None)


@pytest.mark.parametrize(
    ("device", "ids", "output"),
    [(CUDA, [0], None), (CUDA, [1, 0], None), (CUDA, [1], 0), (CPU, [0], None), (CPU, None, 0)],
)
def test_other_device_ids_are_refused(device: torch.device, ids: Any, output: Any) -> None:
    with pytest.raises(UnsupportedError, match="names a device that"):
        check_device_ids(device, ids, output)


def test_inputs_are_moved_as_by_ddp() -> None:
    one = torch.ones(2)
    inputs, kwargs = torch_private.move_inputs_like_ddp((one, [one, "text"]), {"mask": one}, CPU)
    assert inputs[0] is one
    assert inputs[1][1] == "text"
    assert kwargs["mask"] is one
    assert torch_private.move_inputs_like_ddp((), {}, CPU) == ((), {})
    assert torch_private.move_inputs_like_ddp((), {"mask": one}, CPU) == ((), {"mask": one})


class Mark:
    """An event that is reached when the test says so."""

    def __init__(self) -> None:
        self.reached = False

    def query(self) -> bool:
        return self.reached

    def synchronize(self) -> None:
        self.reached = True


class Behind(Streams):
    """A device that has not come to what it was given."""

    def __init__(self) -> None:
        super().__init__(CPU)
        self.marks: list[Mark] = []

    def mark(self) -> Mark:
        self.marks.append(Mark())
        return self.marks[-1]


def test_a_slower_rank_gets_the_state_that_it_asks_for() -> None:
    device = Behind()
    state = ShardedState(device)
    piece: Any = "piece"
    state.of[piece] = {"step": 0}
    for step in (1, 2, 3):
        state.commit(7, {piece: {"step": step}})
    assert [state.after({7: count}) for count in (1, 2, 3)] == [{piece: {"step": n}} for n in (1, 2, 3)]
    assert all(mark.reached for mark in device.marks)
    state.forget()
    assert state.after({7: 2}) is None
    assert state.after({7: 3}) == {piece: {"step": 3}}


def test_in_memory_nothing_is_kept_of_earlier_states() -> None:
    state = ShardedState(Streams(CPU))
    piece: Any = "piece"
    for step in (1, 2):
        state.commit(7, {piece: {"step": step}})
    assert state.after({7: 1}) is None
    assert state.after({7: 2}) == {piece: {"step": 2}}
