"""What the decoupled all-reduce adds to the graph: reduce-scatters under backward, gathers under forward."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from headway.cluster import DEFERRED_UPDATE, STEP_CALL
from headway.collectives.algorithms import ALL_REDUCE, RING
from headway.collectives.selection import Selection
from headway.graph.build import GraphBuilder, Walk
from headway.graph.timeline import Part
from headway.scheduling.filling import Filling


class Dataflow:
    """The runtime's reactions, for gathers of gradients and of parameters.

    Job number ``n`` of a rank is served by its channel ``n % channels``, one at a time and in order. Buckets that share
    parameters are settled together, as a unit.
    """

    def __init__(self, graph: GraphBuilder) -> None:
        self._graph = graph
        self._schedule = graph.schedule
        self._fillings = [Filling(graph.schedule) for _ in range(graph.ranks)]
        self._total_bytes = max(1, sum(bucket.size_bytes for bucket in graph.schedule.buckets))
        self._units = graph.schedule.units
        self._unit_of = {bucket: unit for unit, buckets in enumerate(self._units) for bucket in buckets}
        self._units_of_module = self._units_of_modules()
        self._begun: set[int] = set()  # ranks whose backward has begun
        self._passes: dict[int, int] = defaultdict(int)
        self._counts: dict[int, int] = defaultdict(int)  # rank -> how many jobs it has asked for
        self._jobs: dict[int, list[int]] = defaultdict(list)  # rank -> its latest jobs, one a channel at most
        self._reduced: dict[int, dict[int, int]] = defaultdict(dict)  # rank -> bucket -> its reduce-scatter
        self._gathers: dict[int, dict[int, int]] = defaultdict(dict)  # rank -> bucket -> its all-gather
        self._unused: dict[int, list[str]] = defaultdict(list)  # rank -> without a gradient in this backward
        self._uses: dict[int, int] = {}  # rank -> the exchange of what its latest backward used
        self._asking: dict[int, set[int]] = defaultdict(set)  # rank -> units that wait for that exchange
        self._due: dict[int, set[int]] = defaultdict(set)  # rank -> units the optimizer has stepped since
        self._update_ns: dict[int, int] = defaultdict(int)
        self._update_overhead_ns = graph.cluster.cost_of(DEFERRED_UPDATE).overhead_us * 1e3
        self._step_call_ns = round(graph.cluster.cost_of(STEP_CALL).overhead_us * 1e3)

    def use(self, walk: Walk, module: str) -> None:
        """Forward needs a module: wait for its units' gathers, and bring their parameters up to date.

        Units that the optimizer has not stepped hold gradients only, which forward has no need of.
        """
        for unit in self._units_of_module.get(module, ()):
            if unit in self._due[walk.rank]:
                self._materialise(walk, unit)

    def _materialise(self, walk: Walk, unit: int) -> None:
        buckets = self._units[unit]
        under_way = self._gathers[walk.rank]
        gathers = [under_way.pop(index) for index in buckets if index in under_way]
        if not gathers:
            return
        for gather in gathers:
            self._graph.wait(walk, "parameters", gather)
        if unit in self._asking[walk.rank]:
            self._graph.wait(walk, "parameters", self._uses[walk.rank])
        update_ns = 0
        if unit in self._due[walk.rank]:
            self._due[walk.rank].remove(unit)
            if self._schedule.gather == "gradients":
                update_ns = self._share_ns(walk.rank, buckets)
        self._graph.compute(walk, Part.OPTIMIZER, update_ns, bucket=buckets[0])

    def _share_ns(self, rank: int, buckets: Sequence[int], ranks: int = 1) -> int:
        """What one update of these buckets takes where ``ranks`` share it."""
        share = sum(self._schedule.buckets[index].size_bytes for index in buckets) / self._total_bytes
        return round(self._update_ns[rank] * share / ranks + self._update_overhead_ns)

    def ready(self, walk: Walk, parameter: str) -> None:
        """Count down the parameter's bucket; reduce-scatter what is full, in order."""
        filling = self._fillings[walk.rank]
        if walk.rank not in self._begun:  # the first gradient of a pass
            self._begun.add(walk.rank)
            self._settle_all(walk)
        for index in filling.ready(parameter):
            self._reduced[walk.rank][index] = self._job(walk, "reduce_scatter", index)
            for gathered in self._schedule.gathers_behind(index):
                self._gather(walk, gathered)
            if filling.complete and index == filling.next - 1 and self._graph.model.find_unused_parameters:
                self._exchange_uses(walk)

    def unused(self, walk: Walk, parameter: str) -> None:
        """Whether it gets a gradient after all is known when backward ends."""
        self._unused[walk.rank].append(parameter)

    def _exchange_uses(self, walk: Walk) -> None:
        """Ranks add up which parameters they used; who has no gradient waits for that before an update."""
        size_bytes = self._graph.model.uses_bytes
        self._uses[walk.rank] = self._submit(
            walk, ALL_REDUCE, -1 - self._passes[walk.rank], size_bytes, -1, Selection(RING, ALL_REDUCE)
        )
        buckets_of = self._schedule.buckets_of
        self._asking[walk.rank] = {
            self._unit_of[index] for name in self._unused[walk.rank] for index in buckets_of.get(name, ())
        }

    def _settle_all(self, walk: Walk) -> None:
        """What forward left untouched is settled, in gather order, before the first gradient is accumulated.

        Gradients that were reduced and neither gathered nor stepped are waited for too: their buckets fill again.
        """
        for index in self._schedule.gather_order:
            self._materialise(walk, self._unit_of[index])
        if self._schedule.gather == "parameters" and (reduced := self._reduced[walk.rank]):
            for number in reduced.values():
                self._graph.wait(walk, "gradients", number)
            self._graph.compute(walk, Part.FINALIZE, 0)
        self._reduced[walk.rank].clear()

    def _gather(self, walk: Walk, index: int, after_work: Sequence[int] = ()) -> None:
        reduced = self._reduced[walk.rank].get(index)
        after = [] if reduced is None else [reduced]
        self._gathers[walk.rank][index] = self._job(walk, "all_gather", index, after, after_work)

    def _job(
        self,
        walk: Walk,
        name: str,
        index: int,
        after: Sequence[int] = (),
        after_work: Sequence[int] = (),
    ) -> int:
        size_bytes = self._schedule.buckets[index].size_bytes
        key = self._passes[walk.rank] * len(self._schedule.buckets) + index
        selection = self._schedule.algorithms.select(
            name, size_bytes, self._graph.world_size, self._graph.cluster.library
        )
        return self._submit(walk, name, key, size_bytes, index, selection, after, after_work)

    def _submit(
        self,
        walk: Walk,
        name: str,
        key: int,
        size_bytes: int,
        bucket: int,
        selection: Selection,
        after: Sequence[int] = (),
        after_work: Sequence[int] = (),
    ) -> int:
        count = self._counts[walk.rank]
        self._counts[walk.rank] += 1
        number = self._graph.launch(
            walk,
            name,
            key,
            size_bytes,
            bucket=bucket,
            selection=selection,
            channel=count % self._schedule.channels,
            after=[*self._channel(walk), *after],
            after_work=after_work,
        )
        self._jobs[walk.rank] = [*self._jobs[walk.rank], number][-self._schedule.channels :]
        return number

    def _channel(self, walk: Walk) -> list[int]:
        """The job before the next one on its channel."""
        jobs = self._jobs[walk.rank]
        return jobs[:1] if len(jobs) == self._schedule.channels else []

    def backward_end(self, walk: Walk) -> None:
        """Nobody waits here; the next pass counts anew. Parameters without a gradient take part with zeros."""
        for parameter in self._unused[walk.rank]:
            self.ready(walk, parameter)
        self._unused[walk.rank].clear()
        self._begun.discard(walk.rank)
        self._fillings[walk.rank].restart()
        self._passes[walk.rank] += 1

    def finalize(self, walk: Walk, duration_ns: int) -> None:
        """There is nothing to copy back: the deferred update reads the bucket."""

    def optimizer(self, walk: Walk, duration_ns: int) -> None:
        """Go on at once.

        With gradients each bucket's update waits for its first use. With parameters the channels update this rank's
        share of every bucket that was reduced, each as soon as it is, and gather it.
        """
        if duration_ns:  # of several optimizers' calls in a step the first brings all of their work
            self._update_ns[walk.rank] = duration_ns
        if self._schedule.gather == "gradients":
            self._graph.compute(walk, Part.OPTIMIZER, 0)
            self._due[walk.rank] = {self._unit_of[index] for index in self._gathers[walk.rank]}
            return
        self._graph.compute(walk, Part.OPTIMIZER, self._step_call_ns)
        reduced = self._reduced[walk.rank]
        uses = [self._uses[walk.rank]] if walk.rank in self._uses else []
        for index in self._schedule.gather_order:
            if index in reduced:
                update = self._graph.work(
                    walk,
                    self._share_ns(walk.rank, [index], self._graph.world_size),
                    bucket=index,
                    after=[*self._channel(walk), reduced[index], *uses],
                )
                self._gather(walk, index, [update])
        self._due[walk.rank] |= {self._unit_of[index] for index in reduced}
        reduced.clear()

    def _units_of_modules(self) -> dict[str, list[int]]:
        buckets_of = self._schedule.buckets_of
        found: dict[str, list[int]] = defaultdict(list)
        for parameter in self._graph.model.parameters:
            known = found[parameter.module]
            units = dict.fromkeys(self._unit_of[index] for index in buckets_of.get(parameter.name, ()))
            known += [unit for unit in units if unit not in known]
        return found
