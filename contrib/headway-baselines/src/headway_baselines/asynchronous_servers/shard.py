"""Shard: a server's share of the parameters, and the optimizer that updates it with each gradient that is pushed."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from headway import torch_private
from headway.scheduling.buckets import Part
from headway.strategies.live.checksum import checksum

ALIGNED = 8  # bytes: a view of another dtype begins at a multiple of its size


@dataclass(frozen=True, slots=True)
class Update:
    """One update of a shard: whose gradient, of which of its iterations, and computed with which version.

    ``version`` counts the updates before this one; those since ``read`` were others'.
    """

    worker: int
    iteration: int
    read: int
    version: int

    @property
    def staleness(self) -> int:
        """How many updates by others the gradient does not know of."""
        return self.version - self.read


class Form:
    """How the parts of one shard lie in the bytes of a message, for parameters by name."""

    def __init__(self, parts: Sequence[Part], parameters: Mapping[str, torch.Tensor]) -> None:
        self.parts = parts
        self._places: list[tuple[int, int, torch.dtype]] = []
        place = 0
        for part in parts:
            dtype = parameters[part.parameter].dtype
            size_bytes = part.numel * dtype.itemsize
            self._places.append((place, size_bytes, dtype))
            place += -(-size_bytes // ALIGNED) * ALIGNED
        self.size_bytes = place

    def views(self, message: torch.Tensor) -> list[torch.Tensor]:
        """The parts, each flat, in a message of bytes."""
        return [
            message[place : place + size].view(dtype) if size else message.new_empty(0, dtype=dtype)
            for place, size, dtype in self._places
        ]

    def slices(self, tensors: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
        """The parts, each flat, of contiguous tensors by name."""
        return [tensors[part.parameter].view(-1)[part.start : part.end] for part in self.parts]


class Shard:
    """What one server holds, shared by the threads that answer workers.

    ``parameters`` are those of this rank's model, and ``bind`` says which optimizer updates them; it serves from
    ``begin()`` on. ``observer`` is told of each update, one after the other.
    """

    def __init__(
        self, parts: Sequence[Part], parameters: Mapping[str, torch.Tensor], world_size: int, staleness: int | None
    ) -> None:  # fmt: skip
        self._parameters = parameters
        self.form = Form(parts, parameters)
        self._staleness = staleness
        self._changed = threading.Condition()
        self.has_begun = False
        self._pieces: list[nn.Parameter] = []
        self._own: Optimizer | None = None
        self._optimizer: Optimizer | None = None
        self._step: Callable[..., Any] | None = None
        self._clocks = dict.fromkeys(range(world_size), 0)  # of the workers that are there
        self.version = 0
        self.begun_with = 0
        self.observer: Callable[[Update], None] | None = None

    def bind(self, optimizer: Optimizer) -> None:
        """``optimizer`` is this rank's own: the shard's will be one like it."""
        self._own = optimizer

    def begin(self) -> None:
        """Begin with the parameters as they are now; nothing where it has begun, or knows no optimizer.

        ``begun_with`` is then a checksum of them: workers that push have to have begun with the same.
        """
        with self._changed:
            optimizer, values = self._own, {name: each.detach() for name, each in self._parameters.items()}
            if self.has_begun or optimizer is None:
                return
            self.has_begun = True
            self.begun_with = checksum(values.values())
            whole = {name: parameter.numel() for name, parameter in self._parameters.items()}
            for part, own in zip(self.form.parts, self.form.slices(values), strict=True):
                shape = values[part.parameter].shape if part.numel == whole[part.parameter] else own.shape
                self._pieces.append(nn.Parameter(own.clone().view(shape)))
            pieces = {
                id(self._parameters[part.parameter]): piece
                for part, piece in zip(self.form.parts, self._pieces, strict=True)
            }
            groups = [
                {**options, "params": [pieces[id(p)] for p in group["params"] if id(p) in pieces]}
                for group, options in zip(optimizer.param_groups, options_of(optimizer), strict=True)
            ]
            if self._pieces:
                kind: Any = type(optimizer)
                self._optimizer = kind(groups)
                self._step = torch_private.unhooked_step(type(optimizer))
            self._changed.notify_all()

    def push(
        self, worker: int, header: Mapping[str, Any], gradients: torch.Tensor, deadline: float
    ) -> tuple[Mapping[str, Any], torch.Tensor]:
        """Update with a worker's ``gradients`` and give what it goes on with, as soon as it may.

        Raises TimeoutError past ``deadline``, ValueError for a header that does not fit.
        """
        iteration, read, absent = int(header["iteration"]), int(header["read"]), set(header["absent"])
        with self._changed:
            self._await(lambda: self.has_begun, deadline)
            if header["begun_with"] != self.begun_with:
                raise ValueError(
                    "ranks did not begin with the same parameters: load the same state on every rank"
                )
            update = Update(worker, iteration, read, self.version)
            for number, (piece, flat) in enumerate(
                zip(self._pieces, self.form.views(gradients), strict=True)
            ):
                piece.grad = None if number in absent else flat.view(piece.shape)
            if self._optimizer is not None and self._step is not None:
                for group, options in zip(self._optimizer.param_groups, header["options"], strict=True):
                    group.update(_tuples(options))
                self._step(self._optimizer)
            for piece in self._pieces:
                piece.grad = None
            self.version += 1
            self._clocks[worker] = iteration
            if self.observer is not None:
                self.observer(update)
            self._changed.notify_all()
            self._await(lambda: self._may_go_on(iteration), deadline)
            return self._answer(update.staleness)

    def pull(self, deadline: float) -> tuple[Mapping[str, Any], torch.Tensor]:
        """What the shard holds now."""
        with self._changed:
            self._await(lambda: self.has_begun, deadline)
            return self._answer(0)

    def left(self, worker: int) -> None:
        """A worker pushes nothing more."""
        with self._changed:
            self._clocks.pop(worker, None)
            self._changed.notify_all()

    def await_everyone_left(self, timeout_s: float) -> None:
        """Wait until no worker pushes anything more.

        Raises TimeoutError, which names them, where none of those left pushes or leaves for ``timeout_s``.
        """
        with self._changed:
            while self._clocks:
                before = self._progress()
                if not self._changed.wait_for(partial(self._has_moved_on, before), timeout_s):
                    silent = ", ".join(map(str, sorted(self._clocks)))
                    raise TimeoutError(
                        f"of ranks that have not left ({silent}) none pushed for {timeout_s:g} s"
                    )

    def _progress(self) -> tuple[int, int]:
        return self.version, len(self._clocks)

    def _has_moved_on(self, before: tuple[int, int]) -> bool:
        return self._progress() != before

    def _may_go_on(self, iteration: int) -> bool:
        return self._staleness is None or iteration - min(self._clocks.values()) <= self._staleness

    def _await(self, condition: Callable[[], bool], deadline: float) -> None:
        if not self._changed.wait_for(condition, max(0.0, deadline - time.monotonic())):
            raise TimeoutError("a server waited in vain for its worker to begin, or for a slower worker")

    def _answer(self, staleness: int) -> tuple[Mapping[str, Any], torch.Tensor]:
        message = torch.empty(self.form.size_bytes, dtype=torch.uint8)
        with torch.no_grad():
            for view, piece in zip(self.form.views(message), self._pieces, strict=True):
                view.copy_(piece.view(-1))
        return {"version": self.version, "staleness": staleness}, message


def options_of(optimizer: Optimizer) -> list[dict[str, Any]]:
    """The options of each group of ``optimizer``, such as its learning rate, as numbers."""
    return [
        {name: _number(value) for name, value in group.items() if name not in ("params", "param_names")}
        for group in optimizer.param_groups
    ]


def _number(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.item()
    return tuple(map(_number, value)) if isinstance(value, list | tuple) else value


def _tuples(options: Mapping[str, Any]) -> dict[str, Any]:
    """``options`` as they were before they were sent as JSON."""
    return {name: tuple(value) if isinstance(value, list) else value for name, value in options.items()}
