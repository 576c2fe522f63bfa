"""Methods at work: a model wrapped as its plan says, and blocks of iterations of it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from headway import torch_private
from headway.rpc.interface import job_address
from headway.scheduling.groups import hosts_in_turn
from headway.strategies.base import Strategy
from headway.strategies.decoupled.lifecycle import release
from headway.strategies.decoupled.wrapper import DecoupledDataParallel
from headway.strategies.partial_all_reduce.coordinator.child import CoordinatorProcess
from headway.strategies.partial_all_reduce.coordinator.client import CoordinatorClient
from headway.strategies.partial_all_reduce.coordinator.options import GeneratorChoice
from headway.strategies.partial_all_reduce.host_wrapper import HostDataParallel
from headway.strategies.partial_all_reduce.policy import PartialAllReduceStrategy
from headway.strategies.partial_all_reduce.rounds import Ending, Round
from headway.strategies.partial_all_reduce.runtime import PartialAllReduce
from headway.strategies.registry import plugin_named

LEASE_S, JOIN_S, GROUP_LIMIT_S = 60.0, 60.0, 60.0
Step = Callable[[nn.Module, Optimizer, int], None]
"""One iteration: (wrapped model, optimizer, its number)."""


@dataclass
class Block:
    """What one rank did in a block: when iterations ended (s, the machine's clock), and what its groups did."""

    begin_s: float = 0.0
    ends_s: list[float] = field(default_factory=list)
    rounds: list[dict[str, float]] = field(default_factory=list)


class Coordinators:
    """One coordinator for each choice of groups, started by rank 0; what other ranks need goes by the job's store."""

    def __init__(self) -> None:
        self._own: list[CoordinatorProcess] = []
        self._count = 0

    def client(self, strategy: PartialAllReduceStrategy) -> tuple[CoordinatorClient, bytes]:
        """A client of a new coordinator, and the job's secret. Collective."""
        self._count += 1
        store, key = torch_private.default_store(), f"coordinator/{self._count}"
        if dist.get_rank() == 0:
            choice = GeneratorChoice(strategy.groups, strategy.generator_options, strategy.seed)
            process = CoordinatorProcess(choice, host=job_address(), lease_s=LEASE_S)
            self._own.append(process)
            store.set(key, f"{process.address} {process.secret.decode()}")
        address, _, secret = store.get(key).decode().partition(" ")
        return CoordinatorClient(address, secret.encode()), secret.encode()

    def close(self) -> None:
        """End them."""
        for process in self._own:
            process.close()


def wrap(
    module: nn.Module, optimizer: Optimizer, strategy: Strategy, hosts: int, coordinators: Coordinators,
    observer: Callable[[Round], None],
) -> nn.Module:  # fmt: skip
    """``module`` as ``strategy`` trains it. Collective."""
    if not isinstance(strategy, PartialAllReduceStrategy):
        return plugin_named(strategy.name).wrap(module, strategy)
    if strategy.within_hosts:
        return HostDataParallel(
            module, strategy=strategy, optimizer=optimizer, observer=observer, join_timeout_s=JOIN_S
        )
    options: dict[str, Any] = {
        "staleness": strategy.staleness, "moments": strategy.moments, "observer": observer, "initial": "own",
        "time_limit_s": GROUP_LIMIT_S, "join_timeout_s": JOIN_S,
    }  # fmt: skip
    world_size, rank = dist.get_world_size(), dist.get_rank()
    if strategy.is_static:
        each = world_size // hosts
        placed = [range(host * each, (host + 1) * each) for host in range(hosts)]
        schedule = hosts_in_turn(placed, strategy.group_size or 4)
        return PartialAllReduce(module, schedule, optimizer, **options)
    client, secret = coordinators.client(strategy)
    return PartialAllReduce(module, client, optimizer, worker=rank, secret=secret, **options)


class Trainer:
    """One method at work on a model of its own. ``step`` makes one iteration of it."""

    def __init__(
        self, module: nn.Module, optimizer: Optimizer, strategy: Strategy, step: Step, hosts: int,
        coordinators: Coordinators,
    ) -> None:  # fmt: skip
        self.module, self.strategy = module, strategy
        self._optimizer, self._step = optimizer, step
        self._block = Block()
        self.iterations = 0
        self.wrapped = wrap(module, optimizer, strategy, hosts, coordinators, self._observe)
        self._is_there = True

    @property
    def by_itself(self) -> bool:
        """Whether this rank makes its iterations without waiting for all: blocks of it last a time."""
        return isinstance(self.strategy, PartialAllReduceStrategy) and not self.strategy.is_static

    def block(self, steps: int, seconds: float, after: Callable[[], None] = lambda: None) -> Block:
        """``steps`` iterations, or as many as ``seconds`` allow where ranks do not go together. Collective.

        ``after`` is called after each.
        """
        self._enter()
        self._block = block = Block(begin_s=_agreed_s())
        while len(block.ends_s) < steps if not self.by_itself else time.monotonic() < block.begin_s + seconds:
            self._step(self.wrapped, self._optimizer, self.iterations)
            self.iterations += 1
            block.ends_s.append(time.monotonic())
            after()
        self._leave()
        dist.barrier()
        return block

    def close(self) -> None:
        """Give back what was made for it. Collective."""
        if isinstance(self.wrapped, PartialAllReduce | HostDataParallel):
            self.wrapped.close()
        elif isinstance(self.wrapped, DecoupledDataParallel) and self.wrapped.engine is not None:
            self.settle()
            release(self.wrapped.engine)
        dist.barrier()

    def settle(self) -> None:
        """Wait for what is in flight."""
        if isinstance(self.wrapped, PartialAllReduce | HostDataParallel):
            self.wrapped.flush()
        elif isinstance(self.wrapped, DecoupledDataParallel) and self.wrapped.engine is not None:
            self.wrapped.engine.settlement.settle_values()

    def _enter(self) -> None:
        if self.by_itself and not self._is_there:
            assert isinstance(self.wrapped, PartialAllReduce)
            self.wrapped.coordinator.join(self.wrapped.member, JOIN_S)
            self._is_there = True
        dist.barrier()

    def _leave(self) -> None:
        """Whoever has done its block leaves the groups, or others would wait for it."""
        self.settle()
        if self.by_itself:
            assert isinstance(self.wrapped, PartialAllReduce)
            self.wrapped.coordinator.leave()
            self._is_there = False

    def _observe(self, each: Round) -> None:
        self._block.rounds.append(
            {
                "at_s": time.monotonic(), "size": float(max(1, len(each.members))),
                "committed": float(each.ending is Ending.COMMITTED), "waiting_ms": each.waiting_ns / 1e6,
                "reducing_ms": each.reducing_ns / 1e6, "voting_ms": each.voting_ns / 1e6,
                "blocked_ms": each.blocked_ns / 1e6, "distance": each.relative_distance,
            }
        )  # fmt: skip


def _agreed_s() -> float:
    """Rank 0's time now: hosts of a lab share a clock."""
    box = torch.tensor([time.monotonic()], dtype=torch.float64)
    dist.broadcast(box, 0)
    return float(box)
