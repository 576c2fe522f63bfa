"""What a worker accepts of a peer's state."""

from __future__ import annotations

import socket
import threading
import time
from typing import Any

import pytest
import torch
from torch import nn

from headway.errors import CommunicationError, UserError
from headway.rpc import frames
from headway.strategies.partial_all_reduce import joining
from headway.strategies.partial_all_reduce.coordinator.messages import Member
from headway.strategies.partial_all_reduce.joining import (
    Snapshots,
    WorkerState,
    fetch,
    state_of,
    take_over,
    take_over_moments,
)
from headway.strategies.partial_all_reduce.peers import Peers, PeerServer

SECRET = b"secret"
OWN = Member(1, 0, "127.0.0.1:1", "here")


def trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).bfloat16()
    optimizer = torch.optim.Adam(module.parameters(), lr=0.1)
    module(torch.randn(6, 3, dtype=torch.bfloat16)).square().sum().backward()
    optimizer.step()
    return module, optimizer


def server_of(handler: Any) -> tuple[PeerServer, Member]:
    server = PeerServer("127.0.0.1", SECRET)
    server.handle("state", handler)
    return server, Member(0, 0, server.address, "there")


def test_a_worker_takes_over_all_but_hyper_parameters() -> None:
    module, optimizer = trained()
    snapshots: Snapshots[WorkerState] = Snapshots(lambda: state_of(module, optimizer, 7))
    snapshots.rest()
    server, peer = server_of(lambda c, _h, _p, deadline: joining.give(snapshots, c, deadline))
    own = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).bfloat16()
    adam = torch.optim.Adam(own.parameters(), lr=0.5)
    state = fetch(Peers(SECRET), [peer], OWN, own, 30.0)
    take_over(state, own)
    take_over_moments(state, own, adam)
    server.close()
    assert state.iteration == 7
    assert all(torch.equal(a, b) for a, b in zip(module.parameters(), own.parameters(), strict=True))
    assert all(torch.equal(a, b) for a, b in zip(module.buffers(), own.buffers(), strict=True))
    assert adam.param_groups[0]["lr"] == 0.5
    for theirs, mine in zip(module.parameters(), own.parameters(), strict=True):
        assert optimizer.state[theirs].keys() == adam.state[mine].keys()
        assert all(
            torch.equal(optimizer.state[theirs][key], adam.state[mine][key]) for key in adam.state[mine]
        )
    with pytest.raises(UserError, match="different optimizer"):
        take_over_moments(state, own, torch.optim.SGD(own.parameters(), lr=0.1))


def test_a_worker_that_has_just_joined_hands_on_moments_that_its_optimizer_has_yet_to_get() -> None:
    module, optimizer = trained()
    given = state_of(module, optimizer, 7)
    own = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).bfloat16()
    take_over(given, own)
    handed_on = joining.with_moments_of(state_of(own, None, 7), given)
    assert handed_on.optimizer == "Adam"
    assert handed_on.tensors.keys() == given.tensors.keys()
    assert all(torch.equal(handed_on.tensors[name], given.tensors[name]) for name in given.tensors)
    assert handed_on.scalars == given.scalars


def good_header(module: nn.Module) -> dict[str, Any]:
    state = state_of(module, None, 0)
    tensors = [[n, str(t.dtype).removeprefix("torch."), list(t.shape)] for n, t in state.tensors.items()]
    return {"iteration": 0, "optimizer": "", "scalars": {}, "averaged": [], "tensors": tensors}


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"iteration": "0"}, CommunicationError),
        ({"tensors": 5}, CommunicationError),
        ({"tensors": [["parameter/weight", "object", [2, 2]]]}, CommunicationError),
        ({"tensors": [["parameter/weight", "float32", [-1]]]}, CommunicationError),
        ({"tensors": [["parameter/weight", "float32", [2, 3]]]}, UserError),
        ({"tensors": []}, UserError),
        ({"scalars": {"moment/other/step": 1}}, CommunicationError),
        ({"scalars": {"moment/weight/step": [1]}}, CommunicationError),
        ({"more": [["moment/weight/exp_avg", "float32", [10**9]]]}, CommunicationError),
        ({"more": [[f"moment/weight/{n}", "float32", [1]] for n in range(99)]}, CommunicationError),
    ],
)
def test_what_nobody_would_send_is_refused_before_anything_is_written(
    change: dict[str, Any], error: type[Exception]
) -> None:
    module = nn.Linear(2, 2, bias=False)
    header = good_header(module)
    header["tensors"] = header["tensors"] + change.pop("more", [])
    header |= change

    def give(connection: socket.socket, _header: Any, _payload: bytes, deadline: float) -> None:
        frames.send(connection, header, b"", deadline)
        frames.send_raw(connection, b"\0" * 4096, deadline)

    server, peer = server_of(give)
    before = module.weight.detach().clone()
    with pytest.raises(error):
        fetch(Peers(SECRET), [peer], OWN, module, 0.5)
    server.close()
    assert torch.equal(module.weight, before)


def test_a_snapshot_is_taken_between_steps_for_who_waits() -> None:
    taken: list[int] = []
    value = [0]
    snapshots = Snapshots(lambda: value[0])
    waiting = threading.Thread(target=lambda: taken.append(snapshots.get(time.monotonic() + 30.0)))
    waiting.start()
    while not snapshots._waiting:
        time.sleep(0.001)
    value[0] = 5
    snapshots.rest()
    snapshots.resume()
    value[0] = 6
    waiting.join(30.0)
    assert taken == [5]
    with pytest.raises(TimeoutError):
        snapshots.get(time.monotonic())
