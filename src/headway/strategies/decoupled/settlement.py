"""Settlement: what is finished when, so that whoever looks at a parameter or its gradient sees what stock DDP shows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NoReturn, Protocol

from torch.optim import Optimizer

from headway.errors import UnsupportedError
from headway.scheduling.buckets import GatherMode
from headway.strategies.decoupled import deferred
from headway.strategies.decoupled.condition import LOCK, Condition
from headway.strategies.decoupled.granularity import UpdateGranularity
from headway.strategies.decoupled.layout import Layout, SettleGroup, Usage
from headway.strategies.decoupled.parameter_state import ParameterState
from headway.strategies.decoupled.peers import Reply
from headway.strategies.decoupled.sharded import ShardedGradients
from headway.strategies.decoupled.transport import BucketTransport
from headway.strategies.live.channels.communication import Job
from headway.strategies.live.channels.streams import BufferFence


class Settling(Protocol):
    """What a form asks of who settles, under the engine's lock and where it can go on."""

    @property
    def needs_gradients(self) -> bool:
        """Whether an optimizer was stepped that looks at whole gradients."""

    def settle_value(self, group: SettleGroup) -> None:
        """Finish the update that is due for ``group``."""

    def settle_values(self) -> None:
        """Finish every update that is due, in gather order."""

    def read_gradient(self, state: ParameterState) -> None:
        """Make ``.grad`` current: complete the reduction, unless the script has replaced the gradient."""


class Form(Protocol):
    """What happens between a reduce-scatter and the next use of a parameter."""

    @property
    def sharded_gradients(self) -> ShardedGradients | None:
        """The reduced gradients, where each rank has a shard of them; None where every rank gets whole ones."""

    def before_gradients(self) -> None:
        """Gradients are about to be computed, and perhaps accumulated."""

    def before_local_gradients(self) -> None:
        """Gradients are about to be computed that stay on this rank."""

    def begin_backward(self) -> None:
        """Gradients are being accumulated."""

    def behind_reduction(self, index: int) -> Sequence[Job]:
        """What is to be queued right behind the reduce-scatter of bucket ``index``, which has been queued."""

    def keep(self, index: int) -> Callable[[], None] | None:
        """What is done, on the channel's thread, as soon as bucket ``index`` is reduced."""

    def settle_value(self, group: SettleGroup) -> None:
        """Make the parameters of ``group`` current."""

    def settle_gradient(self, group: SettleGroup) -> None:
        """Make ``.grad`` of the parameters of ``group`` current."""

    def stepped_by_another(self, optimizer: Optimizer) -> bool:
        """Whether another optimizer has stepped since the latest backward, so that both would have to gather."""

    def before_step(
        self, states: Sequence[ParameterState], granularity: UpdateGranularity, *, scaled_by_amp: bool
    ) -> None:
        """An optimizer of ``granularity`` steps ``states``: settle what cannot wait."""

    def takes(self, state: ParameterState, granularity: UpdateGranularity) -> bool:
        """Whether the form does the step of ``state``; otherwise stock code does, here and now."""

    def step(
        self,
        optimizer: Optimizer,
        hyper_parameters: Sequence[dict[str, Any]],
        states: Sequence[Sequence[ParameterState]],
    ) -> None:
        """Defer the update of the states it takes, one sequence a parameter group."""

    def state_wanted(self, optimizer: Optimizer) -> None:
        """Put the whole state of every parameter into ``optimizer.state``."""

    def state_replaced(self, optimizer: Optimizer) -> None:
        """The script has given the optimizer another state: forget what is kept of the old one."""

    def answer(self, request: Mapping[str, Any]) -> Reply:
        """Answer a peer."""

    def lose_states(self) -> None:
        """The process group is about to go."""

    def leave_states(self) -> None:
        """The wrapped model is gone; this rank and the others go on answering."""

    @property
    def states_left(self) -> bool:
        """Whether this rank may yet ask for what ``leave_states`` has left spread over all."""

    def leave(self) -> None:
        """The buckets are about to go: nothing may be kept in their terms."""


MakeForm = Callable[[GatherMode], Form]


class Settlement:
    """Settles the values and gradients of one engine, by the form in force."""

    layout: Layout
    usage: Usage
    form: Form

    def __init__(self, transport: BucketTransport, condition: Condition) -> None:
        self.condition = condition
        self.needs_gradients = False  # an optimizer was stepped that looks at whole gradients
        self._transport = transport
        self._fence = BufferFence(transport.streams, on_host=False)  # of parameters, out of their buckets
        self._change_form = False
        self._make_form: MakeForm
        self._guards: list[ParameterGuard] = []

    # The form in force -------------------------------------------------------------------------------

    def follow(self, layout: Layout, usage: Usage, make_form: MakeForm) -> None:
        """Settle what is of ``layout`` from now on, and answer for its parameters."""
        # Requested under the previous schedule. Steps request it again, at one point of the script on every rank; here,
        # some ranks may have had inputs, and steps, that others had not.
        self._change_form = self.needs_gradients = False
        self.layout, self.usage, self._make_form = layout, usage, make_form
        self.form = make_form(layout.schedule.gather)
        self._guards = [ParameterGuard(state, self) for state in layout.states]
        for guard in self._guards:
            deferred.register(guard.state.parameter, guard)

    def release(self) -> None:
        """Leave ordinary parameters behind."""
        with LOCK:
            for guard in self._guards:
                guard.state.release()
                deferred.unregister(guard.state.parameter)

    def gather_gradients_from_now_on(self) -> None:
        """Have the next backward gather gradients; every rank says so at the same point of the script."""
        self.needs_gradients = True
        if self.layout.schedule.gather == "parameters":
            self._change_form = True

    def change_form(self) -> None:
        """A backward has begun and nothing is in flight: put a form in force that was asked for."""
        if self._change_form:
            self._change_form = False
            self.form.leave()
            self._transport.meet()
            self.layout.schedule = replace(self.layout.schedule, gather="gradients")
            self.form = self._make_form("gradients")

    def note_step(self, states: Iterable[ParameterState]) -> None:
        """An optimizer is about to step ``states``; counted where that is the first time since they were reduced."""
        if sum(state.first_step() for state in states):  # each notes it
            self._transport.note_step()

    # Settling ----------------------------------------------------------------------------------------

    def settle_value(self, group: SettleGroup) -> None:
        """Finish the update that is due for ``group``."""
        with LOCK:
            if group.in_flight:
                self.condition.check_usable()
                with self._fence.acquire():
                    self.form.settle_value(group)

    def give_up(self) -> int:
        """Leave ordinary parameters as of the last step that was completed; returns how many steps are missing.

        Raises UnsupportedError where the latest step is complete in some of them alone.
        """
        with LOCK:
            behind = [any(s.phase.stepped for s in group.states) for group in self.layout.groups]
            if any(behind) and not all(behind):
                raise UnsupportedError(
                    "the latest step has reached some parameters and will never reach others",
                    got=f"{sum(behind)} of {len(behind)} groups of buckets without it",
                    fix="Restart the job from its last checkpoint.",
                )
            self.form.lose_states()
            self.release()
            return int(any(behind))

    def join_settling(self) -> None:
        """Have the current stream wait for values that another stream has settled."""
        self._fence.join()

    def settle_gradient(self, group: SettleGroup) -> None:
        """Bring averages into ``.grad``."""
        with LOCK:
            self.condition.check_usable()
            self.form.settle_gradient(group)

    def settle_values(self) -> None:
        """Finish every update that is due, in gather order."""
        with LOCK:
            for group in self.layout.groups_to_gather():
                if any(state.phase.stepped for state in group.states):
                    self.settle_value(group)

    def settle_all(self) -> None:
        """Finish everything: due updates into parameters, averages into ``.grad``."""
        with LOCK:
            self.condition.await_backward("every gradient")
            self.settle_values()
            for group in self.layout.groups_to_gather():
                if any(state.phase.to_bring for state in group.states):
                    self.settle_gradient(group)
                self.settle_value(group)

    def read_gradient(self, state: ParameterState) -> None:
        """Make ``.grad`` current: complete the reduction, unless the script has replaced the gradient.

        Raises UnsupportedError where backward is still running.
        """
        if not state.phase.to_bring and not self.condition.in_first_gradient:
            return
        with LOCK:
            self.condition.await_backward(f"the gradient of {state.name}")
            if state.phase.to_bring:
                if self.condition.filling:
                    self.refuse(state, "read")
                self.settle_gradient(self.layout.group_of[state])

    def refuse(self, state: ParameterState, what: str) -> NoReturn:
        """Raise UnsupportedError: backward is still running, and not every bucket is on its way yet."""
        self.condition.check_usable()
        raise UnsupportedError(
            f"the gradient of {state.name} was {what} during backward, while it is being reduced",
            fix="Read gradients after backward() has returned.",
        )

    @property
    def idle(self) -> bool:
        """Whether nothing is in flight."""
        return not self.condition.filling and not any(group.in_flight for group in self.layout.groups)


class ParameterGuard:
    """Answers for one parameter while it is deferred: see ``deferred``."""

    def __init__(self, state: ParameterState, settlement: Settlement) -> None:
        self.state = state
        self.settlement = settlement

    def before_value(self) -> None:
        """Make the value current: apply the update that is due."""
        if self.state.phase.stepped:
            with LOCK:  # another thread may have settled it, and train on, while this one waited
                if self.state.phase.stepped:
                    self.settlement.settle_value(self.settlement.layout.group_of[self.state])

    def before_gradient_read(self) -> None:
        """Make ``.grad`` current."""
        self.settlement.read_gradient(self.state)

    def before_gradient_write(self) -> None:
        """Leave ``.grad`` to the script from here on, without waiting for anything."""
        state = self.state
        if state.phase.pending:
            with LOCK:
                if self.settlement.condition.filling:
                    self.settlement.refuse(state, "replaced")
                if state.phase.pending:
                    state.leave_gradient()
