"""What the decoupled all-reduce adds to the graph: reduce-scatters under backward, gathers under forward."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from headway.cluster import (
    COPY_MIB,
    DEFERRED_UPDATE,
    RUNTIME_BACKWARD,
    RUNTIME_FORWARD,
    RUNTIME_STEP,
    STEP_CALL,
)
from headway.collectives.algorithms import ALL_GATHER, ALL_REDUCE, NCCL, RING
from headway.collectives.selection import Selection
from headway.compression.codec import slowdown_of, stretches_ns
from headway.graph.build import CODEC, GraphBuilder, RankCursor
from headway.graph.computation import Item, Part
from headway.graph.step_layout import InRecordedOrder
from headway.job import Job
from headway.scheduling.buckets import BucketReadiness, BucketSchedule, channel_of
from headway.trace.events import Read


class Jobs:
    """Job number ``n`` of a rank is served by its channel ``n % channels``."""

    def __init__(self, graph: GraphBuilder[BucketSchedule]) -> None:
        self._graph = graph
        self._schedule = graph.schedule
        self._hosts = graph.hosts
        self._selected: dict[tuple[str, int], Selection] = {}  # by half and bytes
        self._counts: dict[int, int] = defaultdict(int)  # rank -> how many jobs it has asked for
        self._latest: dict[int, list[int]] = defaultdict(
            list
        )  # rank -> its latest jobs, one a channel at most
        self._others: dict[int, int] = defaultdict(int)  # rank -> collectives of no bucket

    def of_bucket(
        self,
        cursor: RankCursor,
        name: str,
        index: int,
        passes: int,
        after: Sequence[int] = (),
        after_work: Sequence[int] = (),
    ) -> int:
        """Queue the half ``name`` of a bucket in backward number ``passes``. Returns the collective's number."""
        bucket = self._schedule.buckets[index]
        size_bytes = self._schedule.half_bytes(name, bucket)
        if (cast := self._schedule.cast_in(name)) is not None:
            # From and to the type that is sent, on the channel's thread; all of it before, as it adds up to as much.
            cluster = self._graph.cluster
            cast_ns = sum(stretches_ns(cast, cluster, bucket.size_bytes, 1))
            casting = self._graph.work(
                cursor, cast_ns, bucket=index, after=[*self.before(cursor), *after], after_work=after_work,
                kind=CODEC, slowdown=slowdown_of(cast, cluster),
            )  # fmt: skip
            after_work = [casting]
        key = passes * len(self._schedule.buckets) + index
        return self._submit(
            cursor, name, key, size_bytes, index, self._select(name, size_bytes), after, after_work
        )

    def _select(self, name: str, size_bytes: int) -> Selection:
        if (name, size_bytes) not in self._selected:
            graph = self._graph
            select = self._schedule.algorithms.select
            selected = select(name, size_bytes, graph.world_size, graph.cluster.library)
            self._selected[name, size_bytes] = selected.on(self._hosts)
        return self._selected[name, size_bytes]

    def exchange(self, cursor: RankCursor, size_bytes: int) -> int:
        """Queue the sum over ranks of a small tensor. Returns the collective's number."""
        return self._submit(
            cursor, ALL_REDUCE, self._key(cursor), size_bytes, -1, Selection(RING, ALL_REDUCE)
        )

    def ask(self, cursor: RankCursor, size_bytes: int, after: Sequence[int]) -> int:
        """Ask the other ranks for their shares of ``size_bytes``, over connections of their own, as in one ring.

        They answer after the collectives ``after``. Returns the collective's number.
        """
        return self._graph.launch(
            cursor, ALL_GATHER, self._key(cursor), size_bytes, bucket=-1, selection=Selection(RING, ALL_GATHER),
            channel=self._schedule.channels, after=after,
        )  # fmt: skip

    def before(self, cursor: RankCursor) -> list[int]:
        """The job before the next one on its channel."""
        jobs = self._latest[cursor.rank]
        return jobs[:1] if len(jobs) == self._schedule.channels else []

    def _key(self, cursor: RankCursor) -> int:
        self._others[cursor.rank] += 1
        return -self._others[cursor.rank]

    def _submit(
        self,
        cursor: RankCursor,
        name: str,
        key: int,
        size_bytes: int,
        bucket: int,
        selection: Selection,
        after: Sequence[int] = (),
        after_work: Sequence[int] = (),
    ) -> int:
        count = self._counts[cursor.rank]
        self._counts[cursor.rank] += 1
        number = self._graph.launch(
            cursor,
            name,
            key,
            size_bytes,
            bucket=bucket,
            selection=selection,
            channel=channel_of(count, self._schedule.channels),
            after=[*self.before(cursor), *after],
            after_work=after_work,
        )
        self._latest[cursor.rank] = [*self._latest[cursor.rank], number][-self._schedule.channels :]
        return number


class Reactions(InRecordedOrder):
    """The runtime's reactions, for gathers of gradients and of parameters.

    Buckets that share parameters are settled together, as a unit.
    """

    def __init__(self, graph: GraphBuilder[BucketSchedule], job: Job) -> None:
        super().__init__(graph)
        self._model = job.model
        if (slower := graph.cluster.decoupled_slowdown) is not None:
            graph.slowdowns = {Part.FORWARD: slower.forward, Part.BACKWARD: slower.backward}
        self._schedule = graph.schedule
        self._fillings = [BucketReadiness(graph.schedule) for _ in range(graph.ranks)]
        self._total_bytes = max(1, sum(bucket.size_bytes for bucket in graph.schedule.buckets))
        self._units = graph.schedule.units
        self._unit_of = {bucket: unit for unit, buckets in enumerate(self._units) for bucket in buckets}
        self._units_of_module = self._units_of_modules()
        self._begun: set[int] = set()  # ranks whose backward has begun
        self._passes: dict[int, int] = defaultdict(int)
        self._jobs = Jobs(graph)
        self._reduced: dict[int, dict[int, int]] = defaultdict(dict)  # rank -> bucket -> its reduce-scatter
        self._latest: dict[int, dict[int, int]] = defaultdict(dict)  # the same, whether stepped since or not
        self._brought: set[int] = set()  # ranks that hold their gradients whole since the latest backward
        self._settled: dict[int, set[int]] = defaultdict(
            set
        )  # rank -> units settled for a read, before a step
        self._copy_ns: dict[int, int] = defaultdict(int)  # rank -> what copying all gradients once takes
        self._gathers: dict[int, dict[int, int]] = defaultdict(dict)  # rank -> bucket -> its all-gather
        self._unused: dict[int, list[str]] = defaultdict(list)  # rank -> without a gradient in this backward
        self._uses: dict[int, int] = {}  # rank -> the exchange of what its latest backward used
        self._asking: dict[int, set[int]] = defaultdict(set)  # rank -> units that wait for that exchange
        self._due: dict[int, set[int]] = defaultdict(set)  # rank -> units the optimizer has stepped since
        self._update_ns: dict[int, int] = defaultdict(int)
        self._updates: dict[int, int] = {}  # rank -> the latest update of a share of a bucket
        self._taken: dict[int, int] = defaultdict(int)  # rank -> gradients taken since its latest launch
        self._update_overhead_ns = self._cost_ns(DEFERRED_UPDATE)
        self._background_overhead_ns = graph.cluster.background_update_us * 1e3
        self._step_call_ns = round(self._cost_ns(STEP_CALL))
        self._step_ns = round(self._cost_ns(RUNTIME_STEP) * len(job.model.parameters))

    def _cost_ns(self, name: str) -> float:
        return self._graph.cluster.cost_of(name).overhead_us * 1e3

    def use(self, cursor: RankCursor, module: str) -> None:
        """Forward needs a module: wait for its units' gathers, and bring their parameters up to date.

        Units that the optimizer has not stepped hold gradients only, which forward has no need of.
        """
        for unit in self._units_of_module.get(module, ()):
            if unit in self._due[cursor.rank]:
                self._materialise(cursor, unit)

    def use_all(self, cursor: RankCursor) -> None:
        """Wait for all of them."""
        for index in self._schedule.gather_order:
            if self._unit_of[index] in self._due[cursor.rank]:
                self._materialise(cursor, self._unit_of[index])

    def _materialise(self, cursor: RankCursor, unit: int) -> None:
        buckets = self._units[unit]
        in_flight = self._gathers[cursor.rank]
        gathers = [in_flight.pop(index) for index in buckets if index in in_flight]
        if not gathers:
            return
        for gather in gathers:
            self._graph.wait(cursor, "parameters", gather)
        if unit in self._asking[cursor.rank]:
            self._graph.wait(cursor, "parameters", self._uses[cursor.rank])
        update_ns = 0
        if unit in self._due[cursor.rank]:
            self._due[cursor.rank].remove(unit)
            update_ns = self._settling_ns(buckets)
            if self._schedule.gather == "gradients":
                update_ns += round(self._whole_ns(cursor.rank, buckets) + self._update_overhead_ns)
        self._graph.compute(cursor, Part.OPTIMIZER, update_ns, bucket=buckets[0])

    def _settling_ns(self, buckets: Sequence[int]) -> int:
        """What it takes to bring the parameters of a unit up to date, besides their update."""
        settled = [self._schedule.buckets[index] for index in buckets]
        names = {name for bucket in settled for name in bucket.parameters}
        taken_ns = self._cost_ns(RUNTIME_FORWARD) * len(names)
        if self._schedule.gather == "parameters":
            taken_ns += self._cost_ns(COPY_MIB) * sum(bucket.size_bytes for bucket in settled) / 2**20
        return round(taken_ns)

    def _whole_ns(self, rank: int, buckets: Sequence[int]) -> float:
        """The part of these buckets in what the optimizer does to all parameters."""
        return self._update_ns[rank] * self._share(buckets)

    def _share(self, buckets: Sequence[int]) -> float:
        return sum(self._schedule.buckets[index].size_bytes for index in buckets) / self._total_bytes

    def ready(self, cursor: RankCursor, parameter: str) -> None:
        """Count down the parameter's bucket; reduce-scatter what is full, in order."""
        filling = self._fillings[cursor.rank]
        if cursor.rank not in self._begun:  # the first gradient of a pass
            self._begun.add(cursor.rank)
            self._settle_all(cursor)
            self._brought.discard(cursor.rank)
            self._settled[cursor.rank].clear()
        self._taken[cursor.rank] += 1
        full = filling.ready(parameter)
        if full and (taking_ns := self._cost_ns(RUNTIME_BACKWARD)):
            self._graph.compute(cursor, Part.BACKWARD, round(taking_ns * self._taken[cursor.rank]))
            self._taken[cursor.rank] = 0
        for index in full:
            number = self._jobs.of_bucket(cursor, "reduce_scatter", index, self._passes[cursor.rank])
            self._reduced[cursor.rank][index] = self._latest[cursor.rank][index] = number
            for gathered in self._schedule.gathers_behind(index):
                self._gather(cursor, gathered)
            if filling.complete and index == filling.next - 1 and self._model.find_unused_parameters:
                self._exchange_uses(cursor)

    def unused(self, cursor: RankCursor, parameter: str) -> None:
        """Whether it gets a gradient after all is known when backward ends."""
        self._unused[cursor.rank].append(parameter)

    def _exchange_uses(self, cursor: RankCursor) -> None:
        """Ranks add up which parameters they used; who has no gradient waits for that before an update."""
        self._uses[cursor.rank] = self._jobs.exchange(cursor, self._model.uses_bytes)
        buckets_of = self._schedule.buckets_of
        self._asking[cursor.rank] = {
            self._unit_of[index] for name in self._unused[cursor.rank] for index in buckets_of.get(name, ())
        }

    def _settle_all(self, cursor: RankCursor) -> None:
        """What forward left untouched is settled, in gather order, before the first gradient is accumulated.

        Gradients that were reduced and neither gathered nor stepped are waited for too: their buckets fill again.
        """
        for index in self._schedule.gather_order:
            self._materialise(cursor, self._unit_of[index])
        if self._schedule.gather == "parameters" and (reduced := self._reduced[cursor.rank]):
            for number in reduced.values():
                self._graph.wait(cursor, "gradients", number)
            self._graph.compute(cursor, Part.FINALIZE, 0)
        self._reduced[cursor.rank].clear()

    def _gather(self, cursor: RankCursor, index: int, after_work: Sequence[int] = ()) -> None:
        reduced = self._reduced[cursor.rank].get(index)
        after = [] if reduced is None else [reduced]
        passes = self._passes[cursor.rank]
        self._gathers[cursor.rank][index] = self._jobs.of_bucket(
            cursor, "all_gather", index, passes, after, after_work
        )

    def backward_end(self, cursor: RankCursor) -> None:
        """Nothing waits here; the next pass counts from 0. Parameters without a gradient take part with zeros."""
        for parameter in self._unused[cursor.rank]:
            self.ready(cursor, parameter)
        self._unused[cursor.rank].clear()
        self._begun.discard(cursor.rank)
        self._fillings[cursor.rank].restart()
        self._passes[cursor.rank] += 1

    def finalize(self, cursor: RankCursor, duration_ns: int) -> None:
        """There is nothing to copy back before somebody looks: the deferred update reads the bucket."""
        if duration_ns:
            self._copy_ns[cursor.rank] = duration_ns

    def read(self, cursor: RankCursor, read: Item) -> None:
        """Wait for what is read: values, averages, or their shares where each rank can do its share of it."""
        if read.name == Read.VALUES:
            self._read_values(cursor, read)
        elif self._schedule.gather == "gradients":
            self._read_gathered(cursor, read)
        elif not self._latest[cursor.rank]:
            self._graph.compute(cursor, Part.READ, read.duration_ns)
        elif read.name in Read.BY_SHARES and self._shards_reads:
            self._read_shards(cursor, read)
        else:
            self._bring(cursor, read)

    def _read_values(self, cursor: RankCursor, read: Item) -> None:
        """Bring what is looked at up to date, as forward would."""
        wanted = {self._unit_of[index] for index in self._buckets_read(read)}
        for index in self._schedule.gather_order:
            unit = self._unit_of[index]
            if unit in wanted and unit in self._due[cursor.rank]:
                self._materialise(cursor, unit)
        self._graph.compute(cursor, Part.READ, read.duration_ns)

    @property
    def _shards_reads(self) -> bool:
        return self._graph.cluster.library != NCCL

    def _read_gathered(self, cursor: RankCursor, read: Item) -> None:
        """Settle what is read. What is settled before a step is not deferred by it."""
        wanted = {self._unit_of[index] for index in self._buckets_read(read)}
        copied_ns = 0
        for index in self._schedule.gather_order:
            unit = self._unit_of[index]
            if unit in wanted and index in self._gathers[cursor.rank]:
                if unit not in self._due[cursor.rank]:
                    self._settled[cursor.rank].add(unit)
                    copied_ns += round(self._copy_ns[cursor.rank] * self._share(self._units[unit]))
                self._materialise(cursor, unit)
        self._graph.compute(cursor, Part.READ, read.duration_ns + copied_ns)

    def _read_shards(self, cursor: RankCursor, read: Item) -> None:
        """Each rank reads its share; a number of each is exchanged before gradients are changed."""
        for index in self._buckets_read(read):
            self._graph.wait(cursor, "gradients", self._latest[cursor.rank][index])
        self._graph.compute(cursor, Part.READ, round(read.duration_ns / self._graph.world_size))
        self._graph.wait(cursor, "gradients", self._jobs.exchange(cursor, 8 * self._graph.world_size))
        self._graph.compute(cursor, Part.READ, 0)

    def _bring(self, cursor: RankCursor, read: Item) -> None:
        """Who looks at one gradient gets all of them, from the ranks that hold their shares."""
        copied_ns = 0
        if cursor.rank not in self._brought:
            self._brought.add(cursor.rank)
            uses = [self._uses[cursor.rank]] if cursor.rank in self._uses else []
            asked = self._jobs.ask(cursor, self._total_bytes, [*self._latest[cursor.rank].values(), *uses])
            self._graph.wait(cursor, "gradients", asked)
            copied_ns = self._copy_ns[cursor.rank]
        self._graph.compute(cursor, Part.READ, read.duration_ns + copied_ns)

    def _buckets_read(self, read: Item) -> list[int]:
        buckets_of = self._schedule.buckets_of
        names = read.parameters or tuple(buckets_of)
        return sorted({index for name in names for index in buckets_of.get(name, ())})

    def optimizer(self, cursor: RankCursor, duration_ns: int) -> None:
        """Go on at once.

        With gradients each bucket's update waits for its first use, unless a read has settled it. With parameters
        every bucket that was reduced is gathered behind an update of this rank's share of it.
        """
        if duration_ns:  # of several optimizers' calls in a step the first brings all of their work
            self._update_ns[cursor.rank] = duration_ns
        if self._schedule.gather == "gradients":
            settled = self._settled.pop(cursor.rank, set())
            now = [index for unit in settled for index in self._units[unit]]
            update_ns = round(self._update_ns[cursor.rank] * self._share(now))
            self._graph.compute(cursor, Part.OPTIMIZER, update_ns + self._step_ns)
            self._due[cursor.rank] = {self._unit_of[index] for index in self._gathers[cursor.rank]}
            return
        self._graph.compute(cursor, Part.OPTIMIZER, self._step_call_ns + self._step_ns)
        reduced = self._reduced[cursor.rank]
        uses = [self._uses[cursor.rank]] if cursor.rank in self._uses else []
        for index in self._schedule.gather_order:
            if index in reduced:
                self._gather(cursor, index, [self._update_share(cursor, index, [reduced[index], *uses])])
        self._due[cursor.rank] |= {self._unit_of[index] for index in reduced}
        reduced.clear()

    def _update_share(self, cursor: RankCursor, index: int, after: Sequence[int]) -> int:
        """Update this rank's share of a bucket, behind the updates before: of a thread, or of NCCL's stream."""
        update_ns = self._whole_ns(cursor.rank, [index]) / self._graph.world_size
        earlier = self._updates.get(cursor.rank)
        if self._graph.cluster.library == NCCL:
            earlier, after = None, [*self._jobs.before(cursor), *after]
        self._updates[cursor.rank] = self._graph.work(
            cursor, round(update_ns + self._background_overhead_ns), bucket=index, after=after,
            after_work=[] if earlier is None else [earlier],
        )  # fmt: skip
        return self._updates[cursor.rank]

    def _units_of_modules(self) -> dict[str, list[int]]:
        buckets_of = self._schedule.buckets_of
        found: dict[str, list[int]] = defaultdict(list)
        for parameter in self._model.parameters:
            known = found[parameter.module]
            units = dict.fromkeys(self._unit_of[index] for index in buckets_of.get(parameter.name, ()))
            known += [unit for unit in units if unit not in known]
        return found
