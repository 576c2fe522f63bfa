"""Part: one rank's server and its way to all others, for as long as the job lasts."""

from __future__ import annotations

import atexit
import secrets
import sys
from collections.abc import Mapping

import torch
import torch.distributed as dist

from headway import torch_private
from headway.rpc.interface import job_address, reachable_address
from headway.rpc.trusted import new_secret
from headway_baselines.asynchronous_servers.schedule import ShardSchedule
from headway_baselines.asynchronous_servers.serving import Servers, ShardServer
from headway_baselines.asynchronous_servers.shard import Form, Shard

DEFAULT_TIMEOUT_S = 1800.0


class Part:
    """One rank's part in a job: its shard, its server, and its way to the other servers, until everybody has left."""

    def __init__(
        self, group: dist.ProcessGroup, schedule: ShardSchedule, parameters: Mapping[str, torch.Tensor]
    ) -> None:
        rank, world_size = self._rank, _ = dist.get_rank(group), dist.get_world_size(group)
        timeout = torch_private.group_timeout(group)
        self._timeout_s = DEFAULT_TIMEOUT_S if timeout is None else timeout.total_seconds()
        self.shard = Shard(schedule.shards[rank], parameters, world_size, schedule.staleness)
        token = torch.tensor([secrets.randbits(62)])
        dist.broadcast(token, group=group, group_src=0)
        key, store = f"headway/asynchronous/{int(token)}", torch_private.default_store()
        if rank == 0:
            store.set(f"{key}/secret", new_secret().hex())
        secret = bytes.fromhex(store.get(f"{key}/secret").decode())
        store.set(f"{key}/host/{rank}", job_address())
        hosts = [store.get(f"{key}/host/{each}").decode() for each in range(world_size)]
        self._server = ShardServer(self.shard, reachable_address(hosts, rank), secret, world_size)
        store.set(f"{key}/address/{rank}", self._server.address)
        addresses = [store.get(f"{key}/address/{each}").decode() for each in range(world_size)]
        sizes_bytes = [Form(parts, parameters).size_bytes for parts in schedule.shards]
        self.servers = Servers(rank, self.shard, addresses, sizes_bytes, secret, self._timeout_s)
        self.servers.connect()
        dist.barrier(group)  # a rank may end immediately, and a process that ends accepts nobody
        atexit.register(self._end)

    def await_everyone_left(self) -> None:
        """Wait until no worker pushes anything more. Raises TimeoutError as ``Shard`` does, by the group's timeout."""
        self.shard.await_everyone_left(self._timeout_s)

    def close(self) -> None:
        """Serve nobody any more."""
        atexit.unregister(self._end)
        self.servers.close()
        self._server.close()

    def _end(self) -> None:
        """The script ends without ``finish()``: serve the others until they end, unless it fails.

        That ``sys.exit`` ends it with a status is not to be seen from here: only an exception that nobody catches is.
        """
        if getattr(sys, "last_value", None) is None:
            self.shard.begin()  # where this worker made no step
            self.servers.leave()
            try:
                self.await_everyone_left()
            except TimeoutError as error:
                print(f"headway: rank {self._rank}: {error}: this rank serves no longer", file=sys.stderr)
        self.close()
