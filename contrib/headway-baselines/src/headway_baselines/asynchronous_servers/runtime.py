"""AsynchronousServers: in the place of DistributedDataParallel, a worker and a server of a share of the parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from headway.errors import CommunicationError, UnsupportedError, one_line
from headway.job import Job
from headway.strategies.live.averaged import STATISTICS
from headway.strategies.live.module_spec import model_spec
from headway_baselines.asynchronous_servers.checks import (
    check_before_step,
    check_optimizer,
    check_parameters,
)
from headway_baselines.asynchronous_servers.part import Part
from headway_baselines.asynchronous_servers.policy import AsynchronousServersStrategy
from headway_baselines.asynchronous_servers.schedule import ShardSchedule
from headway_baselines.asynchronous_servers.serving import Answer
from headway_baselines.asynchronous_servers.shard import Form, Shard, options_of
from headway_baselines.unreduced import UnreducedDataParallel


@dataclass(slots=True)
class Staleness:
    """How many updates by others this worker's gradients did not know of, over its pushes to all servers."""

    pushes: int = 0
    total: int = 0
    most: int = 0

    @property
    def mean(self) -> float:
        """Of a push."""
        return self.total / self.pushes if self.pushes else 0.0


class AsynchronousServers(UnreducedDataParallel):
    """``module``, whose parameters lie in shards on all ranks: gradients are pushed there, parameters are pulled.

    An ordinary loop stays as it is. ``optimizer.step()`` updates nothing here: it pushes this worker's gradients, and
    its options as they are then, to every server; the server updates its shard with them by an optimizer of the same
    class, whose state lies there; and parameters are as the servers have them when ``step`` returns. Statistics of
    normalisation layers are each rank's own until ``finish()``, which averages them.

    Servers begin with what the model has at the first step: a state may be loaded until then, the same on all ranks.

    ``finish()`` gives all ranks one model and ends training; every rank calls it after its last step. Without it a rank
    that ends serves the others until they end, too. ``staleness`` says how stale gradients were.

    Raises as ``UnreducedDataParallel`` does, and UnsupportedError for parameters that are not on the CPU and optimizers
    that look at more than one element at a time. A step raises CommunicationError where a server is lost and
    UnsupportedError where the optimizer has a state; so does ``load_state_dict()`` after the first step.
    """

    called: ClassVar[str] = "the asynchronous parameter server"
    schedule: ShardSchedule

    def __init__(
        self,
        module: nn.Module,
        *,
        strategy: AsynchronousServersStrategy,
        optimizer: Optimizer | None = None,
        **ddp_options: Any,
    ) -> None:
        check_parameters(module)
        super().__init__(
            module, lambda ranks: strategy.decide(Job.of(model_spec(module), ranks)), **ddp_options
        )
        self.strategy = strategy
        self.iteration = 0
        self.staleness = Staleness()
        self.finished = False
        self._own = {name: p for name, p in module.named_parameters() if p.requires_grad}
        self._gradients: dict[str, torch.Tensor | None] = {}
        self._part = Part(self.process_group, self.schedule, self._own)
        self._forms = [Form(parts, self._own) for parts in self.schedule.shards]
        self._messages = [torch.zeros(form.size_bytes, dtype=torch.uint8) for form in self._forms]
        self._versions = [0] * len(self._forms)
        own = AsynchronousServers
        self.follow_steps(optimizer, own.bound, own.before_step, own.after_step)

    @property
    def shard(self) -> Shard:
        """What this rank serves."""
        return self._part.shard

    def finish(self) -> None:
        """Give all ranks the parameters that the servers end with, and the mean of their statistics. Collective.

        Training is over then: the optimizer steps as an ordinary one. It waits for the slowest worker as long as that
        makes steps. Raises CommunicationError where a worker was lost or ended without ``finish()``, and where none of
        those that others wait for makes a step within the group's timeout.
        """
        if self.finished:
            return
        self.shard.begin()  # where this worker made no step
        self._part.servers.leave()  # so that nobody waits for this worker
        try:
            self._part.await_everyone_left()
            dist.barrier(self.process_group)
            self._take(self._part.servers.pull())
            with torch.no_grad():
                for name, buffer in self.module.named_buffers():
                    if name.rpartition(".")[2] in STATISTICS:
                        dist.all_reduce(buffer, group=self.process_group)
                        buffer.div_(dist.get_world_size(self.process_group))
            dist.barrier(self.process_group)  # servers are there until everybody has pulled
        except (RuntimeError, OSError) as error:
            raise CommunicationError(
                f"rank {dist.get_rank()}: finish() failed: {one_line(str(error), 200)}. A peer ended without finish(), "
                "or fell silent: its own output says why. Restart the job from its last checkpoint."
            ) from error
        self.finished = True
        self._stepping.close()
        self._part.close()

    def loaded(self) -> None:
        """A state was loaded. Raises UnsupportedError where servers have begun: they would not know of it."""
        if self.shard.has_begun and not self.finished:
            raise UnsupportedError(
                "a state that is loaded after the first step would be overwritten by the servers' parameters",
                got="load_state_dict()", fix="Load it before the first step, on every rank.",
            )  # fmt: skip

    def before_step(self) -> None:
        """The optimizer is about to step: it gets no gradients, and so updates nothing."""
        optimizer = self._stepping.optimizer
        assert optimizer is not None
        check_before_step(optimizer)
        self.shard.begin()
        self._gradients = {name: parameter.grad for name, parameter in self._own.items()}
        for parameter in self._own.values():
            parameter.grad = None

    def after_step(self) -> None:
        """The optimizer has come back: push what it was to step with, and pull."""
        if any(parameter.grad is not None for parameter in self._own.values()):
            raise UnsupportedError(
                "step(closure) is not supported by the asynchronous parameter server",
                fix="Call backward before step().",
            )
        for name, parameter in self._own.items():
            parameter.grad = self._gradients[name]
        optimizer = self._stepping.optimizer
        assert optimizer is not None
        self.iteration += 1
        told: list[Mapping[str, Any]] = []
        for form, message, version in zip(self._forms, self._messages, self._versions, strict=True):
            absent = self._write(form, message)
            told.append({"read": version, "absent": absent})
        header = {
            "iteration": self.iteration, "options": options_of(optimizer), "begun_with": self.shard.begun_with
        }  # fmt: skip
        try:
            answers = self._part.servers.push(header, told, self._messages)
        except OSError as error:
            raise CommunicationError(
                f"rank {dist.get_rank()}: a push of step {self.iteration} failed: {one_line(str(error), 200)}. "
                "A peer ended or fell silent: its own output says why. Restart the job from its last checkpoint."
            ) from error
        for said, _ in answers:
            stale = int(said["staleness"])
            self.staleness.pushes += 1
            self.staleness.total += stale
            self.staleness.most = max(self.staleness.most, stale)
        self._take(answers)

    def _write(self, form: Form, message: torch.Tensor) -> list[int]:
        """Write gradients into ``message``; the numbers of the parts that have none."""
        absent = []
        for number, (part, view) in enumerate(zip(form.parts, form.views(message), strict=True)):
            gradient = self._gradients[part.parameter]
            if gradient is None:
                absent.append(number)
            else:
                view.copy_(gradient.reshape(-1)[part.start : part.end])
        return absent

    def _take(self, answers: Sequence[Answer]) -> None:
        with torch.no_grad():
            detached = {name: parameter.detach() for name, parameter in self._own.items()}
            for server, (form, (said, message)) in enumerate(zip(self._forms, answers, strict=True)):
                for own, view in zip(form.slices(detached), form.views(message), strict=True):
                    own.copy_(view)
                self._versions[server] = int(said["version"])

    def bound(self, optimizer: Optimizer) -> None:
        """The optimizer of the model is known: this rank's shard will be updated by one like it."""
        check_optimizer(optimizer, self._own)
        self.shard.bind(optimizer)
