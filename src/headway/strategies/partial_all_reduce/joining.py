"""Copies model and optimizer state from a live peer to a worker that joins or rejoins.

The peer sends one header that names every tensor, then their bytes. The worker accepts exactly the tensors of its own
model and, within bounds, optimizer state of its own parameters. It receives everything before it writes anything.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer

from headway.errors import CommunicationError, UnsupportedError, UserError, one_line
from headway.rpc import frames
from headway.rpc.frames import LARGE_HEADER_BYTES, FrameError, Header, Limits
from headway.rpc.trusted import receive_exactly
from headway.strategies.live.stepping import Stepping
from headway.strategies.partial_all_reduce.averaging import Averaging
from headway.strategies.partial_all_reduce.coordinator.messages import Coordinator, Member
from headway.strategies.partial_all_reduce.peers import Peers, PeerServer
from headway.strategies.partial_all_reduce.rounds import Contexts, Rounds

T = TypeVar("T")


class Snapshots(Generic[T]):
    """Calls ``take`` while the model does not change: on the caller's thread while training rests, else on its own.

    Training rests from ``rest`` to ``resume``: between a step and the next forward, except in ``writing``. So a worker
    that waits for its group can still serve snapshots, even to workers that its group waits for. All requests during one
    rest share a snapshot.
    """

    def __init__(self, take: Callable[[], T]) -> None:
        self._take = take
        self._changed = threading.Condition()
        self._resting = False
        self._closed = False
        self._waiting = 0
        self._taken = 0
        self._last: T | None = None
        self._of_rest: T | None = None

    def rest(self) -> None:
        """Mark the model as stable, and take a snapshot for pending requests."""
        with self._changed:
            self._resting = True
            if self._waiting:
                self._last = self._of_rest = self._take()
                self._taken += 1
                self._changed.notify_all()

    def resume(self) -> None:
        """Mark the model as changing; returns once no snapshot is being taken."""
        with self._changed:
            self._resting = False
            self._of_rest = None

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Mark the model as changing inside the block only."""
        self.resume()
        try:
            yield
        finally:
            self.rest()

    def close(self) -> None:
        """Serve no more snapshots."""
        with self._changed:
            self._closed = True
            self._of_rest = None
            self._changed.notify_all()

    def get(self, deadline: float) -> T:
        """Return a snapshot. Raises TimeoutError if training does not reach the end of a step before ``deadline``."""
        with self._changed:
            if self._resting and not self._closed:
                if self._of_rest is None:
                    self._of_rest = self._take()
                return self._of_rest
            wanted = self._taken + 1
            self._waiting += 1
            try:
                self._changed.wait_for(
                    lambda: self._taken >= wanted or self._closed, max(0.0, deadline - time.monotonic())
                )
                if self._last is None or self._taken < wanted:
                    raise TimeoutError("this worker did not finish a step in time")
                return self._last
            finally:
                self._waiting -= 1
                if not self._waiting:
                    self._last = None


PAUSE_S = 0.1
STATES_OF_ONE_PARAMETER = 16
SMALL_NUMEL = 4096
DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
        torch.uint8, torch.bool, torch.complex64, torch.complex128, torch.uint16, torch.uint32, torch.uint64,
        torch.float8_e4m3fn, torch.float8_e5m2,
    )
}  # fmt: skip
SLOWEST_BYTES_PER_S = 1e6
"""Lowest accepted transfer rate of a state."""
PATIENCE_S = 30.0
"""Extra time for each tensor, whatever its size."""

Scalar = int | float | bool | str | None


@dataclass(frozen=True, slots=True)
class WorkerState:
    """A worker's model and optimizer state: tensors by name on the CPU, and the optimizer's other values by name.

    Names are ``parameter/NAME``, ``buffer/NAME`` and ``moment/PARAMETER/KEY``. ``optimizer`` is the class's name,
    ``averaged`` are the parameters that have been averaged, frozen by now or not.
    """

    iteration: int
    optimizer: str
    tensors: Mapping[str, torch.Tensor]
    scalars: Mapping[str, Scalar]
    averaged: Sequence[str] = ()


def state_of(
    module: nn.Module, optimizer: Optimizer | None, iteration: int, averaged: Collection[str] = ()
) -> WorkerState:
    """Copy the current state of ``module`` and ``optimizer`` to the CPU."""
    tensors = {name: _copied(tensor) for name, tensor in _model_tensors(module).items()}
    scalars: dict[str, Scalar] = {}
    if optimizer is not None:
        for name, parameter in module.named_parameters():
            for key, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, torch.Tensor):
                    tensors[f"moment/{name}/{key}"] = _copied(value)
                elif value is None or isinstance(value, (int, float, bool, str)):
                    scalars[f"moment/{name}/{key}"] = value
    return WorkerState(
        iteration, type(optimizer).__name__ if optimizer else "", tensors, scalars, sorted(averaged)
    )


def with_moments_of(state: WorkerState, source: WorkerState) -> WorkerState:
    """Add the optimizer state of ``source``, which this worker has not loaded yet, to ``state``."""
    moments = {name: tensor for name, tensor in source.tensors.items() if name.startswith("moment/")}
    return replace(
        state,
        optimizer=source.optimizer,
        tensors={**state.tensors, **moments},
        scalars={**state.scalars, **source.scalars},
    )


def take_over(state: WorkerState, module: nn.Module) -> None:
    """Write the parameters and buffers of ``state``, which ``fetch`` has checked, into ``module``."""
    with torch.no_grad():
        for name, tensor in _model_tensors(module).items():
            tensor.copy_(state.tensors[name])


def take_over_moments(state: WorkerState, module: nn.Module, optimizer: Optimizer) -> None:
    """Load the optimizer state in ``state`` into ``optimizer``; hyper-parameters stay this worker's own.

    Raises UserError if the peer's optimizer has another class.
    """
    if not state.optimizer:  # the peer has made no step
        return
    if type(optimizer).__name__ != state.optimizer:
        raise UserError(
            "the peer uses a different optimizer", got=type(optimizer).__name__, expected=state.optimizer,
            fix="Start all workers with the same script.",
        )  # fmt: skip
    name_of = {id(parameter): name for name, parameter in module.named_parameters()}
    values: dict[str, dict[str, Any]] = {}
    for full, value in (*state.tensors.items(), *state.scalars.items()):
        if full.startswith("moment/"):
            name, _, key = full.removeprefix("moment/").rpartition("/")
            values.setdefault(name, {})[key] = value
    state_dict = optimizer.state_dict()
    order = [p for group in optimizer.param_groups for p in group["params"]]
    indices = [index for group in state_dict["param_groups"] for index in group["params"]]
    state_dict["state"] = {
        index: values[name_of[id(parameter)]]
        for index, parameter in zip(indices, order, strict=True)
        if name_of.get(id(parameter)) in values
    }
    optimizer.load_state_dict(state_dict)


def give(snapshots: Snapshots[WorkerState], connection: socket.socket, deadline: float) -> None:
    """Send a snapshot to a peer that waits until ``deadline`` for it to begin.

    Raises OSError, TimeoutError.
    """
    state = snapshots.get(deadline)
    header = {
        "iteration": state.iteration, "optimizer": state.optimizer, "scalars": dict(state.scalars),
        "averaged": list(state.averaged),
        "tensors": [[n, str(t.dtype).removeprefix("torch."), list(t.shape)] for n, t in state.tensors.items()],
    }  # fmt: skip
    frames.send(connection, header, b"", deadline)
    for tensor in state.tensors.values():
        frames.send_raw(connection, _bytes_of(tensor), _allowed_until(tensor.nbytes))


def fetch(
    peers: Peers, candidates: Sequence[Member], member_here: Member, module: nn.Module, timeout_s: float
) -> WorkerState:
    """Fetch the state of the first of ``candidates`` that sends it, checked against ``module``.

    Candidates are asked in turn, repeatedly. Raises UserError if a peer trains a different model, CommunicationError if
    none sends its state within ``timeout_s``.
    """
    deadline = time.monotonic() + timeout_s
    each_s = timeout_s / max(2, len(candidates))
    failures: dict[int, str] = {}
    while True:
        for member in candidates:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                reasons = "; ".join(
                    f"worker {worker}: {failure}" for worker, failure in sorted(failures.items())
                )
                raise CommunicationError(
                    f"worker {member_here.worker}: no peer sent its state within {timeout_s:g} s ({one_line(reasons)}). "
                    "Check that the other workers are reachable at their addresses, then start this worker again."
                )
            try:
                return _fetched(peers, member, module, time.monotonic() + min(left_s, each_s), deadline)
            except OSError as error:
                failures[member.worker] = one_line(str(error), 100) or type(error).__name__
        time.sleep(min(PAUSE_S, max(0.0, deadline - time.monotonic())))


def _fetched(
    peers: Peers, member: Member, module: nn.Module, begins_by: float, deadline: float
) -> WorkerState:
    """Fetch the state of ``member``, which must start by ``begins_by`` and complete by ``deadline``."""
    with peers.connect(member, begins_by) as connection:
        request = {"kind": "state", "wait_s": max(0.0, begins_by - time.monotonic())}
        frames.send(connection, request, b"", begins_by)
        header, _ = frames.receive(connection, Limits(LARGE_HEADER_BYTES), begins_by)
        if "failed" in header:
            raise ConnectionError(str(header["failed"])[:200])
        expected = _checked(header, module, member)
        tensors = {name: _received(connection, dtype, shape, deadline) for name, dtype, shape in expected}
        return WorkerState(
            header["iteration"], header["optimizer"], tensors, header["scalars"], header["averaged"]
        )


def _allowed_until(size_bytes: int) -> float:
    """Deadline for receiving a tensor of ``size_bytes``."""
    return time.monotonic() + PATIENCE_S + size_bytes / SLOWEST_BYTES_PER_S


def _checked(header: Header, module: nn.Module, member: Member) -> list[tuple[str, torch.dtype, list[int]]]:
    """Check a state's header; returns its tensors. Raises UserError for another model, FrameError if malformed."""
    listed, scalars = header.get("tensors"), header.get("scalars")
    if (
        not isinstance(listed, list) or not isinstance(scalars, dict) or not isinstance(header.get("iteration"), int)
        or not isinstance(header.get("optimizer"), str) or not _are_names(header.get("averaged"))
    ):  # fmt: skip
        raise FrameError("a state lacks required fields")
    tensors = [_described(entry) for entry in listed]
    sent = {name: (dtype, shape) for name, dtype, shape in tensors if not name.startswith("moment/")}
    expected = {name: (tensor.dtype, list(tensor.shape)) for name, tensor in _model_tensors(module).items()}
    if len(sent) != sum(not name.startswith("moment/") for name, _, _ in tensors):
        raise FrameError("a state names a tensor twice")
    for name in sorted(expected.keys() | sent.keys()):
        if expected.get(name) != sent.get(name):
            raise UserError(
                f"worker {member.worker} trains a different model", got=f"{name} {expected.get(name, 'missing')} here",
                expected=f"{sent.get(name, 'missing')} there", fix="Start all workers with the same model.",
            )  # fmt: skip
    _check_moments([entry for entry in tensors if entry[0].startswith("moment/")], [*scalars], module)
    if not all(value is None or isinstance(value, (int, float, bool, str)) for value in scalars.values()):
        raise FrameError("optimizer state holds a value that is not a scalar")
    return tensors


def _are_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def _check_moments(
    moments: Sequence[tuple[str, torch.dtype, list[int]]], scalars: Sequence[str], module: nn.Module
) -> None:
    numel = {name: parameter.numel() for name, parameter in module.named_parameters()}
    counts: dict[str, int] = {}
    for full in (*(name for name, _, _ in moments), *scalars):
        name = full.removeprefix("moment/").rpartition("/")[0]
        counts[name] = counts.get(name, 0) + 1
        if not full.startswith("moment/") or name not in numel or counts[name] > STATES_OF_ONE_PARAMETER:
            raise FrameError(f"optimizer state does not belong to a parameter of this model: {full[:100]!r}")
    for full, _, shape in moments:
        if torch.Size(shape).numel() > max(
            SMALL_NUMEL, numel[full.removeprefix("moment/").rpartition("/")[0]]
        ):
            raise FrameError(f"optimizer state is larger than its parameter: {full[:100]!r}")


def _described(entry: Any) -> tuple[str, torch.dtype, list[int]]:
    match entry:
        case [str(name), str(dtype), list(shape)] if dtype in DTYPES and len(shape) <= 64:
            if all(type(size) is int and 0 <= size < 2**40 for size in shape):
                return name, DTYPES[dtype], shape
    raise FrameError("a state describes a tensor incompletely")


def _received(
    connection: socket.socket, dtype: torch.dtype, shape: Sequence[int], deadline: float
) -> torch.Tensor:
    size_bytes = torch.Size(shape).numel() * dtype.itemsize
    if not size_bytes:
        return torch.empty(tuple(shape), dtype=dtype)
    data = receive_exactly(connection, size_bytes, min(deadline, _allowed_until(size_bytes)))
    return torch.frombuffer(data, dtype=torch.uint8).view(dtype).view(tuple(shape))


def check_can_be_sent(module: nn.Module) -> None:
    """Raise UnsupportedError if a tensor of ``module`` cannot be sent to joining workers."""
    for name, tensor in _model_tensors(module).items():
        dtype = str(tensor.dtype).removeprefix("torch.")
        if dtype not in DTYPES or tensor.layout is not torch.strided or tensor.is_meta:
            raise UnsupportedError(
                "a tensor of the model cannot be sent to joining workers",
                got=f"{name.partition('/')[2]}, {dtype}, {str(tensor.layout).removeprefix('torch.')}",
                expected=f"a dense tensor of {', '.join(sorted(DTYPES))}",
            )  # fmt: skip


def _model_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    return {
        **{f"parameter/{name}": parameter.detach() for name, parameter in module.named_parameters()},
        **{f"buffer/{name}": buffer for name, buffer in module.named_buffers()},
    }


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", copy=True).contiguous()


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    if not tensor.numel():
        return memoryview(b"")
    return tensor.reshape(-1).view(torch.uint8).numpy().data


@dataclass(frozen=True, slots=True)
class WorkerResources:
    """Connections, threads and hooks of one worker. None of them references the wrapper."""

    stepping: Stepping
    snapshots: Snapshots[WorkerState]
    rounds: Rounds
    coordinator: Coordinator
    averaging: Averaging
    server: PeerServer
    peers: Peers
    contexts: Contexts

    def close(self, *, leave: bool = True) -> None:
        """Detach from the optimizer, stop serving and close all connections; ``leave`` tells the coordinator."""
        self.stepping.close()
        self.snapshots.close()
        self.rounds.stop()
        try:
            if leave:
                self.coordinator.leave()
            self.averaging.drop()
        finally:
            self.server.close()
            self.peers.close()
            self.contexts.close()
