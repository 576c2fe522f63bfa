"""What ranks do for the tests of the decoupled runtime itself: overlap, lone readers, ends of all kinds."""

from __future__ import annotations

import gc
import socket
import struct
import sys
import threading
import time
import warnings
from contextlib import ExitStack, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from headway import torch_private
from headway.errors import CommunicationError
from headway.strategies.decoupled.deferred import DeferredParameter
from headway.strategies.decoupled.peers import Limits
from headway.strategies.decoupled.policy import DecoupledStrategy
from headway.strategies.decoupled.wrapper import DecoupledDataParallel
from headway.strategies.live.channels import observer as observing
from headway.strategies.live.channels.observer import Collective
from headway.strategies.live.reads import install
from headway.strategies.registry import plugin_of

STORE_TIMEOUT = timedelta(seconds=60)


class Log:
    """An observer that keeps everything."""

    wants_transfers = False

    def __init__(self) -> None:
        self.events: list[tuple[str, str, int]] = []
        self.sequences: list[tuple[int, str, int]] = []

    def collective(self, done: Collective) -> None:
        assert 0 < done.enqueue_ns <= done.end_ns
        assert done.start_ns <= done.end_ns
        assert done.size_bytes > 0
        assert done.algorithm == "ring"
        self.sequences.append((done.sequence, done.name, done.bucket))
        self.events.append(("done", done.name, done.bucket))

    def wait(self, name: str, bucket: int, start_ns: int, end_ns: int) -> None:
        assert start_ns <= end_ns
        self.events.append(("wait", name, bucket))

    def update(self, owner: object, bucket: int, start_ns: int, end_ns: int) -> None:
        assert start_ns <= end_ns
        self.events.append(("update", "update", bucket))

    def background_update(self, owner: object, bucket: int, start_ns: int, end_ns: int) -> None:
        assert start_ns <= end_ns
        self.events.append(("background update", "update", bucket))

    def mark(self, what: str) -> None:
        self.events.append(("mark", what, -1))


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(6, 6) for _ in range(4))).double()


def step(wrapped: Any, optimizer: torch.optim.Optimizer, rank: int, index: int = 0) -> None:
    optimizer.zero_grad()
    wrapped(torch.full((2, 6), float(rank + index), dtype=torch.float64)).sum().backward()
    optimizer.step()


def overlap(rank: int, world_size: int) -> dict[str, Any]:
    """Two steps; rank 1 begins its backward when rank 0 is in its next forward: one that waits in step() would hang."""
    log = Log()
    observing.set_observer(log)
    wrapped = DecoupledDataParallel(model(), bucket_cap_mb=1e-6)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.01)
    x = torch.ones(2, 6, dtype=torch.float64)
    order: list[int] = []
    for index, layer in enumerate(wrapped.module):
        layer.register_forward_hook(lambda *_, index=index: order.append(index))
    store = torch_private.default_store()
    for index in range(2):
        loss = wrapped(x).sum()
        if rank == 1:
            store.wait([f"forward-{index}"], STORE_TIMEOUT)
            time.sleep(0.1)
        loss.backward()
        log.mark("step begins")
        optimizer.step()
        log.mark("step ends")
        all_deferred = all(type(p) is DeferredParameter for p in wrapped.parameters())
        optimizer.zero_grad()
        log.mark("forward begins")
        store.set(f"forward-{index}", "")
    wrapped(x)
    wrapped.flush()
    observing.set_observer(None)
    return {"events": log.events, "sequences": log.sequences, "all_deferred": all_deferred,
            "switch_interval_s": sys.getswitchinterval(), "gather": wrapped.schedule.gather}  # fmt: skip


def lone_reader(rank: int, world_size: int) -> list[float]:
    """Rank 0 alone looks at gradients, in every place where it may, and saves checkpoints."""
    wrapped = DecoupledDataParallel(model(), bucket_cap_mb=0.0004)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.01, momentum=0.9)
    for index in range(4):
        step(wrapped, optimizer, rank, index)
        if rank == 0:
            wrapped.state_dict()
            optimizer.state_dict()
        wrapped(torch.ones(2, 6, dtype=torch.float64)).sum().backward()
        if rank == 0 and index % 2:
            assert all(p.grad is not None for p in wrapped.parameters())
        dist.barrier()  # a reader that needed the others' next step would wait here for ever
        wrapped(torch.ones(2, 6, dtype=torch.float64)).sum().backward()
        optimizer.step()
    return [p.sum().item() for p in wrapped.parameters()]


def drift_under_stock_ddp(rank: int, world_size: int) -> list[str]:
    """The warnings of a script whose ranks would drift apart under stock DDP, in two ways, each of them twice."""
    inner = model()
    inner[0].requires_grad_(False)
    inner[1].requires_grad_(False)
    wrapped = DecoupledDataParallel(inner, bucket_cap_mb=0.0004)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.01)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        step(wrapped, optimizer, rank, 0)
        inner[3].requires_grad_(False)
        step(wrapped, optimizer, rank, 1)
        inner[3].requires_grad_(True)  # in stock DDP's buckets all the time
        step(wrapped, optimizer, rank, 2)
        assert not caught
        for index in (1, 0):
            inner[index].requires_grad_(True)
            step(wrapped, optimizer, rank, 3)
        for _ in range(2):
            losses = [wrapped(torch.ones(2, 6, dtype=torch.float64)).sum() for _ in range(2)]
            for loss in losses:
                loss.backward()
            optimizer.step()
    return [str(warning.message) for warning in caught]


def many_wraps_of_subgroups(rank: int, world_size: int) -> float:
    """A process group of some ranks only."""
    members = [0, 2]
    group = dist.new_group(members)
    if rank not in members:
        return 0.0
    wrapped = DecoupledDataParallel(model(), process_group=group)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.01)
    for index in range(3):
        step(wrapped, optimizer, rank, index)
    return sum(p.sum().item() for p in wrapped.parameters())


def strangers_at_the_door(rank: int, world_size: int) -> dict[str, Any]:
    """Others connect to a rank's port: 200 who say nothing, one who asks without a proof; then one is at its place."""
    wrapped = DecoupledDataParallel(model(), bucket_cap_mb=1e-4)
    assert wrapped.engine is not None
    peers = wrapped.engine.peers
    other = peers._addresses[1 - rank]
    with ExitStack() as stack:
        for _ in range(200):
            stack.enter_context(socket.create_connection(other, 30))
        dist.barrier()
        threads = sum(one.name.startswith("headway-peers") for one in threading.enumerate())
        with socket.create_connection(other, 30) as stranger:
            stranger.sendall(struct.pack("!QQ", 20, 0) + b'{"want": "progress"}' + bytes(64))
            heard = b""
            with suppress(ConnectionResetError):
                while part := stranger.recv(1000):
                    heard += part
        wrapped(torch.ones(2, 6, dtype=torch.float64)).sum().backward()
        sums = [float(p.grad.sum()) for p in wrapped.parameters() if p.grad is not None]
    refused = ""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=_pretend, args=(listener,), daemon=True).start()
        peers._addresses[1 - rank] = listener.getsockname()
        try:
            peers.ask(1 - rank, {"want": "progress"}, Limits())
        except CommunicationError as error:
            refused = str(error)
    peers._addresses[1 - rank] = other
    dist.barrier()
    return {"host": other[0], "threads": threads, "heard": len(heard), "sums": sums, "refused": refused}


def _pretend(listener: socket.socket) -> None:
    """Take any proof and answer whatever is asked."""
    while True:
        try:
            connection, _ = listener.accept()
        except OSError:
            return
        said = b'{"submitted": 1, "last": "x"}'
        connection.sendall(bytes(64) + struct.pack("!QQ", len(said), 0) + said)


def clipping_asks_no_peer(rank: int, world_size: int, how: str) -> dict[str, float]:
    """Clip by norm where parameters are gathered; count the questions between ranks, and what a look adds to them."""
    ours = DecoupledDataParallel(model(), bucket_cap_mb=1e-4)
    assert ours.engine is not None
    asked: list[Any] = []
    ask_all = ours.engine.peers.ask_all

    def noted(request: Any, limits: Any) -> Any:
        asked.append(request)
        return ask_all(request, limits)

    ours.engine.peers.ask_all = noted  # type: ignore[method-assign]
    clip = _accelerates_clipping() if how == "Accelerate" else nn.utils.clip_grad_norm_
    ours(torch.full((2, 6), rank + 1.0, dtype=torch.float64)).sum().backward()
    norm = clip(ours.parameters(), 0.1)
    clipping = len(asked)
    clipped = torch.cat([p.grad.flatten() for p in ours.parameters() if p.grad is not None])
    looking = len(asked)
    alone = model()
    for each in range(world_size):
        (alone(torch.full((2, 6), each + 1.0, dtype=torch.float64)).sum() / world_size).backward()
    return {
        "clipping": clipping,
        "looking": looking,
        "norm": float(norm),
        "norm alone": float(nn.utils.clip_grad_norm_(alone.parameters(), 0.1)),
        "apart": float((clipped - torch.cat([_gradient(p).flatten() for p in alone.parameters()])).norm()),
    }


def _gradient(parameter: nn.Parameter) -> torch.Tensor:
    assert parameter.grad is not None
    return parameter.grad


def _accelerates_clipping() -> Any:
    """The method of an ``Accelerator``; Accelerate is imported when reads are watched already."""
    from accelerate import Accelerator

    return Accelerator(cpu=True).clip_grad_norm_


def accelerate_clips_sharded_parameters(rank: int, world_size: int) -> dict[str, float]:
    """Accelerate is told to clip a DTensor with a plain parameter, which stock torch refuses, and plain ones alone."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor

    clip = _accelerates_clipping()
    install()  # Accelerate has been imported before
    mesh = init_device_mesh("cpu", (world_size,))
    whole = torch.full((2 * world_size,), 2.0)
    sharded = nn.Parameter(distribute_tensor(whole, mesh, [Shard(0)]))
    plain = nn.Parameter(torch.full((2,), 3.0))
    sharded.grad = DTensor.from_local(torch.full((2,), 2.0), mesh, [Shard(0)])
    plain.grad = torch.full((2,), 3.0)
    mixed = clip((p for p in [sharded, plain]), 1.0)
    return {"mixed": float(mixed), "plain": float(clip((p for p in [plain]), 1.0))}


def a_slower_rank_looks_at_a_state_that_another_has_dropped(rank: int, world_size: int) -> list[float]:
    """Rank 0 looks, drops its optimizer and goes on to the next backward before rank 1 looks."""
    wrapped = DecoupledDataParallel(model(), bucket_cap_mb=0.0004)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.01, momentum=0.9)
    step(wrapped, optimizer, rank)
    store = torch_private.default_store()
    if rank == 1:
        store.wait(["gone on"], STORE_TIMEOUT)
    state = optimizer.state_dict()["state"]
    del optimizer
    gc.collect()
    following = torch.optim.SGD(wrapped.parameters(), lr=0.01)
    wrapped(torch.ones(2, 6, dtype=torch.float64)).sum().backward()
    if rank == 0:
        store.set("gone on", "")
    following.step()
    return [state[index]["momentum_buffer"].sum().item() for index in sorted(state)]


SPLIT = DecoupledStrategy(
    buckets=(("2.weight", "1.weight[0:8]"), ("1.weight[8:16]", "0.weight")), gather_order=(1, 0)
)


def accumulated_over_split_parameters(rank: int, world_size: int) -> list[float]:
    """Two backwards before a step, of buckets that share a parameter; rank 1 is late with the second bucket."""
    inner = layers()
    wrapped = plugin_of(SPLIT).wrap(inner, SPLIT)
    optimizer = torch.optim.SGD(inner.parameters(), lr=0.1)
    late = [0.3] if rank == 1 else []
    inner.get_parameter("0.weight").register_hook(lambda _: time.sleep(late.pop() if late else 0.0))
    losses = [wrapped(inputs(number)[rank::world_size]).square().mean() for number in range(2)]
    for loss in losses:
        loss.backward()
    optimizer.step()
    return [value for p in inner.parameters() for value in p.detach().flatten().tolist()]


def accumulated_alone() -> list[float]:
    inner = layers()
    for number in range(2):
        inner(inputs(number)).square().mean().backward()
    torch.optim.SGD(inner.parameters(), lr=0.1).step()
    return [value for p in inner.parameters() for value in p.detach().flatten().tolist()]


def layers() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(3))).double()


def inputs(number: int) -> torch.Tensor:
    torch.manual_seed(number)
    return torch.randn(4, 4, dtype=torch.float64)
