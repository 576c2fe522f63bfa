"""LocalSGD: in the place of DistributedDataParallel, a model that ranks train apart and average once a period."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from headway.errors import HeadwayWarning, UserError
from headway.job import Job
from headway.strategies.live import checkpoint
from headway.strategies.live.averaged import Layout, Policy, training_layout
from headway.strategies.live.module_spec import model_spec
from headway.strategies.live.refused_scalers import refuse_gradient_scalers_of
from headway.strategies.live.unfinished import Unfinished
from headway_baselines.local_sgd.averaging import FINISHES, PERIOD_ENDS, PeriodicAveraging
from headway_baselines.local_sgd.policy import LocalSGDStrategy
from headway_baselines.local_sgd.schedule import PeriodicSchedule
from headway_baselines.unreduced import UnreducedDataParallel


class LocalSGD(UnreducedDataParallel):
    """``module``, trained on this rank's gradients alone and averaged with all ranks' after every so many steps.

    An ordinary loop stays as it is: the one optimizer that updates the model is found at its first step, and averages
    follow its steps. Every rank makes as many of them, and within a period each has a model of its own.

    - ``finish()`` ends a period before its time, so that all ranks hold one model: after the last step, or before rank
      0 alone evaluates or saves. ``state_dict()`` is of this rank's model as it is, and warns of that once.
    - ``load_state_dict()`` of the wrapper or its module, on every rank the same, begins a period of DiLoCo anew: what
      was loaded is what it begins with, without outer momentum.
    - ``checkpoint()`` and ``restore()`` carry a rank over a restart, the outer optimizer's state included.

    Raises as ``UnreducedDataParallel`` does; a step raises UserError where ranks have not made the same number of them,
    and CommunicationError where one is lost.
    """

    called: ClassVar[str] = "local SGD"
    schedule: PeriodicSchedule

    def __init__(
        self,
        module: nn.Module,
        *,
        strategy: LocalSGDStrategy,
        optimizer: Optimizer | None = None,
        **ddp_options: Any,
    ) -> None:
        super().__init__(
            module, lambda ranks: strategy.decide(Job.of(model_spec(module), ranks)), **ddp_options
        )
        self.strategy = strategy
        self.iteration = 0
        self._averaged_at = 0  # the iteration at which ranks last held one model
        self._unfinished = Unfinished(self, _own_model)
        # Parameters that were trained, and may be frozen in the middle of a period.
        self._earlier: set[str] = set()
        self._averaging = PeriodicAveraging(
            self.process_group, self._wiring, self.schedule, self._parameters_now()
        )
        # A script may put other parameters in the place of these before its first step.
        self._changed_outside = True
        self.follow_steps(optimizer, lambda _wrapped, _optimizer: None, LocalSGD.take_up, LocalSGD.after_step)
        refuse_gradient_scalers_of(self, self.called)

    def finish(self) -> None:
        """Have all ranks hold one model: end the period that has begun, as at its end. Every rank calls it.

        Training may go on; the next period ends when it would have.
        """
        with torch.no_grad():
            self._average(FINISHES)

    @property
    def steps_apart(self) -> int:
        """How many steps ranks have made since they last held one model."""
        return self.iteration - self._averaged_at

    def checkpoint(self) -> dict[str, Any]:
        """This rank's model, optimizer, iteration, random numbers and outer state, for ``torch.save``.

        Every rank saves its own, as models differ within a period.
        """
        self.take_up()
        outer = self._averaging.outer
        with self._unfinished.expected():
            saved = checkpoint.saved(self.module, self._stepping.optimizer, self.iteration)
        return {
            **saved,
            "local_sgd": {
                "averaged_at": self._averaged_at,
                "outer": None if outer is None else outer.state_dict(),
            },
        }

    def restore(self, state: Mapping[str, Any], optimizer: Optimizer | None = None) -> None:
        """Go on from this rank's ``checkpoint()``. ``optimizer`` is the model's, where it has not made a step yet.

        Raises UserError where it is no checkpoint of this model under this strategy.
        """
        own = state.get("local_sgd") if isinstance(state, Mapping) else None
        outer = self._averaging.outer
        if not isinstance(own, Mapping) or (own.get("outer") is None) != (outer is None):
            raise UserError(
                "this is no checkpoint of a rank under this strategy", got=type(state).__name__,
                expected=f"what checkpoint() returned under {self.strategy.describe()}",
            )  # fmt: skip
        if optimizer is not None:
            self._stepping.bind_once(optimizer)
        if outer is not None:
            self._averaging.go_on(own["outer"])
        self.iteration = checkpoint.restore(state, self.module, self._stepping.optimizer)
        self._averaged_at = int(own["averaged_at"])
        self._changed_outside = False

    # What happens in training ------------------------------------------------------------------------

    def loaded(self) -> None:
        """A state was loaded: it is looked at before the next step."""
        self._changed_outside = True

    def take_up(self) -> None:
        """Have a period of DiLoCo begin with what was loaded since it began."""
        if not self._changed_outside:
            return
        self._changed_outside = False
        if self._averaging.begin(self._parameters_now()) and self.iteration:
            warnings.warn(
                f"a state was loaded after {self.iteration} steps: the period begins with it, and the outer optimizer "
                "without momentum. To go on from an earlier run, use checkpoint() and restore()",
                HeadwayWarning,
                stacklevel=2,
            )

    def after_step(self) -> None:
        """The optimizer has made a step."""
        self.iteration += 1
        if self.schedule.averages_after(self.iteration):
            self._average(PERIOD_ENDS)

    def _parameters_now(self) -> Layout:
        return self._layout(None, buffers="local", moments="local")

    def _layout(self, optimizer: Optimizer | None, *, buffers: Policy, moments: Policy) -> Layout:
        layout = training_layout(
            self.module, optimizer, buffers=buffers, moments=moments, earlier=self._earlier
        )
        self._earlier |= layout.parameters
        return layout

    def _average(self, why: int) -> None:
        self.take_up()
        layout = self._layout(
            self._stepping.optimizer, buffers=self.schedule.buffers, moments=self.schedule.moments
        )
        self._averaging.average(layout, self.iteration, why, apart=bool(self.steps_apart))
        self._averaged_at = self.iteration


def _own_model(wrapped: LocalSGD) -> str:
    """Whose model it is within a period; "" where ranks hold one."""
    if not wrapped.steps_apart or dist.get_world_size(wrapped.process_group) == 1:
        return ""
    return (
        f"ranks have trained {wrapped.steps_apart} steps apart since their last average: state_dict() is of this "
        "rank's own model. Call finish() on every rank before, or save after a multiple of "
        f"{wrapped.schedule.steps} steps"
    )
