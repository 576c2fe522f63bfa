"""The engine of one wrapped model: takes gradients, fills buckets, and queues their collectives.

Every synchronised backward queues, on every rank, the reduce-scatters of all buckets in plan order, each exactly once,
whatever the script does afterwards. What is gathered, and when, is the form's to say: see ``gather_gradients`` and
``gather_parameters``.
"""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.hooks import RemovableHandle

from headway import torch_private
from headway.collectives.algorithms import ALL_GATHER, ALL_REDUCE, RING, Run, prepare
from headway.collectives.program import scratch_numel
from headway.collectives.selection import Selection
from headway.errors import HeadwayError, HeadwayWarning, UnsupportedError
from headway.scheduling.buckets import BucketSchedule, GatherMode
from headway.strategies.data_parallel.channels.communication import Channels, Job, own_work
from headway.strategies.data_parallel.channels.stream_channels import StreamChannels
from headway.strategies.data_parallel.channels.streams import BufferFence, Streams, wait_on_host
from headway.strategies.data_parallel.channels.wiring import OwnGroups, Wiring
from headway.strategies.data_parallel.decoupled import deferred
from headway.strategies.data_parallel.decoupled.bucket import BucketView, LiveBucket, SettleGroup
from headway.strategies.data_parallel.decoupled.form import Form
from headway.strategies.data_parallel.decoupled.messages import HEADER_BYTES, Answer, Limits, Reply
from headway.strategies.data_parallel.decoupled.parameter_state import ParameterState
from headway.strategies.data_parallel.decoupled.policy import DecoupledStrategy
from headway.strategies.data_parallel.decoupled.reducer import GradientReducer
from headway.strategies.data_parallel.decoupled.transport import (
    BackendCollectives,
    ChunkProgramCollectives,
    Collectives,
)
from headway.strategies.data_parallel.decoupled.usage import Usage

if TYPE_CHECKING:
    from headway.strategies.data_parallel.decoupled.peers import Peers


POLL_S = 0.001
BUCKET_BYTES = 128  # of a bucket in a request


class Engine:
    """Keeps the promise that whoever looks at a parameter or its gradient sees what stock DDP would show."""

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        schedule: BucketSchedule,
        wiring: Wiring,
        groups: OwnGroups,
        peers: Peers,
        *,
        find_unused: bool = False,
    ) -> None:
        self.wiring = wiring
        self.groups = groups
        self.rank, self.world_size = dist.get_rank(groups.host[0]), dist.get_world_size(groups.host[0])
        self.synchronise = True  # whether the last forward was outside of no_sync()
        self.divisor = float(self.world_size)  # what sums of gradients are divided by; join() may change it
        self.find_unused = find_unused
        self.closed = False
        self.peers = peers
        self.lock = threading.RLock()
        self._failure: HeadwayError | None = None
        self._warned = False
        self._change_form = False
        self.needs_gradients = False  # an optimizer was stepped that looks at whole gradients
        self.reducer = GradientReducer(self)
        self._settling = BufferFence(wiring.streams, on_host=False)  # of parameters, out of their buckets
        self._answering = wiring.streams.new()
        self._channels: Channels | StreamChannels
        if wiring.native:
            host = Channels(groups, peers.culprit, Streams(torch.device("cpu")), DecoupledStrategy.name)
            self._channels = StreamChannels(groups.native, host, wiring.streams)
        else:
            self._channels = Channels(groups, peers.culprit, wiring.streams, DecoupledStrategy.name)
        peers.answer_with(self)
        self.own_handles: list[RemovableHandle] = []
        self._install(parameters, schedule)

    # The buckets in force --------------------------------------------------------------------------

    def _install(self, parameters: Mapping[str, nn.Parameter], schedule: BucketSchedule) -> None:
        self.schedule = schedule
        # Asked for under the schedule before. Steps ask anew, at one point of the script on every rank; here, some
        # ranks may have had inputs, and steps, that others had not.
        self._change_form = self.needs_gradients = False
        slots = {name: ParameterState(self, name, parameters[name]) for name in schedule.buckets_of}
        self.buckets = [
            LiveBucket(planned, self.world_size, self.rank, self.wiring) for planned in schedule.buckets
        ]
        for planned, bucket in zip(schedule.buckets, self.buckets, strict=True):
            offset = 0
            for part in planned.parts:
                slot = slots[part.parameter]
                slot.places.append(BucketView(bucket, slot.parameter, part.start, part.end, offset))
                offset += part.numel
            bucket.slots = [slots[name] for name in planned.parameters]
        self.slots = list(slots.values())
        self.units = [SettleGroup([self.buckets[index] for index in indices]) for indices in schedule.units]
        self.usage = Usage(self.slots)
        self._channels.use(schedule.channels)
        self._collectives: Collectives = (
            BackendCollectives(self.groups.native)
            if self.wiring.native
            else ChunkProgramCollectives(self.buckets, self.prepare, schedule, self.world_size)
        )
        self.form: Form = _make_form(self, schedule.gather)
        for slot in self.slots:
            deferred.register(slot.parameter, slot)
        self._hooks = self.reducer.follow(schedule)

    def reschedule(self, parameters: Mapping[str, nn.Parameter], schedule: BucketSchedule) -> None:
        """Put another schedule in force, on every rank at the same point of the script, with nothing under way."""
        self.check_usable()
        self.settle_all()
        self.form.leave()
        self._meet()  # ranks that are slower may still have questions in terms of the old buckets
        self._uninstall()
        self._install(parameters, schedule)

    def _uninstall(self) -> None:
        for handle in self._hooks:
            handle.remove()
        for slot in self.slots:
            slot.leave()
            deferred.unregister(slot.parameter)
        for bucket in self.buckets:
            bucket.fence.join()  # its memory is about to be used for something else

    def gather_gradients_from_now_on(self) -> None:
        """Have the next backward gather gradients; every rank says so at the same point of the script."""
        self.needs_gradients = True
        if self.schedule.gather == "parameters":
            self._change_form = True

    def change_form(self) -> None:
        """A backward has begun and nothing is under way: put a form in force that was asked for."""
        if self._change_form:
            self._change_form = False
            self.form.leave()
            self._meet()
            self.schedule = replace(self.schedule, gather="gradients")
            self.form = _make_form(self, "gradients")

    def unsettle(self) -> None:
        """Something was deferred that the next backward must find settled."""
        self.reducer.unsettle()

    def refuse_inside_backward(self, slot: ParameterState, what: str) -> None:
        """Raise UnsupportedError where backward is still running: not every bucket is on its way yet."""
        self.reducer.refuse_while_running(slot, what)

    # Collectives -----------------------------------------------------------------------------------

    def collective(
        self,
        name: str,
        bucket: LiveBucket,
        before: Callable[[], None] | None = None,
        after: Sequence[Job] = (),
        then: Callable[[], None] | None = None,
    ) -> Job:
        """Queue a collective of ``bucket``, between ``before`` and ``then`` on the same thread or stream."""
        turn = bucket.fence.acquire_on_host()
        number = bucket.reductions
        if name == ALL_GATHER:
            number = bucket.gathers = bucket.gathers + 1

        def work(channel: int) -> None:
            with turn:
                if before is not None:
                    with own_work():
                        before()
                self._collectives.run(name, bucket, channel, number)
                if then is not None:
                    with own_work():
                        then()

        algorithm = self._collectives.algorithm(name, bucket)
        return self._channels.submit(Job(name, bucket.index, bucket.size_bytes, work, after, algorithm))

    def submit(self, job: Job) -> Job:
        """Queue ``job`` behind what is queued; every rank must do so at the same point."""
        return self._channels.submit(job)

    def wait(self, job: Job) -> None:
        """Return when ``job`` is done. Raises CommunicationError or InternalError where it failed, and ever after."""
        try:
            self._channels.wait(job)
        except HeadwayError as error:
            self._failure = error
            raise

    def ask_all(self, request: Mapping[str, Any], limits: Callable[[int], Limits]) -> dict[int, Answer]:
        """Ask every other rank, for at most its limits. Raises CommunicationError where one fails, and ever after."""
        try:
            return self.peers.ask_all(request, limits)
        except HeadwayError as error:
            self._failure = error
            raise

    def until(self, condition: Callable[[], bool]) -> None:
        """Return when ``condition`` holds, which a peer asked about. Raises UnsupportedError where it never does."""
        deadline = time.monotonic() + self.peers.timeout_s
        while not condition():
            if self.failed or self.closed or time.monotonic() > deadline:
                raise UnsupportedError("a rank did not come to the point that another asked it about")
            time.sleep(POLL_S)

    @property
    def request_limits(self) -> Limits:
        """How large a request may be: it has a few numbers for each bucket."""
        return Limits(HEADER_BYTES + BUCKET_BYTES * len(self.buckets))

    def answer(self, request: Mapping[str, Any]) -> Reply:
        """What a peer asks for; runs on a thread of its own.

        And on a stream of its own: training's may be waiting for a collective that waits for who asks.
        """
        with self.wiring.streams.on(self._answering):
            return self.form.answer(request)

    def prepare(self, selection: Selection, flat: torch.Tensor, scratch: torch.Tensor, channel: int) -> Run:
        """A collective of a tensor on the CPU, to be run on ``channel``."""
        groups = self.groups
        second = groups.second[channel] if groups.second else None
        algorithm, kind, pieces = selection
        return prepare(algorithm, kind, flat, groups.host[channel], scratch, pieces, second)

    @property
    def channels(self) -> int:
        """How many collectives a schedule may have under way at a time."""
        return len(self.groups.native or self.groups.host)

    @property
    def progress(self) -> tuple[int, str]:
        """How many collectives this rank has asked for, and the last of them."""
        last = self._channels.last
        return self._channels.submitted, "" if last is None else str(last)

    # Settling ----------------------------------------------------------------------------------------

    def settle_value(self, unit: SettleGroup) -> None:
        """Finish the update that is due for ``unit``."""
        with self.lock:
            if unit.in_flight:
                self.check_usable()
                with self._settling.acquire():
                    self.form.settle_value(unit)

    def join_settling(self) -> None:
        """Have the current stream wait for values that another stream has settled."""
        self._settling.join()

    def settle_gradient(self, unit: SettleGroup) -> None:
        """Bring averages into ``.grad``."""
        with self.lock:
            self.check_usable()
            self.form.settle_gradient(unit)

    def settle_values(self) -> None:
        """Finish every update that is due, in gather order."""
        for index in self.schedule.gather_order:
            unit = self.buckets[index].unit
            if any(slot.stepped for slot in unit.slots):
                self.settle_value(unit)

    def settle_all(self) -> None:
        """Finish everything: due updates into parameters, averages into ``.grad``."""
        self.settle_values()
        for index in self.schedule.gather_order:
            unit = self.buckets[index].unit
            if any(slot.to_bring for slot in unit.slots):
                self.settle_gradient(unit)
            self.settle_value(unit)

    # What happens to the whole ---------------------------------------------------------------------

    def check_usable(self, *, inside_backward: bool = False) -> None:
        """Raise what went wrong before, or UnsupportedError where a backward never finished."""
        if self._failure is not None:
            raise self._failure
        if self.closed:
            raise UnsupportedError(
                "the process group of a decoupled model has been destroyed", fix="Wrap the model again."
            )
        if self.reducer.running and not inside_backward and not torch_private.inside_backward():
            raise self.fail_unfinished()

    def warn_of_aliases(self, name: str) -> None:
        """Say, once, that overlap is lost for a bucket because somebody could look past the parameter."""
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"another tensor shares the memory of {name} (a state_dict(), view or array that was kept, or a "
                "loss whose backward did not run), so its bucket is updated inside step() and gains nothing. "
                "Keep a copy (clone), or delete it before step().",
                HeadwayWarning,
                stacklevel=2,
            )

    def close(self, *, together: bool, exiting: bool = False) -> None:
        """Finish what is under way, stop the threads and leave ordinary parameters behind.

        ``together`` says that every rank does so now: then a rank stays until no other has a question left. Where the
        process is ``exiting`` nobody will look at gradients, and ranks cannot be asked for them.
        """
        if self.closed:
            return
        try:
            if self._failure is None and not self.reducer.running:
                if exiting:
                    self.settle_values()
                else:
                    self.settle_all()
                if together or exiting:
                    self.form.lose_states()
                else:
                    self.form.leave_states()
                if together:
                    # Not by a collective: on another rank the model may have been collected a while ago.
                    self.peers.gone()
                    self.peers.all_gone(self.peers.timeout_s)
        finally:
            self.closed = True
            if together or self._failure is not None:
                self.peers.close()
            self._channels.stop()
            for handle in [*self._hooks, *self.own_handles]:
                handle.remove()
            if self._failure is None:
                for slot in self.slots:
                    slot.leave()
                    deferred.unregister(slot.parameter)

    def disconnect(self) -> None:
        """Give back the connections, threads and buckets of a closed engine, which no rank has a use for any more."""
        assert self.closed
        wait_on_host(self.wiring.streams.mark())  # training may still read what is of the channels' streams
        self.peers.close()
        self.peers.answer_with(None)
        del self._collectives, self._channels, self.buckets  # they are bound to connections
        self.groups.end()

    def _meet(self) -> None:
        """Wait for every rank to come to this point."""
        token = torch.zeros(self.world_size, dtype=torch.int32, device="cpu")
        self.wait(self.submit(self.all_reduce(token)))

    def all_reduce(self, tensor: torch.Tensor) -> Job:
        """A job that sums a small tensor over ranks, in place."""
        numel = tensor.numel()
        scratch = tensor.new_empty(scratch_numel(numel, self.world_size))

        def work(channel: int) -> None:
            self.prepare(Selection(RING, ALL_REDUCE), tensor, scratch, channel)()

        return Job("all_reduce", -1, numel * tensor.element_size(), work)

    @property
    def failed(self) -> bool:
        """Whether something went wrong for good."""
        return self._failure is not None

    @property
    def idle(self) -> bool:
        """Whether nothing is under way."""
        return not self.reducer.running and not any(unit.in_flight for unit in self.units)

    @property
    def running(self) -> bool:
        """Whether a backward is filling buckets, or was interrupted while it did."""
        return self.reducer.running

    def fail(self, what: str, got: str, fix: str) -> UnsupportedError:
        """Note for good that training cannot go on; returns the error to raise."""
        error = UnsupportedError(what, got=got, fix=fix)
        self._failure = error
        return error

    def fail_unfinished(self) -> UnsupportedError:
        """Note for good that a backward left buckets unfilled; returns the error to raise."""
        missing = [slot.name for slot in self.usage.unused()]
        return self.fail(
            "backward ended without a gradient for some parameters, or was interrupted",
            f"{len(missing)} without: {', '.join(missing[:3])}",
            "Use every trainable parameter in every backward, freeze the others, or pass "
            "find_unused_parameters=True.",
        )


def _make_form(engine: Engine, gather: GatherMode) -> Form:
    from headway.strategies.data_parallel.decoupled.gather_gradients import GatherGradients
    from headway.strategies.data_parallel.decoupled.gather_parameters import GatherParameters

    return GatherGradients(engine) if gather == "gradients" else GatherParameters(engine)
