"""Joining: a new or returned worker takes parameters, buffers and optimizer state from a live peer.

The peer sends one header that names every tensor, then their bytes. The worker accepts exactly the tensors of its own
model; of optimizer states those of its own parameters, within bounds. It receives everything before it writes anything.
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
    """Has ``take`` called when nothing changes: by whoever asks while training rests, else by the thread that trains.

    Training rests from ``rest`` to ``resume``: between a step and the next forward, but for ``writing``. So a worker
    that waits for its group gives snapshots, even to the workers that its group waits for. All who ask in one rest are
    given the same one.
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
        """Nothing changes from now on. Takes a snapshot for those who wait for one."""
        with self._changed:
            self._resting = True
            if self._waiting:
                self._last = self._of_rest = self._take()
                self._taken += 1
                self._changed.notify_all()

    def resume(self) -> None:
        """Things change from now on; returns once no snapshot is being taken."""
        with self._changed:
            self._resting = False
            self._of_rest = None

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Things change inside the block, and nowhere before or after it."""
        self.resume()
        try:
            yield
        finally:
            self.rest()

    def close(self) -> None:
        """Give no more snapshots."""
        with self._changed:
            self._closed = True
            self._of_rest = None
            self._changed.notify_all()

    def get(self, deadline: float) -> T:
        """A snapshot. Raises TimeoutError where training does not come to a step's end before ``deadline``."""
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
"""What a connection over which a state comes has at least: a tensor may take its time at that rate."""
PATIENCE_S = 30.0
"""And so long besides, whatever its size."""

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
    """A copy of what ``module`` and ``optimizer`` hold now."""
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
    """``state`` of a worker that has the optimizer's state of ``source`` yet to hand to its optimizer."""
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
    """Give ``optimizer`` the state of its parameters in ``state``; hyper-parameters stay this worker's own.

    Raises UserError where the peer's optimizer is of another class.
    """
    if not state.optimizer:  # the peer has made no step
        return
    if type(optimizer).__name__ != state.optimizer:
        raise UserError(
            "the peer trains with another optimizer", got=type(optimizer).__name__, expected=state.optimizer,
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


# Giving ------------------------------------------------------------------------------------------------


def give(snapshots: Snapshots[WorkerState], connection: socket.socket, deadline: float) -> None:
    """Send a snapshot to a peer that asked for one and waits until ``deadline`` for it to begin.

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


# Taking ------------------------------------------------------------------------------------------------


def fetch(
    peers: Peers, candidates: Sequence[Member], member_here: Member, module: nn.Module, timeout_s: float
) -> WorkerState:
    """The state of the first of ``candidates`` that gives it, checked against ``module``.

    Each is asked in turn, again and again. Raises UserError where a peer's model is another one, CommunicationError
    where none gives its state within ``timeout_s``.
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
                    f"worker {member_here.worker}: no peer gave its state within {timeout_s:g} s ({one_line(reasons)}). "
                    "Check that the others can be reached at their addresses, and start this worker again."
                )
            try:
                return _fetched(peers, member, module, time.monotonic() + min(left_s, each_s), deadline)
            except OSError as error:
                failures[member.worker] = one_line(str(error), 100) or type(error).__name__
        time.sleep(min(PAUSE_S, max(0.0, deadline - time.monotonic())))


def _fetched(
    peers: Peers, member: Member, module: nn.Module, begins_by: float, deadline: float
) -> WorkerState:
    """The state of ``member``, which begins to send it before ``begins_by``; all of it is here by ``deadline``."""
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
    """Until when a tensor of that size may be on its way."""
    return time.monotonic() + PATIENCE_S + size_bytes / SLOWEST_BYTES_PER_S


def _checked(header: Header, module: nn.Module, member: Member) -> list[tuple[str, torch.dtype, list[int]]]:
    """The tensors that are sent. Raises UserError for another model's, FrameError for what nobody would send."""
    listed, scalars = header.get("tensors"), header.get("scalars")
    if (
        not isinstance(listed, list) or not isinstance(scalars, dict) or not isinstance(header.get("iteration"), int)
        or not isinstance(header.get("optimizer"), str) or not _are_names(header.get("averaged"))
    ):  # fmt: skip
        raise FrameError("a state without its parts")
    tensors = [_described(entry) for entry in listed]
    sent = {name: (dtype, shape) for name, dtype, shape in tensors if not name.startswith("moment/")}
    expected = {name: (tensor.dtype, list(tensor.shape)) for name, tensor in _model_tensors(module).items()}
    if len(sent) != sum(not name.startswith("moment/") for name, _, _ in tensors):
        raise FrameError("a state that names a tensor twice")
    for name in sorted(expected.keys() | sent.keys()):
        if expected.get(name) != sent.get(name):
            raise UserError(
                f"worker {member.worker} trains another model", got=f"{name} {expected.get(name, 'missing')} here",
                expected=f"{sent.get(name, 'missing')} there", fix="Start all workers with the same model.",
            )  # fmt: skip
    _check_moments([entry for entry in tensors if entry[0].startswith("moment/")], [*scalars], module)
    if not all(value is None or isinstance(value, (int, float, bool, str)) for value in scalars.values()):
        raise FrameError("an optimizer's state holds what is no number")
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
            raise FrameError(f"an optimizer's state of no parameter of this model: {full[:100]!r}")
    for full, _, shape in moments:
        if torch.Size(shape).numel() > max(
            SMALL_NUMEL, numel[full.removeprefix("moment/").rpartition("/")[0]]
        ):
            raise FrameError(f"an optimizer's state is larger than its parameter: {full[:100]!r}")


def _described(entry: Any) -> tuple[str, torch.dtype, list[int]]:
    match entry:
        case [str(name), str(dtype), list(shape)] if dtype in DTYPES and len(shape) <= 64:
            if all(type(size) is int and 0 <= size < 2**40 for size in shape):
                return name, DTYPES[dtype], shape
    raise FrameError("a state with a tensor that is not described")


def _received(
    connection: socket.socket, dtype: torch.dtype, shape: Sequence[int], deadline: float
) -> torch.Tensor:
    size_bytes = torch.Size(shape).numel() * dtype.itemsize
    if not size_bytes:
        return torch.empty(tuple(shape), dtype=dtype)
    data = receive_exactly(connection, size_bytes, min(deadline, _allowed_until(size_bytes)))
    return torch.frombuffer(data, dtype=torch.uint8).view(dtype).view(tuple(shape))


# Both --------------------------------------------------------------------------------------------------


def check_can_be_sent(module: nn.Module) -> None:
    """Raise UnsupportedError, naming the tensor, unless a worker that joins can be sent all of ``module``."""
    for name, tensor in _model_tensors(module).items():
        dtype = str(tensor.dtype).removeprefix("torch.")
        if dtype not in DTYPES or tensor.layout is not torch.strided or tensor.is_meta:
            raise UnsupportedError(
                "a tensor of the model cannot be given to workers that join",
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
class Parts:
    """Connections, threads and hooks of one worker. None of them holds the wrapper."""

    stepping: Stepping
    snapshots: Snapshots[WorkerState]
    rounds: Rounds
    coordinator: Coordinator
    averaging: Averaging
    server: PeerServer
    peers: Peers
    contexts: Contexts

    def close(self, *, leave: bool = True) -> None:
        """Follow no more steps, answer nobody and close all connections; ``leave`` tells the coordinator."""
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
