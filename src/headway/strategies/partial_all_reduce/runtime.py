"""The live runtime of partial all-reduce: each worker trains its own model and averages it in groups.

peers                    requests between workers, and boards where groups meet
rounds, averaging        ask, average in a copy, vote, apply the mean: immediately or one step later
joining                  copies the state of a peer to a worker that joins
finishing                ends training with one model
scheduled_coordinator    groups by a fixed schedule, without a coordinator
meeting, wrapper         replaces DistributedDataParallel, as a plan says
host_ranks, host_wrapper the same with hosts as workers
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
from headway.strategies.partial_all_reduce.joining import Snapshots, WorkerResources, WorkerState
from headway.strategies.partial_all_reduce.peers import Peers, PeerServer
from headway.strategies.partial_all_reduce.policy import TIME_LIMIT_S
from headway.strategies.partial_all_reduce.rounds import CAPACITY, Contexts, Round, Rounds
from headway.strategies.partial_all_reduce.scheduled_coordinator import ScheduledCoordinator

JOIN_LIMIT_S = 300.0


@dataclass(frozen=True, slots=True)
class Progress:
    """Progress of training, for a learning rate.

    ``iteration`` counts this worker's steps; ``group_iteration`` is the mean over the members of its last group.
    """

    iteration: int
    group_iteration: float


LearningRate = Callable[[Progress], float]


def check_options(staleness: int, moments: str, buffers: str, initial: str, time_limit_s: float) -> None:
    """Raise UnsupportedError or UserError for invalid options."""
    if staleness not in (0, 1):
        raise UnsupportedError("staleness must be 0 or 1", got=f"staleness={staleness}")
    for name, value, allowed in (
        ("moments", moments, ("local", "averaged")),
        ("buffers", buffers, ("local", "averaged")),
        ("initial", initial, ("peer", "own")),
    ):
        if value not in allowed:
            raise UserError(f"invalid value for {name}", got=value, expected=" or ".join(allowed))
    if not 0 < time_limit_s < float("inf"):
        raise UserError("time_limit_s must be positive", got=time_limit_s)


def check_bare(module: nn.Module) -> None:
    """Raise UnsupportedError if ``module`` is a DistributedDataParallel: each rank would count as a worker."""
    if isinstance(module, nn.parallel.DistributedDataParallel):
        raise UnsupportedError(
            "the model is already wrapped in DistributedDataParallel",
            got=type(module).__name__, expected="an unwrapped model",
            fix="Pass its .module. For workers of several processes, use headway.parallelize with within_hosts.",
        )  # fmt: skip


SCALER_FIX = "Train in bfloat16 without a scaler, or with groups that a coordinator forms."
UNSTEPPED = 64
"""After this many forwards with gradients and no step, the optimizer is probably one that cannot be detected."""
_log = logging.getLogger("headway")


class PartialAllReduce(nn.Module):
    """Trains ``module`` on this worker and averages it with a group of others after each ``optimizer.step()``.

    The training loop stays the same: forward, ``loss.backward()``, ``optimizer.step()``. Gradients stay local.
    ``state_dict()`` has the names of DistributedDataParallel. Call ``finish()`` at the end of training.

    ``coordinator`` forms the groups; a ``GroupSchedule`` fixes them for the ranks of the default process group.
    ``worker`` is this worker's number. ``incarnation`` grows whenever it returns, unless the coordinator counts that.
    ``host`` is the address at which peers reach this machine. ``secret`` is the job's, the same on all workers.

    - ``staleness``: 0, training waits while a group averages, or 1, it continues meanwhile (``averaging``).
    - ``moments``, ``buffers``: what is averaged besides parameters. Moments stay local by default; statistics of
      normalisation layers are averaged by default, so that they fit the averaged weights.
    - ``initial``: "peer" copies parameters, buffers and optimizer state from a live peer, if there is one; "own" keeps
      this worker's, as after restarting all workers from their checkpoints.
    - ``learning_rate``: called before each step for the rate of all parameter groups. By default the script sets rates.
    - ``time_limit_s``: time limit of a group; a member that is killed, stopped or cut off costs the others at most three
      times as much.
    - ``observer``: called with each round.

    Raises UnsupportedError for models and options that would train wrongly, UserError if a peer trains a different
    model, CommunicationError if the job cannot be joined within ``join_timeout_s``.
    """

    is_called: ClassVar[bool] = True
    """Whether scripts call this wrapper directly, rather than an outer wrapper."""

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
        nn.Module.__init__(self)  # skips the constructors of other base classes
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
                "no secret given", expected="the job's secret, the same on all workers", fix="Pass secret=."
            )
        self._server = server = PeerServer(host or job_address(), secret)
        self._peers = Peers(secret)
        self.member = Member(rank, incarnation, self._server.address, host_name())
        self._directory = directory = PeerDirectory(self.member, server)
        # Threads that answer other workers must not keep this wrapper alive.
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
        self._resources = WorkerResources(
            self._stepping,
            snapshots,
            self._rounds,
            coordinator,
            self._averaging,
            server,
            self._peers,
            self._contexts,
        )
        self._collected = when_collected(self, self._resources.close)
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
        """Whether training has finished or the wrapper was closed."""
        return self._closed

    @property
    def last_round(self) -> Round | None:
        """The last round that applied a group's mean."""
        return self._averaging.last

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module."""
        if self.training:
            self.changes()
            self._look_for_steps()
        return self.module(*inputs, **kwargs)

    def _look_for_steps(self) -> None:
        """Warn if the model trains but no optimizer step is detected, so that nothing is averaged."""
        self._unstepped += torch.is_grad_enabled()
        if self._unstepped == UNSTEPPED and self._stepping.optimizer is None:
            warnings.warn(
                f"worker {self.member.worker} averages nothing: after {UNSTEPPED} forwards no torch.optim optimizer has "
                "stepped on the model's own parameters. Optimizers over copies of parameters (master weights) and "
                "manual updates are not detected",
                HeadwayWarning,
                stacklevel=3,
            )

    @property
    def is_trained_unseen(self) -> bool:
        """Whether the model seems to train without detected optimizer steps."""
        return self._unstepped >= UNSTEPPED and self._stepping.optimizer is None

    def changes(self) -> None:
        """Mark the model as changing until the end of the next step; a forward updates statistics."""
        self._snapshots.resume()

    def updated_by(self, optimizer: Optimizer) -> None:
        """Register ``optimizer``, which is otherwise detected at its first step.

        Raises UserError if it updates no parameter of the model.
        """
        self._stepping.bind_once(optimizer)

    def flush(self) -> None:
        """Complete the averaging in flight, so that parameters are those with which the next step begins."""
        self._averaging.flush(self.iteration)

    def finish(self, source: Worker | None = None, timeout_s: float = JOIN_LIMIT_S) -> Finished:
        """End training with one model on all workers: the mean over live workers, or the model of ``source``.

        Call it on every worker, once, after the last step. It returns the workers in the mean: those that were lost or
        had not finished within half of ``timeout_s`` are left out, but late workers still receive the model while the
        collecting worker runs. All parameters are averaged, including frozen ones, and statistics according to
        ``buffers``; other buffers are copied from one worker. Raises CommunicationError if the final model does not
        arrive in time; this worker's model is then unchanged, and the worker has left the job. The collecting worker
        needs memory for the models of all workers.
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
        """Return this worker's model, optimizer, iteration and random state, for ``torch.save``.

        Averaging in flight is completed first, except for groups whose decision is unknown.
        """
        self.flush()
        if self._awaited is not None and self._awaited.optimizer:
            raise UserError(
                "cannot save: this worker received optimizer state but has not seen its optimizer yet",
                fix="Pass optimizer= when wrapping the model, or step once before saving.",
            )
        saved = checkpoint.saved(self.module, self._stepping.optimizer, self.iteration)
        return {**saved, "averaged": sorted(self._earlier)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore ``checkpoint()``. Wrap with ``initial="own"`` if all workers are restored.

        Under a schedule, all ranks must be restored equally often. Raises UserError if it is not a checkpoint of this
        model.
        """
        self._averaging.drop()
        with self._snapshots.writing():
            self.iteration = checkpoint.restore(state, self.module, self._stepping.optimizer)
        self._earlier.update(state.get("averaged", ()))
        self._awaited = None
        if isinstance(self.coordinator, ScheduledCoordinator):
            self.coordinator.begin_anew()

    def close(self, *, leave: bool = True) -> None:
        """Leave the job without averaging; the model stays this worker's own."""
        if self._closed:
            return
        self._closed = True
        self._collected.detach()
        try:
            self._resources.close(leave=leave)
        finally:
            atexit.unregister(self._at_exit)

    def __reduce_ex__(self, _protocol: Any) -> Any:
        """Raise UnsupportedError: a copy would be another worker."""
        raise UnsupportedError("a wrapped model cannot be copied", fix="Copy its .module.")

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

    def _join(self, initial: str, timeout_s: float) -> None:
        peers = self.coordinator.join(self.member, timeout_s)
        self._take_incarnation()
        self._directory.add(peers)
        if initial == "peer" and not peers and self.member.incarnation > 1:
            _log.warning(
                "worker %d rejoins, but no other worker is there to copy the model from: it starts with its own. "
                "If others are still training and only the coordinator lost them, stop this worker: "
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
        """Use the incarnation that the coordinator assigned, since groups refer to it."""
        incarnation = max(self.member.incarnation, self.coordinator.incarnation)
        self.member = self._directory.member = replace(self.member, incarnation=incarnation)

    def _state(self) -> WorkerState:
        state = joining.state_of(self.module, self._stepping.optimizer, self.iteration, self._earlier)
        return state if self._awaited is None else joining.with_moments_of(state, self._awaited)

    def _refuse_closed(self) -> None:
        if self._closed:
            raise UnsupportedError(
                "the model is closed or has finished", fix="Train its .module, or wrap that again."
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
