"""Inter-intra division (Prague: Luo et al., ASPLOS 2020): across hosts by one worker of each, then within hosts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import ClassVar

from headway.coordination.generator import Worker
from headway.coordination.generators.options import DrawingOptions
from headway.coordination.generators.queues import QueuedGroups, divided


class InterIntra(QueuedGroups[DrawingOptions]):
    """A worker without a group draws two rounds for all workers without one.

    In the first a head of each host, of chance, averages with other heads, in groups of ``group_size`` hosts, and the
    rest of a host among themselves. In the second each host averages as a whole. Where the workers of one host only
    have no group, another host, of chance, sends a head too: hosts of different speeds would not meet otherwise.

    A slow worker, which most others leave out, draws one group only, with those of its host: for a second round its
    whole host would have to wait until it has made another iteration.
    """

    name: ClassVar[str] = "inter-intra"

    def _draw(self, worker: Worker) -> Iterable[Iterable[Worker]]:
        others = self._without_slow(worker, self.present)
        if self._is_slow(worker):
            return [self._one_group(worker, others)]
        hosts = self._by_host([worker, *others])
        without = self._by_host([worker, *filter(self._has_none, others)])
        if len(hosts) == 1:
            return hosts.values()
        return self._two_rounds(hosts, without)

    def _one_group(self, worker: Worker, others: list[Worker]) -> Iterable[Worker]:
        near = [each for each in others if self._host_of(each) == self._host_of(worker)]
        return [worker, *(near or self.chance.sample(others, self.options.group_size - 1))]

    def _two_rounds(
        self, hosts: Mapping[str, list[Worker]], without: Mapping[str, list[Worker]]
    ) -> Iterator[Iterable[Worker]]:
        meeting = list(without)
        if len(meeting) == 1:
            meeting += self.chance.sample((host for host in hosts if host not in without), 1)
        heads = {host: self.chance.one(without.get(host, hosts[host])) for host in meeting}
        yield from divided(self.chance.sample(heads.values(), len(heads)), self.options.group_size)
        for host, workers in without.items():
            yield [each for each in workers if each != heads[host]]
        yield from (hosts[host] for host in without if len(hosts[host]) > 1)

    def _by_host(self, workers: Iterable[Worker]) -> dict[str, list[Worker]]:
        found: dict[str, list[Worker]] = {}
        for worker in sorted(workers):
            found.setdefault(self._host_of(worker), []).append(worker)
        return dict(sorted(found.items()))

    def _host_of(self, worker: Worker) -> str:
        return self.hosts.get(worker, f"\0{worker}")
