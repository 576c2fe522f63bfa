"""What schedulers that update layer by layer share: layers, their optimizers, and a thread of collectives."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue

import torch
from torch import nn
from torch.optim import SGD

from paced_training.jobs import PacedJob, optimizer_of
from paced_training.trainer import Trainer, held_bytes


@dataclass
class LayerState:
    """A module, the parameters it is the first to register, and whether their update is due."""

    module: nn.Module
    parameters: list[nn.Parameter]
    optimizer: SGD
    due: bool = False
    gradients: list[torch.Tensor] = field(default_factory=list)


class Lane:
    """A thread that runs what it is given, in order; ``submit`` returns an event that is set afterwards."""

    def __init__(self) -> None:
        self._jobs: SimpleQueue[tuple[Callable[[], None], threading.Event] | None] = SimpleQueue()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def submit(self, work: Callable[[], None]) -> threading.Event:
        done = threading.Event()
        self._jobs.put((work, done))
        return done

    def wait(self, done: threading.Event) -> None:
        done.wait()
        if self._failure is not None:
            raise self._failure

    def stop(self) -> None:
        self._jobs.put(None)
        self._thread.join()

    def _serve(self) -> None:
        while (item := self._jobs.get()) is not None:
            work, done = item
            try:
                if self._failure is None:
                    with torch.no_grad():
                        work()
            except BaseException as failure:  # handed to whoever waits
                self._failure = failure
            done.set()


class Layered(Trainer):
    """Updates each layer in the pre-hook of its next forward."""

    def __init__(self, job: PacedJob) -> None:
        inner = job.make()
        super().__init__(job, inner, inner, None)
        self.layers: list[LayerState] = []
        seen: set[int] = set()
        for module in inner.modules():
            own = [p for p in module.parameters(recurse=False) if id(p) not in seen]
            seen.update(id(p) for p in own)
            if own:
                self.layers.append(LayerState(module, own, optimizer_of(own)))
        for index, layer in enumerate(self.layers):
            layer.module.register_forward_pre_hook(partial(self._before_forward, index))
            for position, parameter in enumerate(layer.parameters):
                parameter.register_post_accumulate_grad_hook(partial(self.ready, index, position))

    def ready(self, index: int, position: int, parameter: torch.Tensor) -> None:
        """Called when the gradient of a layer's parameter is complete."""
        raise NotImplementedError

    def arrive(self, index: int) -> None:
        """Return when the averaged gradients of a due layer are in ``layer.gradients``."""
        raise NotImplementedError

    def finish(self) -> None:
        for index in range(len(self.layers)):
            self._apply(index)

    def zero_grad(self) -> None:
        """Gradients are given up with each update."""

    def update(self) -> None:
        """Nothing waits here: updates are due from now on."""
        if not self.gradient_bytes:
            self.gradient_bytes = held_bytes(self.gradients())

    def optimizer_bytes(self) -> int:
        return held_bytes(
            value
            for layer in self.layers
            for state in layer.optimizer.state.values()
            for value in state.values()
            if isinstance(value, torch.Tensor)
        )

    def _before_forward(self, index: int, _module: nn.Module, _inputs: object) -> None:
        self._apply(index)

    def _apply(self, index: int) -> None:
        layer = self.layers[index]
        if not layer.due:
            return
        self.arrive(index)
        layer.due = False
        for parameter, gradient in zip(layer.parameters, layer.gradients, strict=True):
            parameter.grad = gradient
        layer.optimizer.step()
        for parameter in layer.parameters:
            parameter.grad = None
