"""The process inside the lab: builds the network, starts the ranks, plays the timeline, ends everything.

From the launcher comes the job as one line of JSON, then single bytes: 0 starts the ranks, 255 starts them in
the control groups that the job names, any other is the number of a signal to pass on. The end of the stream
means that the launcher is gone. To the launcher go lines of JSON: ``{"refused": why}`` or ``{"ready": true}``,
then ``{"notice": text}`` and at last ``{"status": N}``.
"""

from __future__ import annotations

import heapq
import itertools
import json
import os
import select
import signal
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from headway.lab import processes, traffic
from headway.lab.network import Network, address
from headway.lab.slow import DutyCycle, Quotas
from headway.lab.spec import Kill, LabSpec, LinkChange, SlowChange, TrafficStart
from headway.units import format_rate, parse_duration_s, parse_rate_gbps

TIMED_OUT = 124
START = b"\0"
START_IN_GROUPS = b"\xff"


def serve(control: socket.socket, *, networks: bool, pid_namespace: bool) -> NoReturn:
    """Serve the launcher over ``control``; then end this process and all others of the lab."""
    try:
        job = _receive_job(control)
        lab = _build(control, job, networks=networks) if job else None
        start = control.recv(1) if lab is not None else b""
        if lab is not None and start in (START, START_IN_GROUPS):
            lab.run(in_groups=start == START_IN_GROUPS)
    except BrokenPipeError:
        pass  # the launcher is gone
    finally:
        processes.end_everything(None if pid_namespace else os.environ[processes.LAB_ID])
    os._exit(0)


def _receive_job(control: socket.socket) -> dict[str, Any] | None:
    line = bytearray()
    while not line.endswith(b"\n"):
        part = control.recv(2**20)
        if not part:
            return None
        line += part
    job: dict[str, Any] = json.loads(line)
    return job


def _build(control: socket.socket, job: dict[str, Any], *, networks: bool) -> Orchestrator | None:
    spec = LabSpec.model_validate_json(job["spec"])
    network = None
    if networks:
        from pyroute2.netlink.exceptions import NetlinkError

        try:
            network = Network([(link.up_gbps, link.down_gbps) for link in spec.links])
        except (OSError, NetlinkError) as failure:
            _send(control, refused=f"building the network: {failure}")
            return None
    lab = Orchestrator(control, job, spec, network)
    _send(control, ready=True)
    return lab


def _send(control: socket.socket, **message: object) -> None:
    control.sendall((json.dumps(message) + "\n").encode())


class Orchestrator:
    """One running lab, seen from inside: an event loop over the launcher, the children and the timers."""

    def __init__(
        self, control: socket.socket, job: dict[str, Any], spec: LabSpec, network: Network | None
    ) -> None:
        self._control, self._job, self._spec, self._network = control, job, spec, network
        self._hosts = {link.name: index for index, link in enumerate(spec.links)}
        self._pid_of: dict[int, int] = {}
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._slowing: Quotas | DutyCycle = DutyCycle(self._pid_of, self._after)
        self._status = 0
        self._ending = False
        self._gone = False

    def run(self, *, in_groups: bool) -> None:
        """Start the ranks (in their control groups if ``in_groups``), and serve until all have ended."""
        if in_groups:
            group = self._job["quotas"]
            self._slowing = Quotas(Path(group["path"]), group["version"])
        wakeup_read, wakeup_write = os.pipe()
        os.set_blocking(wakeup_read, False)
        os.set_blocking(wakeup_write, False)
        signal.set_wakeup_fd(wakeup_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGTERM, lambda *_: self._launcher_gone())
        self._start_ranks()
        self._schedule()
        poll = select.poll()
        poll.register(self._control, select.POLLIN)
        poll.register(wakeup_read, select.POLLIN)
        while self._pid_of and not self._gone:
            for descriptor, _ in poll.poll(self._wait_ms()):
                if descriptor == wakeup_read:
                    with suppress(BlockingIOError):
                        os.read(wakeup_read, 4096)
                else:
                    self._hear()
            for pid, status in processes.reap():
                self._ended(pid, status)
            while self._timers and self._timers[0][0] <= time.monotonic():
                heapq.heappop(self._timers)[2]()
        if not self._gone:
            self._tell(status=self._status)

    def _start_ranks(self) -> None:
        for process in self._job["ranks"]:
            os.set_inheritable(process["stdout"], False)
            os.set_inheritable(process["stderr"], False)
        for rank, (host, process) in enumerate(zip(self._spec.host_of_rank, self._job["ranks"], strict=True)):
            self._pid_of[rank] = processes.start_rank(
                self._job["executable"],
                self._job["command"],
                process["env"],
                network=self._network.namespace(host) if self._network else None,
                entrance=self._slowing.entrance(rank) if isinstance(self._slowing, Quotas) else None,
                stdout=process["stdout"],
                stderr=process["stderr"],
            )
        for process in self._job["ranks"]:
            os.close(process["stdout"])
            os.close(process["stderr"])

    def _schedule(self) -> None:
        for rank, share in self._spec.slow.items():
            self._slow(rank, share)
        for event in self._spec.timeline:
            self._after(parse_duration_s(event.at, zero=True), partial(self._happen, event))
        if self._job["timeout_s"] is not None:
            self._after(self._job["timeout_s"], self._time_out)

    # Timers and messages

    def _after(self, delay_s: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._timers, (time.monotonic() + delay_s, next(self._order), action))

    def _wait_ms(self) -> float | None:
        return max(0.0, (self._timers[0][0] - time.monotonic()) * 1e3) if self._timers else None

    def _tell(self, **message: object) -> None:
        try:
            _send(self._control, **message)
        except OSError:
            self._launcher_gone()

    def _launcher_gone(self) -> None:
        self._gone = True

    def _hear(self) -> None:
        heard = self._control.recv(64)
        if not heard:
            self._launcher_gone()
        for number in heard:
            self._interrupt(number)

    # Ends

    def _ended(self, pid: int, status: int) -> None:
        rank = next((rank for rank, rank_pid in self._pid_of.items() if rank_pid == pid), None)
        if rank is None:
            return
        del self._pid_of[rank]
        if status != 0 and self._status == 0:
            self._status = status
            if self._pid_of and not self._ending:
                grace_s = self._job["grace_s"]
                self._tell(notice=f"rank {rank} ended with status {status}; the others have {grace_s:g} s")
                self._after(grace_s, self._terminate)

    def _interrupt(self, number: int) -> None:
        """Forward a signal; a second one kills at once."""
        if self._ending:
            self._signal_ranks(signal.SIGKILL)
        else:
            self._ending = True
            self._signal_ranks(number)
            self._after(self._job["grace_s"], partial(self._signal_ranks, signal.SIGKILL))

    def _time_out(self) -> None:
        self._tell(notice=f"time is up after {self._job['timeout_s']:g} s")
        self._status = self._status or TIMED_OUT
        self._terminate()

    def _terminate(self) -> None:
        if not self._ending:
            self._interrupt(signal.SIGTERM)

    def _signal_ranks(self, number: int) -> None:
        for pid in self._pid_of.values():
            processes.signal_group(pid, number)

    # Events

    def _happen(self, event: LinkChange | TrafficStart | SlowChange | Kill) -> None:
        if isinstance(event, LinkChange):
            self._change_link(event)
        elif isinstance(event, TrafficStart):
            self._start_traffic(event)
        elif isinstance(event, SlowChange):
            rank, share = event.slow.rank, event.slow.share
            self._tell(notice=f"{event.at}: rank {rank} {self._slowing.describe(share)}")
            self._slow(rank, share)
        elif event.kill in self._pid_of:
            self._tell(notice=f"{event.at}: rank {event.kill} is killed")
            processes.signal_group(self._pid_of[event.kill], signal.SIGKILL)

    def _slow(self, rank: int, share: float) -> None:
        try:
            self._slowing.apply(rank, share)
        except OSError as failure:
            self._tell(notice=f"the speed of rank {rank} could not be changed: {failure}")

    def _change_link(self, event: LinkChange) -> None:
        if self._network is None:
            return
        gbps = parse_rate_gbps(event.rate)
        up_gbps = gbps if event.direction != "down" else None
        down_gbps = gbps if event.direction != "up" else None
        self._network.shape(self._hosts[event.link], up_gbps=up_gbps, down_gbps=down_gbps)
        way = "" if event.direction == "both" else f" {event.direction}"
        self._tell(notice=f"{event.at}: the link of {event.link}{way} now has {format_rate(gbps)}")

    def _start_traffic(self, event: TrafficStart) -> None:
        flow = event.traffic
        source, target = self._hosts[flow.source], self._hosts[flow.target]
        if self._network is None:
            listener = socket.create_server(("127.0.0.1", 0))
            source_network = target_network = None
        else:
            source_network, target_network = self._network.namespace(source), self._network.namespace(target)
            with self._network.inside(target):
                listener = socket.create_server((address(target), 0))
        duration_s = parse_duration_s(flow.duration) if flow.duration else None
        sender = partial(traffic.send, listener.getsockname()[:2], parse_rate_gbps(flow.rate), duration_s)
        with listener:
            receiver = partial(traffic.drain, listener)
            processes.start_helper(receiver, network=target_network)
            processes.start_helper(sender, network=source_network)
        length = f" for {flow.duration}" if flow.duration else ""
        self._tell(notice=f"{event.at}: {flow.rate} of traffic from {flow.source} to {flow.target}{length}")
