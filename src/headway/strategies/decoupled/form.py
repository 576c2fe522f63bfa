"""What an engine leaves to a form: what is gathered, and who updates what."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from torch.optim import Optimizer

from headway.strategies.decoupled.granularity import UpdateGranularity
from headway.strategies.decoupled.layout import SettleGroup
from headway.strategies.decoupled.messages import Reply
from headway.strategies.decoupled.parameter_state import ParameterState
from headway.strategies.decoupled.sharded_gradients import ShardedGradients
from headway.strategies.live.channels.communication import Job


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
