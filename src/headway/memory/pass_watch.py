"""Measures what forwards, backwards and updates hold in memory, by watching tensors being allocated and freed."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch

from headway import torch_private
from headway.model import ModuleMemory, PassMemory


class Made(NamedTuple):
    """Memory ``key`` of ``size_bytes`` was allocated."""

    key: int
    size_bytes: int


class Gone(NamedTuple):
    """Memory ``key`` of ``size_bytes`` was freed."""

    key: int
    size_bytes: int


class Added(NamedTuple):
    """The tensor in memory ``source`` was added in place to the one in ``key``."""

    key: int
    source: int


class Inner(NamedTuple):
    """An operator used a workspace of ``size_bytes`` while it ran."""

    size_bytes: int


Change = Made | Gone | Added | Inner


_aten = torch.ops.aten
FORWARD, BACKWARD = _aten.convolution.default, _aten.convolution_backward.default
_BATCH = 16  # from this batch size on, oneDNN runs 1x1 convolutions on a single thread too
_INPUT_NUMEL = 20_480  # above this input size, it convolves a single sample


def inner_bytes(operator: Any, arguments: Any, out: Any) -> int:
    """The workspace of ``operator`` beyond its ``arguments`` and ``out``; 0 if unknown.

    Known are convolutions on the CPU. oneDNN convolves a blocked memory format: other tensors are copied into it, and
    the result out of it, so that each exists twice meanwhile. Fake tensors have no workspace.
    """
    if operator is FORWARD:
        input_, weight, _bias, *options = arguments
        put_out = out
    elif operator is BACKWARD:
        put_out, input_, weight, _bias_sizes, *options = arguments
    else:
        return 0
    if not _is_on_cpu(input_) or not _is_by_onednn(input_, weight, *options[:6]):
        return 0
    copies = _copied_bytes(input_), _copied_bytes(put_out)
    # Forward frees the copy of its input before it copies its result; backward needs both at once.
    return max(copies) if operator is FORWARD else sum(copies)


def _is_on_cpu(tensor: torch.Tensor) -> bool:
    plain = tensor.device.type == "cpu" and tensor.dtype == torch.float32
    return plain and not torch_private.is_fake(tensor)


def _is_by_onednn(
    input_: torch.Tensor,
    weight: torch.Tensor,
    stride: Sequence[int],
    _padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    _output_padding: Sequence[int],
    groups: int,
) -> bool:
    """Whether PyTorch uses oneDNN for this convolution, as ``use_mkldnn`` in its Convolution.cpp decides."""
    if transposed or not torch.backends.mkldnn.is_available() or not torch.backends.mkldnn.enabled:
        return False
    kernel = weight.shape[-2:]
    spread = any(step != 1 for step in (*stride, *dilation))
    threads = torch.get_num_threads() > 1
    worth = spread or threads or input_.shape[0] >= _BATCH or any(extent != 1 for extent in kernel)
    large = all(extent > 3 for extent in kernel) or input_.numel() > _INPUT_NUMEL
    return worth and (groups > 1 or input_.shape[0] > 1 or large)


def _copied_bytes(tensor: torch.Tensor) -> int:
    """The bytes of the copy of ``tensor`` that oneDNN makes: none if it is channels-last."""
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(tensor.dim())
    is_last = last is not None and tensor.is_contiguous(memory_format=last)
    return 0 if is_last else tensor.numel() * tensor.element_size()


_ADD = torch.ops.aten.add_.Tensor
MOST_CALLS = 2**14
"""The largest number of module calls watched in a forward."""


class Allocations(torch_private.DispatchMode):
    """Adds up the memory of tensors allocated while it is on, until they are freed.

    It sees what autograd keeps and what passes between operations; of workspaces inside operations, only those that
    ``inner_bytes`` knows. Results are unchanged. If a tensor's memory cannot be determined, such as a sparse tensor's,
    it gives up and ``understood`` becomes False.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.held_bytes = 0
        self.understood = True
        self.on_change: Callable[[Change], object] | None = None  # called with every change, if set
        self._stopped = self._left = False
        self._peak_bytes = 0
        self._sizes_bytes: dict[int, int] = {}  # by memory
        self._watched: dict[int, weakref.ref[Any]] = {}

    def peak_bytes(self) -> int:
        """The peak since the last call."""
        peak, self._peak_bytes = self._peak_bytes, self.held_bytes
        return peak

    def holds(self, tensor: torch.Tensor | None) -> int:
        """The bytes of ``tensor``'s memory; 0 if it was allocated before, or its memory cannot be determined."""
        if tensor is None or tensor.layout != torch.strided:
            return 0
        return self._sizes_bytes.get(_memory_of(tensor), 0)

    def add(self, value: Any) -> None:
        """Count the existing tensors in ``value`` as well, until they are freed."""
        for tensor in torch_private.tensors_in(value):
            if tensor.layout == torch.strided:
                self._count(tensor)

    def leave_out(self, value: Any) -> None:
        """Stop counting the tensors in ``value``."""
        for tensor in torch_private.tensors_in(value):
            if tensor.layout == torch.strided:
                self._gone(_memory_of(tensor), None)

    def stop(self) -> None:
        """Stop watching."""
        self._stopped = True
        if torch_private.dispatch_modes()[-1:] != [self]:
            return
        if self._left:
            torch_private.pop_dispatch_mode()
        else:
            self._left = True
            self.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        try:
            if not self._stopped and not torch_private.returns_input_memory(func):
                self._look(out, (args, kwargs))
                inner = inner_bytes(func, args, out)
                self._peak_bytes = max(self._peak_bytes, self.held_bytes + inner)
                if inner and self.on_change:
                    self.on_change(Inner(inner))
            elif self.on_change and func is _ADD:
                self.on_change(Added(*map(_memory_of, args[:2])))
        except Exception:  # training goes on, whatever tensors there are
            self.understood = False
            self._stopped = True
        return out

    def _look(self, out: Any, arguments: Any) -> None:
        # Some operators, such as collectives, return their inputs without declaring it.
        input_keys = {_memory_of(tensor) for tensor in torch_private.tensors_in(arguments)}
        for tensor in torch_private.tensors_in(out):
            if _memory_of(tensor) not in input_keys:
                self._count(tensor)

    def _count(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key = torch_private.storage_key(storage)
        if key not in self._sizes_bytes:
            self._sizes_bytes[key] = size_bytes = storage.nbytes()
            self._watched[key] = weakref.ref(storage, partial(self._gone, key))
            self.held_bytes += size_bytes
            self._peak_bytes = max(self._peak_bytes, self.held_bytes)
            if self.on_change:
                self.on_change(Made(key, size_bytes))

    def _gone(self, key: int, _storage: Any) -> None:
        self._watched.pop(key, None)
        size_bytes = self._sizes_bytes.pop(key, 0)
        self.held_bytes -= size_bytes
        if self.on_change:
            self.on_change(Gone(key, size_bytes))


def _memory_of(tensor: torch.Tensor) -> int:
    return torch_private.storage_key(tensor.untyped_storage())


def _strided(value: Any) -> list[torch.Tensor]:
    return [tensor for tensor in torch_private.tensors_in(value) if tensor.layout == torch.strided]


@dataclass(slots=True, eq=False)
class _Call:
    """A module's call; ``inputs`` are the keys of its inputs' memory, ``end_bytes`` None while it runs."""

    name: str
    begin_bytes: int
    peak_bytes: int
    inputs: frozenset[int]
    end_bytes: int | None = None
    output_bytes: int = 0

    def seen(self) -> ModuleMemory:
        assert self.end_bytes is not None
        return ModuleMemory(
            module=self.name, begin_bytes=self.begin_bytes, peak_bytes=self.peak_bytes,
            end_bytes=self.end_bytes, output_bytes=self.output_bytes,
        )  # fmt: skip


class PassMemoryWatch:
    """Measures one forward, its backward and the update after it. The caller reports the progress of each.

    ``apart``: gradients have their own memory, not views of buckets. ``kept``: gradients existed before forward.
    """

    def __init__(self, *, apart: bool = True, kept: bool = False) -> None:
        self._allocations = Allocations()
        self._apart, self._kept = apart, kept
        self._gradient_bytes = 0
        self._forward_bytes: int | None = None
        self._forward_so_far_bytes = 0
        self._calls: list[_Call] = []  # calls of modules, in the order in which they began
        self._open: list[_Call] = []
        self._backward: list[tuple[str, int]] = []
        self._after_bytes = self._held_bytes = 0
        self._understood = True

    def begin(self, inputs: Any) -> None:
        """Forward begins, on ``inputs``."""
        self._allocations.add(inputs)
        self._allocations.__enter__()  # type: ignore[no-untyped-call]

    def forward_done(self) -> None:
        """The model's forward is done."""
        if self._forward_bytes is None:
            self._look_up()
            self._forward_bytes = self._forward_so_far_bytes

    def module_begins(self, name: str, inputs: Any) -> None:
        """A module's forward begins, on ``inputs``."""
        if self._forward_bytes is None and len(self._calls) < MOST_CALLS:
            self._look_up()
            held_bytes = self._allocations.held_bytes
            keys = frozenset(map(_memory_of, _strided(inputs)))
            call = _Call(name, held_bytes, held_bytes, keys)
            self._calls.append(call)
            self._open.append(call)

    def module_ends(self, name: str, output: Any) -> None:
        """The forward of the innermost running module ``name`` is done."""
        while self._forward_bytes is None and self._open:
            self._look_up()
            call = self._open.pop()
            if call.name == name:
                call.end_bytes = self._allocations.held_bytes
                outputs = {_memory_of(tensor): tensor for tensor in _strided(output)}
                call.output_bytes = sum(
                    self._allocations.holds(tensor)
                    for key, tensor in outputs.items()
                    if key not in call.inputs
                )
                return

    def _look_up(self) -> None:
        peak_bytes = self._allocations.peak_bytes()
        self._forward_so_far_bytes = max(self._forward_so_far_bytes, peak_bytes)
        for call in self._open:
            call.peak_bytes = max(call.peak_bytes, peak_bytes)

    def gradient_done(self, name: str, parameter: torch.Tensor) -> None:
        """The gradient of a parameter is complete."""
        self._backward.append((name, self._peak_bytes()))
        own_bytes = self._allocations.holds(parameter.grad)
        if self._apart and own_bytes == 0 and parameter.numel():
            self._understood = False  # it was added to an existing gradient
        self._gradient_bytes += own_bytes

    def update_begins(self) -> None:
        """Backward is done, and the optimizer begins its update."""
        self._after_bytes = self._peak_bytes()
        self._held_bytes = self._allocations.held_bytes

    def stop(self) -> None:
        """Stop watching."""
        self._allocations.stop()

    def end(self) -> PassMemory | None:
        """The update is done: returns the measurements, or None if the pass was incomplete or not understood."""
        held_bytes = max(self._held_bytes, self._allocations.held_bytes)
        update_bytes = max(0, self._allocations.peak_bytes() - held_bytes)
        self._allocations.stop()
        understood = self._understood and self._allocations.understood
        if self._forward_bytes is None or not self._backward or not understood:
            return None
        return PassMemory(
            forward_bytes=self._forward_bytes,
            backward=tuple(self._backward),
            after_bytes=self._after_bytes,
            update_bytes=update_bytes,
            gradients_apart=self._apart,
            gradients_kept=self._kept,
            modules=tuple(call.seen() for call in self._calls if call.end_bytes is not None),
        )

    def _peak_bytes(self) -> int:
        """The peak since the last call, without the gradients that were already complete."""
        return max(0, self._allocations.peak_bytes() - self._gradient_bytes)
