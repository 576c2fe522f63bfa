"""The engine of one wrapped model: makes its parts, hands each what it uses, and ends them together."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from headway.collectives.hierarchical import Hosts
from headway.scheduling.buckets import BucketSchedule, GatherMode
from headway.strategies.decoupled.condition import LOCK, Condition
from headway.strategies.decoupled.gather_gradients import GatherGradients
from headway.strategies.decoupled.gather_parameters import GatherParameters
from headway.strategies.decoupled.layout import Layout, Usage
from headway.strategies.decoupled.peers import HEADER_BYTES, Asking, Limits, Peers, Reply
from headway.strategies.decoupled.reducer import GradientReducer
from headway.strategies.decoupled.settlement import Form, Settlement
from headway.strategies.decoupled.transport import BucketTransport
from headway.strategies.live.channels.streams import wait_on_host
from headway.strategies.live.channels.wiring import OwnGroups, Wiring

BUCKET_BYTES = 128  # of a bucket in a request
NOTHING = BucketSchedule(())


class Engine:
    """Keeps the promise that whoever looks at a parameter or its gradient sees what stock DDP would show."""

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        schedule: BucketSchedule,
        wiring: Wiring,
        groups: OwnGroups,
        hosts: Hosts,
        peers: Peers,
        *,
        find_unused: bool = False,
    ) -> None:
        self.groups = groups
        self.peers = peers
        self.synchronise = True  # whether the last forward was outside of no_sync()
        self.own_handles: list[RemovableHandle] = []  # of hooks that others have registered for it
        self.watched: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # modules that have one
        self._earlier: frozenset[int] = frozenset()  # accumulated before these buckets were made
        self._wiring = wiring
        self._condition = Condition(peers.timeout_s)
        self.transport = BucketTransport(
            wiring, groups, hosts, peers.culprit, self._condition, peers.disagreement
        )
        self.settlement = Settlement(self.transport, self._condition)
        self.reducer = GradientReducer(
            self.transport, self.settlement, self._condition, wiring.device, find_unused=find_unused
        )
        self._answering = wiring.streams.new()
        peers.answer_with(self)
        self._install(parameters, schedule)

    # The buckets in force ----------------------------------------------------------------------------

    def _install(self, parameters: Mapping[str, nn.Parameter], schedule: BucketSchedule) -> None:
        layout = Layout(parameters, schedule, self.transport.world_size, self.transport.rank, self._wiring)
        usage = Usage(layout.states, self.transport)
        asking = Asking(self.peers, self._condition)

        def make_form(gather: GatherMode) -> Form:
            settling, condition = self.settlement, self._condition
            if gather == "gradients":
                return GatherGradients(layout, self.transport, usage, settling, condition, self)
            return GatherParameters(layout, self.transport, usage, asking, settling, condition, self)

        self.layout = layout
        self.transport.use(layout.buckets, schedule)
        self._condition.unfilled = usage.unused_names
        self.settlement.follow(layout, usage, make_form)
        self._hooks = self.reducer.follow(layout, usage)

    def reschedule(self, parameters: Mapping[str, nn.Parameter], schedule: BucketSchedule) -> None:
        """Put another schedule in force, on every rank at the same point of the script, with nothing in flight."""
        with LOCK:
            self._take_down()
            self._install(parameters, schedule)

    def stand_aside(self) -> None:
        """Leave whole optimizers, parameters and modules behind as if there had been no engine, and give up buckets.

        On every rank at the same point of the script, between two backwards. Connections stay, and ``reschedule``
        comes back.
        """
        with LOCK:
            self._take_down()
            for handle in self.own_handles:
                handle.remove()
            self.own_handles.clear()
            self.watched.clear()
            self._install({}, NOTHING)

    def _take_down(self) -> None:
        self._condition.check_usable()
        self.note_accumulated(self.accumulated)  # other buckets know nothing of it
        self.settlement.settle_all()
        self.settlement.form.leave()
        self.transport.meet()  # ranks that are slower may still have questions in terms of the old buckets
        for handle in self._hooks:
            handle.remove()
        self.settlement.release()
        for bucket in self.layout.buckets:
            bucket.fence.join()  # its memory is about to be used for something else

    @property
    def accumulated(self) -> frozenset[int]:
        """The identities of parameters whose gradients a backward has added to that was not reduced."""
        here = frozenset(id(state.parameter) for state in self.layout.states if state.accumulated_here)
        reduces = any(bucket.reductions for bucket in self.layout.buckets)
        return here if reduces else here | self._earlier

    def note_accumulated(self, parameters: Collection[int]) -> None:
        """The same of ``parameters`` until a backward is reduced, whatever buckets they were in meanwhile."""
        self._earlier = frozenset(parameters)

    def warn_of_drift(self, unfrozen: Sequence[str]) -> None:
        """Warn once where parameters are trained that were not when the model was wrapped."""
        if unfrozen:
            self._condition.warn_of_drift(
                "unfrozen", f"{unfrozen[0]} was unfrozen or added after the model was wrapped"
            )

    @property
    def schedule(self) -> BucketSchedule:
        """The schedule in force."""
        return self.layout.schedule

    # What peers ask ----------------------------------------------------------------------------------

    def answer(self, request: Mapping[str, Any]) -> Reply:
        """What a peer asks for; runs on a thread of its own.

        And on a stream of its own: training's may be waiting for a collective that waits for who asks.
        """
        with self._wiring.streams.on(self._answering):
            return self.settlement.form.answer(request)

    @property
    def request_limits(self) -> Limits:
        """How large a request may be: it has a few numbers for each bucket."""
        return Limits(HEADER_BYTES + BUCKET_BYTES * len(self.layout.buckets))

    @property
    def progress(self) -> tuple[int, str]:
        """How many collectives this rank has asked for, and the last of them."""
        return self.transport.progress

    @property
    def steps(self) -> int:
        """How many steps of optimizers this rank has taken under these buckets."""
        return self.transport.steps

    def asked_for(self, sequence: int) -> list[Any] | None:
        """What the collective of that number is; None where it has not been asked for, or was long ago."""
        return self.transport.asked_for(sequence)

    @property
    def failed(self) -> bool:
        """Whether something went wrong for good."""
        return self._condition.failure is not None

    # The end -----------------------------------------------------------------------------------------

    @property
    def closed(self) -> bool:
        """Whether it has ended."""
        return self._condition.closed

    @property
    def running(self) -> bool:
        """Whether a backward is filling buckets, or was interrupted while it did."""
        return self._condition.filling

    def check_usable(self) -> None:
        """Raise what went wrong before, or UnsupportedError where a backward never finished."""
        self._condition.check_usable()

    def begin_forward(self) -> None:
        """A forward that records gradients begins. Raises as ``check_usable``, and where two threads train."""
        self._condition.begin_forward()
        self._condition.check_usable()

    def give_up(self) -> int:
        """As of ``Settlement``, and end the threads; the other ranks are told nothing."""
        missing = self.settlement.give_up()
        self.close(together=False)
        return missing

    def close(self, *, together: bool, exiting: bool = False) -> None:
        """Finish what is in flight, stop the threads and leave ordinary parameters behind.

        ``together`` says that every rank does so now: then a rank stays until no other has a question left. Where the
        process is ``exiting`` nobody will look at gradients, and ranks cannot be asked for them.
        """
        if self.closed:
            return
        try:
            if not self.failed and not self.running:
                self._finish(together=together, exiting=exiting)
        finally:
            self._condition.closed = True
            if together or self.failed:
                self.peers.close()
            self.transport.stop()
            for handle in [*self._hooks, *self.own_handles]:
                handle.remove()
            if not self.failed:
                self.settlement.release()

    def _finish(self, *, together: bool, exiting: bool) -> None:
        with LOCK:
            if exiting:
                self.settlement.settle_values()
            else:
                self.settlement.settle_all()
            if together or exiting:
                self.settlement.form.lose_states()
            else:
                self.settlement.form.leave_states()
        if together:
            # Not by a collective: on another rank the model may have been collected a while ago.
            self.peers.gone()
            self.peers.all_gone(self.peers.timeout_s)

    def disconnect(self) -> None:
        """Give back the connections, threads and buckets of a closed engine, which no rank has a use for any more."""
        assert self.closed
        wait_on_host(self._wiring.streams.mark())  # training may still read what is of the channels' streams
        self.peers.close()
        self.peers.answer_with(None)
        self.transport.disconnect()
        self.layout.buckets.clear()
        self.groups.end()
