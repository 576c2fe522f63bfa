"""What the decoupled all-reduce adds to the graph: reduce-scatters under backward, gathers under forward."""

from __future__ import annotations

from collections import defaultdict

from headway.collectives.algorithms import RING
from headway.graph.build import GraphBuilder, Walk
from headway.graph.timeline import Part
from headway.scheduling.filling import Filling

UPDATE = "deferred_update"  # what an optimizer's step costs by itself, paid once a bucket


class Dataflow:
    """The runtime's reactions. One communication thread a rank serves its jobs in order, one at a time."""

    def __init__(self, graph: GraphBuilder) -> None:
        self._graph = graph
        self._fillings = [Filling(graph.schedule) for _ in range(graph.world_size)]
        buckets_of = graph.schedule.buckets_of
        self._total_bytes = max(1, sum(bucket.size_bytes for bucket in graph.schedule.buckets))
        self._buckets_of_module: dict[str, list[int]] = defaultdict(list)
        for parameter in graph.model.parameters:
            known = self._buckets_of_module[parameter.module]
            known += [index for index in buckets_of.get(parameter.name, ()) if index not in known]
        self._begun: set[int] = set()  # ranks whose backward has begun
        self._passes: dict[int, int] = defaultdict(int)
        self._last_job: dict[int, list[int]] = defaultdict(list)
        self._gathers: dict[int, dict[int, int]] = defaultdict(dict)  # rank -> bucket -> collective
        self._due: dict[int, set[int]] = defaultdict(set)  # rank -> buckets the optimizer has stepped since
        self._update_ns: dict[int, int] = defaultdict(int)
        self._update_overhead_ns = graph.cluster.cost_of(UPDATE).overhead_us * 1e3

    def use(self, walk: Walk, module: str) -> None:
        """Forward needs a module: wait for its buckets' gathers, and update their parameters.

        Buckets that the optimizer has not stepped hold gradients only, which forward has no need of.
        """
        for index in self._buckets_of_module.get(module, ()):
            if index in self._due[walk.rank]:
                self._materialise(walk, index)

    def _materialise(self, walk: Walk, index: int) -> None:
        gather = self._gathers[walk.rank].pop(index, None)
        if gather is None:
            return
        share = self._graph.schedule.buckets[index].size_bytes / self._total_bytes
        self._graph.wait(walk, "parameters", gather)
        update_ns = 0
        if index in self._due[walk.rank]:
            self._due[walk.rank].remove(index)
            update_ns = round(self._update_ns[walk.rank] * share + self._update_overhead_ns)
        self._graph.compute(walk, Part.OPTIMIZER, update_ns, bucket=index)

    def ready(self, walk: Walk, parameter: str) -> None:
        """Count down the parameter's bucket; reduce-scatter what is full, in order."""
        filling = self._fillings[walk.rank]
        if walk.rank not in self._begun:  # the first gradient of a pass
            self._begun.add(walk.rank)
            self._settle_all(walk)
        for index in filling.ready(parameter):
            self._job(walk, "reduce_scatter", index)
            for gathered in self._graph.schedule.gathers_behind(index):
                self._gathers[walk.rank][gathered] = self._job(walk, "all_gather", gathered)

    def _settle_all(self, walk: Walk) -> None:
        """What forward left untouched is settled, in gather order, before the first gradient is accumulated."""
        for index in self._graph.schedule.gather_order:
            self._materialise(walk, index)

    def _job(self, walk: Walk, name: str, index: int) -> int:
        bucket = self._graph.schedule.buckets[index]
        key = self._passes[walk.rank] * len(self._graph.schedule.buckets) + index
        number = self._graph.launch(
            walk,
            name,
            key,
            bucket.size_bytes,
            bucket=index,
            algorithm=RING,
            after=self._last_job[walk.rank],
        )
        self._last_job[walk.rank] = [number]
        return number

    def backward_end(self, walk: Walk) -> None:
        """Nobody waits here; the next pass counts anew."""
        self._begun.discard(walk.rank)
        self._fillings[walk.rank].restart()
        self._passes[walk.rank] += 1

    def finalize(self, walk: Walk, duration_ns: int) -> None:
        """There is nothing to copy back: the deferred update reads the bucket."""

    def optimizer(self, walk: Walk, duration_ns: int) -> None:
        """Go on at once; each bucket's share of the update waits for its first use."""
        self._graph.compute(walk, Part.OPTIMIZER, 0)
        self._update_ns[walk.rank] = duration_ns
        self._due[walk.rank] = set(self._gathers[walk.rank])
