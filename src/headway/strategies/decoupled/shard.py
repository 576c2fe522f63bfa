"""A rank's share of a bucket: the pieces of parameters in it, and their part of an optimizer's state.

One update of this rank's shard of a bucket: the optimizer's own code, over as few tensors as possible.

What an optimizer does in Python for each tensor is as long for a bias as for a large matrix, and mostly longer than the
arithmetic. Where an update goes by element, neighbouring pieces of a shard whose states are alike are one flat tensor
to it: a run.
"""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from headway import torch_private
from headway.strategies.decoupled.buckets import LiveBucket
from headway.strategies.decoupled.layout import Layout
from headway.strategies.decoupled.parameter_state import ParameterState
from headway.strategies.live.channels.streams import CompletionEvents, Streams

State = dict[str, Any]
_OF_THE_WHOLE = {"step", "mu_product", "eta", "mu"}
"""What torch's optimizers keep of a whole parameter in a tensor without dimensions, as parameters may be, too."""


@dataclass(frozen=True, slots=True)
class Span:
    """Elements ``start`` to ``end`` of a parameter, at ``offset`` of the bucket's buffer."""

    owner: ParameterState
    start: int
    end: int
    offset: int


def spans_of(layout: Layout, bucket: LiveBucket, rank: int) -> list[Span]:
    """The pieces of parameters in ``rank``'s chunk of ``bucket``, in order."""
    low, high = bucket.bounds[rank]
    spans = []
    for state in layout.states_in[bucket.index]:
        for view in state.views:
            if view.bucket is bucket:
                first = max(low, view.offset)
                last = min(high, view.offset + view.end - view.start)
                if first < last:
                    shift = view.start - view.offset
                    spans.append(Span(state, first + shift, last + shift, first))
    return spans


class Piece:
    """A span of this rank: a flat parameter of its own whose value and gradient are those from ``first`` to ``last``
    of the shard's.
    """

    def __init__(self, span: Span, first: int, shard: Shard) -> None:
        self.owner, self.start, self.end = span.owner, span.start, span.end
        self.numel = span.end - span.start
        self.first, self.last = first, first + self.numel
        self.bucket = shard.bucket.index
        self.value = shard.value[self.first : self.last]
        self.gradient = shard.gradient[self.first : self.last]
        self.parameter = nn.Parameter(self.value, requires_grad=True)
        with torch_private.without_subclass_dispatch():
            shape = span.owner.parameter.shape
        self.shaped = self.value.view(shape) if self.numel == shape.numel() else None
        """The value in the shape of the parameter, where it is the whole of it."""

    def source(self) -> torch.Tensor:
        """What the parameter holds there, in the shape of ``shaped`` or flat."""
        parameter = self.owner.parameter
        return parameter if self.shaped is not None else parameter.reshape(-1)[self.start : self.end]


Members = list[tuple[Piece, int]]
"""Pieces to be updated, in their order in the shard, each with the index of its parameter group."""


@dataclass(frozen=True)
class Run:
    """Neighbouring pieces of one parameter group, which an optimizer's code updates as one tensor of this state."""

    pieces: Sequence[Piece]
    group: int
    state: State

    @cached_property
    def parts(self) -> dict[Piece, State]:
        """The state of each piece, out of that of all."""
        if len(self.pieces) == 1:
            return {self.pieces[0]: self.state}
        parts: dict[Piece, State] = {piece: dict(self.state) for piece in self.pieces}
        sizes = [piece.numel for piece in self.pieces]
        for key, value in self.state.items():
            if is_by_element(value, sum(sizes)):
                for piece, part in zip(self.pieces, torch.split(value, sizes), strict=True):
                    parts[piece][key] = part
        return parts


def is_by_element(value: Any, numel: int) -> bool:
    """Whether ``value`` is a tensor of something for each of ``numel`` elements."""
    return isinstance(value, torch.Tensor) and value.dim() == 1 and value.numel() == numel


class Shard:
    """This rank's chunk of one bucket, on the parameters' device, so that its update is the one of stock DDP.

    ``value`` lies in the buffer where that is on the device, too. ``gradient`` keeps the reduced gradient until the
    next reduction is done.
    """

    def __init__(self, layout: Layout, bucket: LiveBucket, rank: int, streams: Streams) -> None:
        self.bucket = bucket
        self.chunk = bucket.buffer[bucket.own]
        apart = self.chunk.device != bucket.device
        self.value = torch.zeros_like(self.chunk, device=bucket.device) if apart else self.chunk
        self.gradient = torch.zeros_like(self.value)
        self.on_host = self.value.device.type == "cpu"
        self.reductions = (
            0  # which reduction ``gradient`` is of, or will be when the device has come to ``kept``
        )
        self.changes = 0  # how often ``gradient`` has been clipped or unscaled
        self.kept = CompletionEvents(streams)
        start = bucket.bounds[rank][0]
        self.pieces = [Piece(span, span.offset - start, self) for span in spans_of(layout, bucket, rank)]
        self._targets = [p.value if p.shaped is None else p.shaped for p in self.pieces]
        self._joined: dict[tuple[int, int], nn.Parameter] = {}

    def keep_gradient(self, reduction: int) -> None:
        """Take the reduced gradient out of the buffer, which parameters will need."""
        self.gradient.copy_(self.chunk)
        self.kept.reach(reduction)
        self.changes = 0
        self.reductions = reduction

    def parameter_of(self, pieces: Sequence[Piece]) -> nn.Parameter:
        """Neighbouring ``pieces`` as one flat parameter."""
        if len(pieces) == 1:
            return pieces[0].parameter
        ends = (pieces[0].first, pieces[-1].last)
        if ends not in self._joined:
            self._joined[ends] = nn.Parameter(self.value[slice(*ends)], requires_grad=True)
        return self._joined[ends]

    def fetch(self) -> None:
        """Bring the value up to date with the parameters, which a script may have written to."""
        with torch.no_grad(), torch_private.without_subclass_dispatch():
            sources = [piece.source() for piece in self.pieces]
            if sources:
                torch_private.foreach_copy(self._targets, sources)

    def publish(self) -> None:
        """Put the updated value where it is gathered from."""
        if self.value is not self.chunk:
            self.chunk.copy_(self.value)


class ShardedState:
    """One optimizer's state over this rank's pieces.

    On a device updates are given ahead of time: ``of`` is the state that there will be, ``before`` what a slower rank
    may still ask for.
    """

    def __init__(self, streams: Streams) -> None:
        self._committing = threading.Lock()
        self._committed: defaultdict[int, CompletionEvents] = defaultdict(lambda: CompletionEvents(streams))
        self._before: defaultdict[int, dict[int, Mapping[Piece, State]]] = defaultdict(dict)
        self.of: defaultdict[Piece, State] = defaultdict(dict)
        # By bucket: what was updated last, and how it is now.
        self.runs: dict[int, tuple[Members, Sequence[Run]]] = {}
        self.asked: Counter[int] = Counter()  # bucket: how many updates the script has asked for
        self.looked_at: set[ParameterState] = (
            set()
        )  # whose state the optimizer holds whole, so that it may be changed there
        self.applied: Counter[int] = Counter()  # bucket: how many of them are done
        self.gone = False  # the optimizer was dropped, and what is kept for it with it

    def commit(self, bucket: int, draft: Mapping[Piece, State]) -> None:
        """The gather behind an update is done: every rank has asked for it, so none wants the state before.

        Where it is merely given to the device, the state before is kept until it is done. That also keeps the memory
        of what the update reads.
        """
        with self._committing:
            number = self.applied[bucket] + 1
            self._committed[bucket].reach(number)
            if not self._committed[bucket].is_done(number):
                self._before[bucket][number - 1] = {key: self.of[key] for key in draft}
            self.of.update(draft)
            self.applied[bucket] = number

    def forget(self) -> None:
        """Let go of the states that nobody can ask for any more."""
        for bucket, earlier in self._before.items():
            for number in list(earlier):
                if self._committed[bucket].is_done(number + 1):
                    del earlier[number]

    def after(self, asked: Mapping[int, int]) -> Mapping[Piece, State] | None:
        """The state after so many updates of each bucket; None where it is gone. They must have been given."""
        with self._committing:
            found = dict(self.of)
            for bucket, number in self.applied.items():
                count = asked.get(bucket, 0)
                if count < number:
                    if count not in self._before[bucket]:
                        return None
                    found.update(self._before[bucket][count])
        for bucket, count in asked.items():
            self._committed[bucket].wait(count)
        return found

    def absorb(self, owner: ParameterState, pieces: Sequence[Piece], whole: State) -> None:
        """Take this rank's pieces out of the state of a whole parameter."""
        self.looked_at.discard(owner)
        shape = owner.parameter.shape
        for piece in pieces:
            self.runs.pop(piece.bucket, None)
            self.of[piece] = {
                key: _cut(key, value, shape, piece.start, piece.end) for key, value in whole.items()
            }


def _cut(key: str, value: Any, shape: torch.Size, start: int, end: int) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    if value.shape != shape or (not shape and key in _OF_THE_WHOLE):
        return value.clone()
    return value.detach().reshape(-1)[start:end].clone()


# On the way between ranks -----------------------------------------------------------------------------


def pack(states: Sequence[Mapping[str, Any] | None]) -> tuple[list[Any], list[torch.Tensor]]:
    """A description that JSON can hold, and the tensors in memory, of the states of pieces in order."""
    described: list[Any] = []
    tensors: list[torch.Tensor] = []
    for state in states:
        entry = {}
        for key, value in (state or {}).items():
            if isinstance(value, torch.Tensor):
                entry[key] = {
                    "dtype": str(value.dtype).removeprefix("torch."), "shape": list(value.shape),
                    "here": value.device.type == "cpu",
                }  # fmt: skip
                tensors.append(value.detach().cpu())
            else:
                entry[key] = {"value": value}
        described.append(entry)
    return described, tensors


def unpack(described: Sequence[Mapping[str, Any]], payload: memoryview, device: torch.device) -> list[State]:
    """The states that ``pack`` described; tensors that were on a peer's device are put on ``device``."""
    states = []
    take = reader(payload)
    for entry in described:
        state: State = {}
        for key, what in entry.items():
            if "value" in what:
                state[key] = what["value"]
            else:
                shape = torch.Size(what["shape"])
                value = take(shape.numel(), getattr(torch, what["dtype"])).view(shape)
                state[key] = value if what["here"] else value.to(device)
        states.append(state)
    return states


def reader(payload: memoryview) -> Callable[[int, torch.dtype], torch.Tensor]:
    """A function that takes the next so many elements of a dtype out of ``payload``."""
    place = 0

    def take(numel: int, dtype: torch.dtype) -> torch.Tensor:
        nonlocal place
        size_bytes = numel * dtype.itemsize
        piece = payload[place : place + size_bytes]
        place += size_bytes
        if not numel:
            return torch.empty(0, dtype=dtype, device="cpu")
        # Copied, so that the tensor begins at a multiple of its size.
        return torch.frombuffer(bytearray(piece), dtype=dtype)

    return take


HyperParameters = dict[str, Any]


class ShardUpdate:
    """An update that is done once, by ``run``. ``members`` tells then which pieces of the shard take part.

    ``gradients`` are those that are the script's own, in the place of what was reduced.
    """

    def __init__(
        self,
        shard: Shard,
        kept: ShardedState,
        hyper_parameters: Sequence[HyperParameters],
        members: Callable[[Shard], Members],
        gradients: Mapping[Piece, torch.Tensor],
    ) -> None:
        self._shard, self._kept = shard, kept
        self._hyper_parameters = hyper_parameters
        self._members = members
        self._gradients = gradients
        self._groups: list[dict[str, Any]] = []
        self.working: dict[Any, State] = {}  # the state that the optimizer's code sees
        self.draft: dict[Piece, State] = {}  # the state of each updated piece

    def groups(self) -> list[dict[str, Any]]:
        """The parameter groups that the optimizer's code goes through."""
        return self._groups

    def run(self, step: Callable[[], object]) -> None:
        """Have ``step`` update the shard's values, and a draft of its state.

        The state before stays as it is: a rank that has yet to step may ask for it.
        """
        shard = self._shard
        shard.fetch()
        members = self._members(shard)
        runs = _runs(members, self._kept, shard.bucket.index)
        lists: list[list[torch.Tensor]] = [[] for _ in self._hyper_parameters]
        parameters = []
        for run in runs:
            parameter = shard.parameter_of(run.pieces)
            # Not written over the reduced gradient, which a slower rank may still ask for.
            parameter.grad = self._gradient_of(run)
            self.working[parameter] = run.state
            lists[run.group].append(parameter)
            parameters.append(parameter)
        self._groups = [{**h, "params": p} for h, p in zip(self._hyper_parameters, lists, strict=True) if p]
        if runs:
            step()
        after = [Run(r.pieces, r.group, self.working[p]) for r, p in zip(runs, parameters, strict=True)]
        for run in after:
            self.draft |= run.parts
        self._kept.runs[shard.bucket.index] = members, after

    def _gradient_of(self, run: Run) -> torch.Tensor:
        if not any(piece in self._gradients for piece in run.pieces):
            return self._shard.gradient[run.pieces[0].first : run.pieces[-1].last]
        parts = [self._gradients.get(piece, piece.gradient) for piece in run.pieces]
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def _runs(members: Members, kept: ShardedState, bucket: int) -> Sequence[Run]:
    """``members`` in runs with copies of their states.

    They are those of the update before where nothing has changed since, and no two that could be one.
    """
    before, runs = kept.runs.get(bucket, ((), ()))
    if members == before and _are_current(runs, kept.of):
        return [Run(r.pieces, r.group, {k: _copied(v) for k, v in r.state.items()}) for r in runs]
    return _joined_runs(members, kept.of)


def _are_current(runs: Sequence[Run], states: Mapping[Piece, State]) -> bool:
    unchanged = all(states[piece] is state for run in runs for piece, state in run.parts.items())
    return unchanged and not any(
        _may_join(one.pieces[-1], one.group, other.pieces[0], other.group, states)
        for one, other in pairwise(runs)
    )


def _joined_runs(members: Members, states: Mapping[Piece, State]) -> list[Run]:
    found: list[tuple[list[Piece], int]] = []
    for piece, group in members:
        if found:
            pieces, before = found[-1]
            if _may_join(pieces[-1], before, piece, group, states):
                pieces.append(piece)
                continue
        found.append(([piece], group))
    return [Run(pieces, group, _joined(pieces, states)) for pieces, group in found]


def _may_join(one: Piece, group: int, other: Piece, other_group: int, states: Mapping[Piece, State]) -> bool:
    return group == other_group and one.last == other.first and _alike(one, other, states)


def _alike(one: Piece, other: Piece, states: Mapping[Piece, State]) -> bool:
    """Whether the states of two pieces differ in nothing but what they hold for each element."""
    state, others = states[one], states[other]
    if state.keys() != others.keys():
        return False
    for key, value in state.items():
        same = others[key]
        if value is same:
            continue
        if not isinstance(value, torch.Tensor) or not isinstance(same, torch.Tensor):
            if isinstance(value, torch.Tensor) or isinstance(same, torch.Tensor) or value != same:
                return False
        elif value.dtype != same.dtype or value.device != same.device:
            return False
        elif value.dim() == 0 and same.dim() == 0:
            # On a device the host would have to wait for the values.
            if value.device.type != "cpu" or value.item() != same.item():
                return False
        elif not (is_by_element(value, one.numel) and is_by_element(same, other.numel)):
            return False
    return True


def _joined(pieces: Sequence[Piece], states: Mapping[Piece, State]) -> State:
    """A copy of the states of ``pieces`` as that of one tensor."""
    several, numel = len(pieces) > 1, pieces[0].numel
    return {
        key: torch.cat([states[piece][key] for piece in pieces])
        if several and is_by_element(value, numel)
        else _copied(value)
        for key, value in states[pieces[0]].items()
    }


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


_EPSILON = 1e-6  # stock torch's


def coefficient(
    norm: torch.Tensor, max_norm: float, norm_type: float, error_if_nonfinite: bool
) -> torch.Tensor:
    """What gradients of this total norm are multiplied by, as stock torch has it.

    Raises RuntimeError, as stock torch does, for a norm that is not finite where that is asked for.
    """
    if error_if_nonfinite and not bool(torch.isfinite(norm)):
        raise RuntimeError(
            f"The total norm of order {norm_type} for gradients from `parameters` is non-finite, so it cannot be "
            "clipped. To disable this error and scale the gradients by the non-finite norm anyway, set "
            "`error_if_nonfinite=False`"
        )
    return torch.clamp(max_norm / (norm + _EPSILON), max=1.0)


def norm_of(pieces: Iterable[torch.Tensor], norm_type: float) -> float:
    """The norm of all ``pieces`` together, in double precision."""
    norms = [float(torch.linalg.vector_norm(p, norm_type, dtype=torch.float64)) for p in pieces if p.numel()]
    return joined(torch.tensor(norms, dtype=torch.float64, device="cpu"), norm_type)


def joined(norms: torch.Tensor, norm_type: float) -> float:
    """The norm of vectors whose norms are given."""
    return float(torch.linalg.vector_norm(norms, norm_type)) if norms.numel() else 0.0
