"""The live runtime of partial all-reduce: a model that each worker trains on its own and averages in groups.

frames, board, peers     what workers ask each other: bounded, authenticated, never unpickled
contexts                 connections of Gloo for one group
averaged                 what is averaged, and flat copies of it
rounds, averaging        ask, average in a copy, vote, take the mean: at once, or one step later
snapshots, joining       a worker takes its state from a peer that goes on training
known, finals, finishing the workers' last models become one
parts                    what a worker runs besides its model, and its end
scheduled                groups by a fixed schedule, without a coordinator
meeting, wrapper         in the place of DistributedDataParallel, as a plan says
"""

from __future__ import annotations

import atexit
import logging
import warnings
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from torch import nn
from torch.optim import Optimizer

from headway import torch_private
from headway.errors import HeadwayWarning, UnsupportedError, UserError
from headway.rpc.interface import host_name, job_address
from headway.scheduling.groups import GroupSchedule
from headway.strategies.live import checkpoint
from headway.strategies.live.averaged import Layout, Policy, check_module, training_layout, whole_layout
from headway.strategies.live.channels.retirement import when_collected
from headway.strategies.live.refused_scalers import refuse_gradient_scalers_of
from headway.strategies.live.stepping import Stepping, weakly
from headway.strategies.partial_all_reduce import joining, scheduled_coordinator
from headway.strategies.partial_all_reduce.averaging import Averaging, Observer
from headway.strategies.partial_all_reduce.coordinator.messages import Coordinator, Member
from headway.strategies.partial_all_reduce.finishing import Finished, Finishing, PeerDirectory
from headway.strategies.partial_all_reduce.generators.generator import Worker
from headway.strategies.partial_all_reduce.joining import Parts, Snapshots, WorkerState
from headway.strategies.partial_all_reduce.peers import Peers, PeerServer
from headway.strategies.partial_all_reduce.policy import TIME_LIMIT_S
from headway.strategies.partial_all_reduce.rounds import CAPACITY, Contexts, Round, Rounds
from headway.strategies.partial_all_reduce.scheduled_coordinator import ScheduledCoordinator

JOIN_LIMIT_S = 300.0


@dataclass(frozen=True, slots=True)
class Progress:
    """How far training has come, for a learning rate: ``iteration`` counts this worker's own steps, ``group_iteration``
    is the mean of those that the members of its last group had made."""

    iteration: int
    group_iteration: float


LearningRate = Callable[[Progress], float]


def check_options(staleness: int, moments: str, buffers: str, initial: str, time_limit_s: float) -> None:
    """Raise UnsupportedError or UserError for options that a wrapped model does not have."""
    if staleness not in (0, 1):
        raise UnsupportedError(
            "a mean may be none or one step old", got=f"staleness={staleness}", expected="0 or 1"
        )
    for name, value, allowed in (
        ("moments", moments, ("local", "averaged")),
        ("buffers", buffers, ("local", "averaged")),
        ("initial", initial, ("peer", "own")),
    ):
        if value not in allowed:
            raise UserError(f"{name} cannot be that", got=value, expected=" or ".join(allowed))
    if not 0 < time_limit_s < float("inf"):
        raise UserError("time_limit_s must be positive", got=time_limit_s)


def check_bare(module: nn.Module) -> None:
    """Raise UnsupportedError for a model that is wrapped for several processes: the coordinator would count each."""
    if isinstance(module, nn.parallel.DistributedDataParallel):
        raise UnsupportedError(
            "workers of several processes are not supported: the model is wrapped for them already",
            got=type(module).__name__, expected="one process a worker",
            fix="Pass its .module; workers of a host's processes are made by headway.parallelize, with within_hosts.",
        )  # fmt: skip


SCALER_FIX = "Train in bfloat16 without a scaler, or with groups that a coordinator forms."
UNSTEPPED = 64
"""After so many forwards with gradients and no step the model's optimizer may be one that is not seen."""
_log = logging.getLogger("headway")


class PartialAllReduce(nn.Module):
    """``module``, trained on this worker alone and averaged with a group of others after each ``optimizer.step()``.

    An ordinary loop stays as it is: forward, ``loss.backward()``, ``optimizer.step()``. Gradients are this worker's
    own. ``state_dict()`` has the names of DistributedDataParallel. Call ``finish()`` at the end of training.

    ``coordinator`` decides who averages with whom; a ``GroupSchedule`` says it for good, for the ranks of the default
    process group. ``worker`` is this worker's number, ``incarnation`` grows when it comes back, unless the
    coordinator counts that, and ``host`` is the
    address of this machine that peers reach. ``secret`` is the job's, the same on all workers.

    - ``staleness``: 0, training stands still while a group averages, or 1, it goes on meanwhile (``averaging``).
    - ``moments``, ``buffers``: what is averaged besides parameters (``averaged``). Moments stay local by default,
      statistics of normalisation layers are averaged by default, so that they fit the averaged weights.
    - ``initial``: "peer", parameters, buffers and optimizer state are taken from a live peer where there is one, or
      "own", as after a restart of all from their checkpoints.
    - ``learning_rate``: is asked before each step for what goes into all parameter groups. Without it, learning rates
      are whatever the script sets on this worker.
    - ``time_limit_s``: for one group; a member that is killed, stopped or cut off costs the others at most three
      times that.
    - ``observer``: is told of each round.

    Raises UnsupportedError for models and options that would train wrongly, UserError where a peer trains another
    model, CommunicationError where the job cannot be joined within ``join_timeout_s``.
    """

    is_called: ClassVar[bool] = True
    """Whether a script calls it, rather than another wrapper that it is part of."""

    def __init__(
        self,
        module: nn.Module,
        coordinator: Coordinator | GroupSchedule,
        optimizer: Optimizer | None = None,
        *,
        worker: Worker | None = None,
        incarnation: int = 0,
        host: str | None = None,
        secret: bytes | None = None,
        staleness: int = 0,
        moments: Policy = "local",
        buffers: Policy = "averaged",
        initial: Literal["peer", "own"] = "peer",
        learning_rate: LearningRate | None = None,
        time_limit_s: float = TIME_LIMIT_S,
        join_timeout_s: float = JOIN_LIMIT_S,
        kept_contexts: int = CAPACITY,
        observer: Observer | None = None,
    ) -> None:
        nn.Module.__init__(self)  # and not that of what a class derives from besides
        check_options(staleness, moments, buffers, initial, time_limit_s)
        check_bare(module)
        check_module(module)
        joining.check_can_be_sent(module)
        self.module = module
        self.iteration = 0
        self._learning_rate = learning_rate
        self._policies = {"buffers": buffers, "moments": moments}
        self._awaited: WorkerState | None = None  # of an optimizer that has not been seen yet
        self._earlier: set[str] = set()  # parameters that have been averaged
        self._unstepped = 0  # forwards with gradients since the last step
        self._closed = False
        self._at_exit = weakly(self, lambda wrapper: wrapper.close())

        rank = scheduled_coordinator.number_of(coordinator, worker)
        if secret is None and isinstance(coordinator, GroupSchedule):
            secret = scheduled_coordinator.shared_secret()
        if secret is None:
            raise UserError(
                "there is no secret", expected="the job's, the same on all workers", fix="Pass secret=."
            )
        self._server = server = PeerServer(host or job_address(), secret)
        self._peers = Peers(secret)
        self.member = Member(rank, incarnation, self._server.address, host_name())
        self._directory = directory = PeerDirectory(self.member, server)
        # What threads hold that answer others must not hold this wrapper.
        self._snapshots = snapshots = Snapshots(partial(_state_of, weakref.ref(self)))
        server.handle("state", lambda c, _h, _p, deadline: joining.give(snapshots, c, deadline))
        self._finishing = Finishing(self.member, self._directory, self._server, self._peers)
        if isinstance(coordinator, GroupSchedule):
            refuse_gradient_scalers_of(self, "static groups", SCALER_FIX)
            coordinator = ScheduledCoordinator(
                coordinator,
                rank,
                torch_private.default_store(),
                scheduled_coordinator.run_name(),
                self._server,
                self._peers,
            )
        self.coordinator: Coordinator = coordinator
        self._contexts = Contexts(self.member, self._server, self._peers, time_limit_s, kept_contexts)
        self._rounds = Rounds(rank, coordinator, self._contexts, time_limit_s)
        self._averaging = Averaging(
            self._rounds, coordinator, partial(_layout_of, weakref.ref(self)), staleness=staleness,
            time_limit_s=time_limit_s, observer=observer, heard=lambda start: directory.add(start.members),
            writing=snapshots.writing,
        )  # fmt: skip
        self._stepping = Stepping(
            module,
            weakly(
                self, lambda wrapper, optimizer_seen: wrapper._bound(optimizer_seen)
            ),  # whatever its class has made of it
            weakly(self, lambda wrapper: wrapper._before_step()),
            weakly(self, lambda wrapper: wrapper._after_step()),
        )
        self._parts = Parts(
            self._stepping,
            snapshots,
            self._rounds,
            coordinator,
            self._averaging,
            server,
            self._peers,
            self._contexts,
        )
        self._collected = when_collected(self, self._parts.close)
        try:
            if optimizer is not None:
                self._stepping.bind(optimizer)
            self._join(initial, join_timeout_s)
        except BaseException:
            self.close()
            raise
        atexit.register(self._at_exit)

    @property
    def is_closed(self) -> bool:
        """Whether it has finished, or was closed."""
        return self._closed

    @property
    def last_round(self) -> Round | None:
        """The last round that ended with a group's mean."""
        return self._averaging.last

    # What a script uses ------------------------------------------------------------------------------

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module."""
        if self.training:
            self.changes()
            self._look_for_steps()
        return self.module(*inputs, **kwargs)

    def _look_for_steps(self) -> None:
        """Warn where a model is trained and no optimizer is seen to step: nothing would ever be averaged."""
        self._unstepped += torch.is_grad_enabled()
        if self._unstepped == UNSTEPPED and self._stepping.optimizer is None:
            warnings.warn(
                f"worker {self.member.worker} has made {UNSTEPPED} forwards, and no optimizer of torch.optim has "
                "stepped on this model's own parameters: nothing is averaged. Optimizers over copies of parameters "
                "(master weights) and updates by hand are not seen",
                HeadwayWarning,
                stacklevel=3,
            )

    @property
    def is_trained_unseen(self) -> bool:
        """Whether the model seems to be trained without any step that is seen."""
        return self._unstepped >= UNSTEPPED and self._stepping.optimizer is None

    def changes(self) -> None:
        """What a joining worker is given changes from here on, until the next step's end: statistics, in a forward."""
        self._snapshots.resume()

    def updated_by(self, optimizer: Optimizer) -> None:
        """``optimizer`` is the one that updates the model, which is found at its first step otherwise.

        Raises UserError where it updates nothing of the model.
        """
        self._stepping.bind_once(optimizer)

    def flush(self) -> None:
        """Finish the averaging in flight, so that the parameters are what the next step would begin with."""
        self._averaging.flush(self.iteration)

    def finish(self, source: Worker | None = None, timeout_s: float = JOIN_LIMIT_S) -> Finished:
        """Leave the groups and end with the same model as all: the mean over all live workers, or ``source``'s.

        Call it on every worker, once, after the last step. It returns whose mean it is: who had not finished within
        half of ``timeout_s``, or was lost, is not in it; who is late gets it too while the one that collected is
        there. Averaged are all parameters, frozen ones too, and statistics by this model's policy; other buffers are
        as one worker has them. Raises CommunicationError where nobody gives the final model in time; this worker's own
        is then as it was, and the worker has left for good. Who collects has room for the models of all workers.
        """
        self._refuse_closed()
        self.flush()
        self._take_incarnation()
        self.coordinator.leave()
        layout = whole_layout(self.module, buffers=self._policies["buffers"])
        values = layout.empty()
        layout.read(values)
        try:
            agreed, finished = self._finishing.finish(values, layout.digest, source, timeout_s)
            layout.write(agreed)
        finally:
            self.close(leave=False)
        return finished

    def checkpoint(self) -> dict[str, Any]:
        """This worker's model, optimizer, iteration and random numbers, for ``torch.save``.

        Averaging in flight is finished first. A group whose decision is not known by then is left out of it.
        """
        self.flush()
        if self._awaited is not None and self._awaited.optimizer:
            raise UserError(
                "this worker has joined with an optimizer's state, and has not seen the optimizer yet",
                fix="Pass optimizer= when the model is wrapped, or step once before.",
            )
        saved = checkpoint.saved(self.module, self._stepping.optimizer, self.iteration)
        return {**saved, "averaged": sorted(self._earlier)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from ``checkpoint()``, whatever this worker held. Wrap with ``initial="own"`` if all are restored.

        Under a schedule all ranks are restored, as often as each other. Raises UserError where it is no checkpoint of
        this model.
        """
        self._averaging.drop()
        with self._snapshots.writing():
            self.iteration = checkpoint.restore(state, self.module, self._stepping.optimizer)
        self._earlier.update(state.get("averaged", ()))
        self._awaited = None
        if isinstance(self.coordinator, ScheduledCoordinator):
            self.coordinator.begin_anew()

    def close(self, *, leave: bool = True) -> None:
        """Leave the job without a last mean; the model is this worker's own."""
        if self._closed:
            return
        self._closed = True
        self._collected.detach()
        try:
            self._parts.close(leave=leave)
        finally:
            atexit.unregister(self._at_exit)

    def __reduce_ex__(self, _protocol: Any) -> Any:
        """Refuse to be copied: a copy would be another worker. Raises UnsupportedError."""
        raise UnsupportedError("a wrapped model cannot be copied", fix="Copy its .module.")

    # What happens in training ------------------------------------------------------------------------

    def _before_step(self) -> None:
        self._refuse_closed()
        self._snapshots.resume()
        optimizer = self._stepping.optimizer
        if self._learning_rate is not None and optimizer is not None:
            last = self._averaging.last
            members = last.iterations if last is not None else ()
            mean = sum(members) / len(members) if members else float(self.iteration)
            rate = float(self._learning_rate(Progress(self.iteration, mean)))
            for group in optimizer.param_groups:
                group["lr"] = rate

    def _after_step(self) -> None:
        self.iteration += 1
        self._unstepped = 0
        self._snapshots.rest()
        self._averaging.after_step(self.iteration)

    def _layout(self) -> Layout:
        layout = training_layout(
            self.module, self._stepping.optimizer, buffers=self._policies["buffers"],
            moments=self._policies["moments"], earlier=self._earlier,
        )  # fmt: skip
        self._earlier |= layout.parameters
        return layout

    # Joining -----------------------------------------------------------------------------------------

    def _join(self, initial: str, timeout_s: float) -> None:
        peers = self.coordinator.join(self.member, timeout_s)
        self._take_incarnation()
        self._directory.add(peers)
        if initial == "peer" and not peers and self.member.incarnation > 1:
            _log.warning(
                "worker %d has been in this job before, and nobody else is there to take the model from: it begins "
                "with its own. If others still train and only the coordinator lost them, end this worker: "
                "they would average with it",
                self.member.worker,
            )
        if peers and initial == "peer":
            state = joining.fetch(self._peers, peers, self.member, self.module, timeout_s)
            joining.take_over(state, self.module)
            self.iteration = state.iteration
            self._earlier.update(state.averaged)
            if (optimizer := self._stepping.optimizer) is not None:
                joining.take_over_moments(state, self.module, optimizer)
            else:
                self._awaited = state
        self._directory.say_hello(self._peers)
        self._snapshots.rest()
        if isinstance(self.coordinator, ScheduledCoordinator):
            self.coordinator.begin_together(timeout_s)

    def _bound(self, optimizer: Optimizer) -> None:
        if self._awaited is not None:
            joining.take_over_moments(self._awaited, self.module, optimizer)
            self._awaited = None

    def _take_incarnation(self) -> None:
        """Tell others the incarnation that the coordinator counts: groups have it."""
        incarnation = max(self.member.incarnation, self.coordinator.incarnation)
        self.member = self._directory.member = replace(self.member, incarnation=incarnation)

    def _state(self) -> WorkerState:
        state = joining.state_of(self.module, self._stepping.optimizer, self.iteration, self._earlier)
        return state if self._awaited is None else joining.with_moments_of(state, self._awaited)

    def _refuse_closed(self) -> None:
        if self._closed:
            raise UnsupportedError(
                "the model has finished or was closed", fix="Train its .module, or wrap that again."
            )


def _state_of(wrapped: weakref.ref[PartialAllReduce]) -> WorkerState:
    if (wrapper := wrapped()) is None:
        raise ConnectionError("the model is gone")
    return wrapper._state()


def _layout_of(wrapped: weakref.ref[PartialAllReduce]) -> Layout:
    wrapper = wrapped()
    assert wrapper is not None, "only its own steps average"
    return wrapper._layout()


def wrap(
    module: nn.Module,
    coordinator: Coordinator | GroupSchedule,
    optimizer: Optimizer | None = None,
    **options: Any,
) -> PartialAllReduce:
    """``PartialAllReduce(module, coordinator, optimizer, **options)``."""
    return PartialAllReduce(module, coordinator, optimizer, **options)
