"""What ranks do for the tests of messages, connections and clocks in recordings."""

from __future__ import annotations

import gc
import hashlib
import io
import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import redirect_stderr
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.nn.parallel import DistributedDataParallel

import headway
from headway import torch_private
from headway.collectives.algorithms import RING, sent_bytes
from headway.recording import recorder as recording
from headway.recording import watches
from headway.recording.recorder import Recorder, RecordOptions
from headway.strategies.decoupled.wrapper import DecoupledDataParallel
from headway.strategies.live.channels import observer as observing
from headway.strategies.live.channels.observer import Collective
from headway.torch_private import JobStore

SHORT_S = 3.0  # what waits for others last here


class Log(observing.NullObserver):
    """Keeps the collectives that it is told of."""

    def __init__(self, wants_transfers: bool) -> None:
        self.wants_transfers = wants_transfers
        self.seen: list[Collective] = []

    def collective(self, done: Collective) -> None:
        self.seen.append(done)


def train(model: Any, steps: int = 6) -> str:
    """Train for some steps on data of the rank's own; returns a digest of every bit of the parameters."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    data = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(4, 160, generator=data)).square().mean().backward()
        optimizer.step()
    if isinstance(model, DecoupledDataParallel):
        model.flush()
    return hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(160, 160) for _ in range(5)))


def decoupled(group: dist.ProcessGroup | None = None) -> DecoupledDataParallel:
    """Five buckets, of which two are in flight at a time."""
    wrapped = DecoupledDataParallel(layers(), bucket_cap_mb=0.1, process_group=group)
    assert len(wrapped.schedule.buckets) == 5
    assert wrapped.schedule.channels == 2
    return wrapped


def decoupled_jobs(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    """One model trained alone, watched with and without messages, and recorded."""
    found: dict[str, Any] = {"digests": [train(decoupled())]}
    for wanted in (False, True):
        log = Log(wanted)
        observing.set_observer(log)
        found["digests"].append(train(decoupled()))
        observing.set_observer(None)
        found["wrong" if wanted else "unwanted"] = (
            [what for done in log.seen for what in wrong_with(done, world_size)]
            if wanted
            else sum(len(done.transfers) for done in log.seen)
        )
        found["collectives"] = len(log.seen)
    with headway.record(Path(folder, "trace"), first_step=1, stop_step=5):
        found["digests"].append(train(decoupled()))
    found["peers"] = peers_in_a_subgroup(rank, world_size)
    return found


def wrong_with(done: Collective, world_size: int) -> list[str]:
    """What contradicts itself in the messages of one collective of a bucket."""
    wrong = []
    sent = sum(one.size_bytes for one in done.transfers if one.sends)
    expected = sent_bytes(RING, done.name, world_size, done.size_bytes)
    if abs(sent - expected) > 4 * (world_size - 1):  # chunks differ by one element
        wrong.append(f"{done.name} of bucket {done.bucket} sends {sent} bytes, not {expected}")
    if any(not done.start_ns <= one.posted_ns <= one.done_ns <= done.end_ns for one in done.transfers):
        wrong.append(f"{done.name} of bucket {done.bucket} has messages of other times")
    return wrong


def peers_in_a_subgroup(rank: int, world_size: int) -> list[int]:
    """Peers in the messages of a model that the first and the last rank train; none on the others."""
    members = [0, world_size - 1]
    group = dist.new_group(members)
    log = Log(wants_transfers=True)
    observing.set_observer(log)
    if rank in members:
        train(decoupled(group), steps=2)
    observing.set_observer(None)
    dist.barrier()
    return sorted({one.peer for done in log.seen for one in done.transfers})


def recorded_alone(folder: str, between: Callable[[Recorder], None], **options: Any) -> dict[str, Any]:
    """Record steps without any communication; ``between`` comes before the last one, of which the time comes back."""
    recording.PATIENCE_S = SHORT_S
    parameter = nn.Parameter(torch.ones(3))
    parameter.grad = torch.ones(3)
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    recorder = Recorder(RecordOptions(folder=Path(folder), first_step=1, stop_step=3, **options))
    recorder.attach()
    optimizer.step()
    optimizer.step()
    between(recorder)
    began_s = time.monotonic()
    optimizer.step()
    took_s = time.monotonic() - began_s
    optimizer.step()
    return {"took_s": took_s, "finished": recorder.finished, "written": sorted(os.listdir(folder))}


def a_peer_is_gone(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    """The last rank ends without a word while the others record."""

    def between(_recorder: Recorder) -> None:
        if rank == world_size - 1:
            os._exit(0)

    return recorded_alone(folder, between)


def in_turn(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    """Several of the cases below in one set of processes, each with a folder of its own."""
    found = {}
    for case in (the_store_is_gone, writing_fails, open_ports, native_pauses):
        own = Path(folder, case.__name__)
        own.mkdir(exist_ok=True)
        found[case.__name__] = case(rank, world_size, str(own))
        dist.barrier()
    return found


def the_store_is_gone(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    """The rank that kept the store is gone when the recording ends."""
    usual = torch_private.default_store
    server: Any = None
    if rank == 0:
        server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        usual().set("port", str(server.port))
    port, timeout = int(usual().get("port")), timedelta(seconds=5)
    client = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=timeout)
    dist.barrier()

    def between(_recorder: Recorder) -> None:
        nonlocal server
        server = None
        dist.barrier()
        torch_private.default_store = lambda limit_s=30.0: JobStore(client, limit_s)

    try:
        return recorded_alone(folder, between)
    finally:
        torch_private.default_store = usual


def writing_fails(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    """Something goes wrong at the end of a recording that nobody thought of."""

    def between(recorder: Recorder) -> None:
        recorder._with_profile = lambda *_: 1 // 0  # type: ignore[method-assign, assignment]

    said = io.StringIO()
    with redirect_stderr(said):
        found = recorded_alone(folder, between)
    return found | {"said": said.getvalue()}


def open_ports(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    """Where this rank listens before it records and while it does, and whether it has a clock server.

    Once where no clock server is allowed, and once where it is.
    """
    found: dict[str, Any] = {}
    for allowed in (False, True):
        own = Path(folder, str(allowed))
        own.mkdir(exist_ok=True)
        seen: list[Any] = [listening()]

        def between(_recorder: Recorder, seen: list[Any] = seen) -> None:
            seen.append(listening())
            seen.append(sum(one.name == "headway-clock" for one in threading.enumerate()))

        recorded_alone(str(own), between, clock_server=allowed)
        found[str(allowed)] = seen
        dist.barrier()
    return found


def listening() -> list[str]:
    """The addresses of this process's listening TCP sockets, without their ports."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            copy = socket.socket(fileno=os.dup(int(name)))
        except OSError:  # no socket
            continue
        with copy:
            inet = copy.family in (socket.AF_INET, socket.AF_INET6) and copy.type == socket.SOCK_STREAM
            if inet and copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                found.append(copy.getsockname()[0])
    return found


def native_pauses(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    """A recorded job on native collectives that waits for works, saves and collects garbage."""
    watches.LEAST_NS = 0
    model = DistributedDataParallel(layers())
    before = [vars(dist.Work)["wait"], torch.save, *gc.callbacks]
    gc.disable()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with headway.record(Path(folder, "trace"), model, first_step=1, stop_step=4):
        for step in range(5):
            optimizer.zero_grad()
            model(torch.ones(2, 160)).sum().backward()
            dist.all_reduce(torch.ones(10), async_op=True).wait()
            if step == 2:
                torch.save(model.state_dict(), io.BytesIO())
            if step == 3:
                gc.collect()
            optimizer.step()
    after = [vars(dist.Work)["wait"], torch.save, *gc.callbacks]
    gc.enable()
    return {"undone": all(one is other for one, other in zip(before, after, strict=True))}
