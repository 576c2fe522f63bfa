"""Times the main thread's forwards and backwards, module by module, and when each gradient becomes ready.

Hooks on modules leave the autograd graph unchanged: a pre-hook on the node that created a module's output marks the
start of that module's backward. Full backward hooks would insert nodes and views, and break in-place activations.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch import nn

from headway import torch_private
from headway.recording.patching import Now, OnFailure, guarded, observed_call, report_fault
from headway.recording.watch import Watch
from headway.trace.events import Event, Kind, Stream

LOSS = "(loss)"

Noted = tuple[str, str, int, int, int]  # kind, name, step, start and end


class PassListener(Protocol):
    """Is notified when a pass begins and when a backward ends."""

    def backward_ended(self) -> None:
        """A backward has ended without an error."""

    def script_reads_end(self) -> None:
        """A pass begins."""


class JobHook:
    """A hook on a module or parameter of the job. Its copies and pickles do nothing.

    It does nothing in compiled code either, where anything it reads could cause a recompilation. Exceptions are passed
    to ``on_failure``, never to the job.
    """

    def __init__(self, observe: Callable[..., None] | None, on_failure: OnFailure = report_fault) -> None:
        self._observe, self._on_failure = observe, on_failure

    def __call__(self, *arguments: Any) -> None:
        """Call the observer; the module's or parameter's values are unchanged."""
        if self._observe is not None and not torch.compiler.is_compiling():
            try:
                self._observe(*arguments)
            except Exception as failure:
                self._on_failure(failure)

    def __deepcopy__(self, _memo: Any) -> JobHook:
        """Copy to a hook that does nothing: a copied model is not recorded."""
        return JobHook(None)

    def __reduce__(self) -> Any:
        """Pickle as a hook that does nothing."""
        return JobHook, (None,)


class ModuleWatch(Watch):
    """Observes the passes of one wrapped model while attached, in steps that are recorded.

    Between two hooks a step computes for milliseconds and evicts the hooks' code and data from the CPU caches. So hooks
    only note tuples, from which ``add_rows`` makes events later. Times are those of this host's monotonic clock.
    """

    def __init__(self, now: Now, listener: PassListener) -> None:
        self._now = now
        self._listener = listener
        self._handles: list[Any] = []
        self._of_passes: list[Any] = []
        self._of_modules: list[Any] = []
        self._original_backward: Callable[..., Any] | None = None
        self._own_backward: Callable[..., Any] | None = None
        self._stop_counting: Callable[[], int] | None = None
        self._reset()

    def _reset(self) -> None:
        self.forward_order: list[str] = []
        self.activation_bytes = 0
        self.compute_ends_ns: dict[int, int] = {}  # end of each backward pass -> end of its computation
        self.noted: list[Noted] = []
        self.unseen: list[str] = []  # modules with parameters that run compiled, and so have no hooks
        self._owners: list[str] = []
        self.passes_compiled = False  # whether compiled code calls the wrapper
        self._first_phase = "enter"
        self._pass_start_ns = 0
        self._backward: _Backward | None = None  # the one in progress
        self._backwards: list[_Backward] = []
        self._to_mark: list[tuple[Any, Callable[..., None]]] = []  # nodes of this pass, and their pre-hooks

    def start_over(self) -> None:
        """Drop the model and everything observed of it: another model is recorded instead."""
        self.detach()
        self._reset()

    def count_activations(self, root: nn.Module) -> None:
        """Sum the output bytes of the innermost modules of ``root`` in the next forward, as ``activation_bytes``."""
        self._stop_counting = count_outputs(root)

    def watch_model(self, model: nn.Module, root: nn.Module) -> None:
        """Watch ``model`` (the wrapper that is called) and the modules and parameters of ``root`` inside it."""
        if not self.passes_compiled:
            self.watch_passes(model)
        self._watch_modules(root)
        for name, parameter in root.named_parameters():
            if parameter.requires_grad:
                ready = _Ready(self, self._now, name)
                self._handles.append(parameter.register_post_accumulate_grad_hook(ready))
        self.watch_backward()

    def watch_passes(self, model: nn.Module, phase: str = "enter") -> None:
        """Watch the forwards of ``model``, the wrapper or its compiled version; they begin in ``phase``."""
        self._first_phase = phase
        self._of_passes.append(model.register_forward_pre_hook(JobHook(self._enter_pass), prepend=True))
        self._of_passes.append(model.register_forward_hook(JobHook(self._leave_pass)))

    def _watch_modules(self, root: nn.Module) -> None:
        if self.unseen:  # it was attached before
            return
        eager = {id(module) for module in torch_private.eager_modules(root)}
        for name, module in root.named_modules():
            owns = any(True for _ in module.parameters(recurse=False))
            if owns:
                self._owners.append(name)
            if id(module) not in eager:
                self.unseen += [name] if owns else []
            elif owns or not any(True for _ in module.children()):
                starts_ns: list[int] = []
                enter = _Enter(self, self._now, name, starts_ns, owns=owns)
                leave = _Leave(self, self._now, name, starts_ns)
                self._of_modules.append(module.register_forward_pre_hook(enter))
                self._of_modules.append(module.register_forward_hook(leave))

    def leave_modules(self, *, passes: bool) -> None:
        """Remove the hooks on modules that will be compiled, and, with ``passes``, those on the wrapper."""
        self._counted()
        self.unseen = self._owners
        _remove(self._of_modules)
        self.passes_compiled |= passes
        if passes:
            _remove(self._of_passes)

    def detach(self) -> None:
        """Remove every hook."""
        self._counted()
        for handles in (self._handles, self._of_passes, self._of_modules):
            _remove(handles)
        self._to_mark.clear()
        if self._original_backward is not None:
            if torch.autograd.backward is self._own_backward:  # else somebody has patched it after us
                torch.autograd.backward = self._original_backward
            self._original_backward = self._own_backward = None

    def add_rows(self, rows: list[Event]) -> list[Event]:
        """Add the passes, modules and gradients."""
        noted = [
            Event(kind, name, Stream.COMPUTE, step, start_ns, end_ns - start_ns)
            for kind, name, step, start_ns, end_ns in self.noted
        ]
        return rows + noted + [row for backward in self._backwards for row in backward.rows()]

    def forget(self) -> None:
        """Drop everything observed."""
        self.noted.clear()
        self._backwards.clear()

    # Forward

    def _enter_pass(self, _module: nn.Module, _inputs: Any) -> None:
        self._listener.script_reads_end()
        self._to_mark.clear()  # left over from a forward that failed
        self._now.phase = self._first_phase
        self._pass_start_ns = time.monotonic_ns()

    def _counted(self) -> None:
        if self._stop_counting is not None:
            self.activation_bytes = self._stop_counting()
            self._stop_counting = None

    def _leave_pass(self, _module: nn.Module, _inputs: Any, _output: Any) -> None:
        now = self._now
        now.phase = ""
        self._mark_nodes()
        self._counted()
        if now.recording:
            self.noted.append((Kind.FORWARD_PASS, "", now.step, self._pass_start_ns, time.monotonic_ns()))

    def mark_begin(self, node: Any, begins: Callable[..., None]) -> None:
        """Have ``begins`` called before ``node`` of the autograd graph runs.

        During a forward, nodes are collected and hooked at its end: between two modules, torch's code for hooks is not
        in the caches, and each hook would cost 30 microseconds.
        """
        if self._now.phase == "forward":
            self._to_mark.append((node, begins))
        else:  # recomputed in a backward, or called outside the wrapper
            node.register_prehook(begins)

    def _mark_nodes(self) -> None:
        for node, begins in self._to_mark:
            node.register_prehook(begins)
        self._to_mark.clear()

    # Backward

    def watch_backward(self) -> None:
        """Watch the backwards of this process."""
        original = self._original_backward = torch.autograd.backward
        now = self._now

        def observe(original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
            self._listener.script_reads_end()
            self._mark_nodes()  # of a forward that has not ended
            before, now.phase = now.phase, "backward"
            self._backward = current = _Backward(now.step, time.monotonic_ns())
            try:
                original(*args, **kwargs)
            finally:
                self._backward = None
                now.phase = before
                for call in current.then:
                    call()
            current.end_ns = time.monotonic_ns()
            self._backwards.append(current)
            self.compute_ends_ns[current.end_ns] = current.compute_end_ns or current.end_ns
            self._listener.backward_ended()

        def backward(*args: Any, **kwargs: Any) -> None:
            if self._backward is not None or not now.recording:
                original(*args, **kwargs)
            else:
                observed_call(original, observe, *args, **kwargs)

        torch.autograd.backward = self._own_backward = backward

    def after_backward(self, call: Callable[[], object]) -> bool:
        """Have ``call`` called when this thread's backward ends; returns False if none is in progress."""
        current = self._backward
        if current is None or current.thread != threading.get_ident():
            return False
        current.then.append(call)
        return True

    def backward(self) -> _Backward | None:
        """The backward in progress, if any. It is notified when its graph is done: DDP waits for buckets only later."""
        current = self._backward
        if current is not None and not current.awaits_graph:
            current.awaits_graph = True
            torch_private.queue_backward_callback(current.graph_done)
        return current


def _remove(handles: list[Any]) -> None:
    for handle in handles:
        handle.remove()
    handles.clear()


class _Backward:
    """One backward pass: when each module's share of it began."""

    def __init__(self, step: int, start_ns: int) -> None:
        self.step = step
        self.marks = [(start_ns, LOSS)]
        self.thread = threading.get_ident()
        self.then: list[Callable[[], object]] = []  # callbacks for its end
        self.awaits_graph = False  # whether ``graph_done`` is registered
        self.compute_end_ns = 0
        self.end_ns = 0

    def graph_done(self) -> None:
        """All gradients are computed."""
        self.compute_end_ns = time.monotonic_ns()

    def rows(self) -> Iterator[Event]:
        """Events of the backward, and of each module's share of it."""
        start_ns = self.marks[0][0]
        yield Event(Kind.BACKWARD_PASS, "", Stream.COMPUTE, self.step, start_ns, self.end_ns - start_ns)
        ends_ns = [mark_ns for mark_ns, _ in self.marks[1:]] + [self.compute_end_ns or self.end_ns]
        for (mark_ns, name), next_ns in zip(self.marks, ends_ns, strict=True):
            if next_ns > mark_ns:
                yield Event(Kind.BACKWARD, name, Stream.COMPUTE, self.step, mark_ns, next_ns - mark_ns)


class _Enter(JobHook):
    """Hook: a module's forward begins."""

    def __init__(self, watch: ModuleWatch, now: Now, name: str, starts_ns: list[int], *, owns: bool) -> None:
        super().__init__(None)
        self._now, self._name, self._starts_ns = now, name, starts_ns
        self._order = watch.forward_order if owns and name not in watch.forward_order else None

    def __call__(self, *_arguments: Any) -> None:
        """Note the time."""
        if torch.compiler.is_compiling():
            return
        now = self._now
        try:
            if now.phase == "enter":
                now.phase = "forward"
            if self._order is not None:
                self._order.append(self._name)
                self._order = None
            if now.recording:
                self._starts_ns.append(time.monotonic_ns())
        except Exception as failure:
            report_fault(failure)


class _Leave(JobHook):
    """Hook: a module's forward ends. Its backward will begin at its output's autograd node."""

    def __init__(self, watch: ModuleWatch, now: Now, name: str, starts_ns: list[int]) -> None:
        super().__init__(None)
        self._watch, self._now, self._name, self._starts_ns = watch, now, name, starts_ns
        self._begins = guarded(self._backward_begins)  # bound once

    def __call__(self, *arguments: Any) -> None:
        """Note the time, and hook the start of the module's backward."""
        now = self._now
        if torch.compiler.is_compiling() or not now.recording:
            return
        end_ns = time.monotonic_ns()
        try:
            _module, inputs, output = arguments
            if self._starts_ns:
                self._watch.noted.append((Kind.FORWARD, self._name, now.step, self._starts_ns.pop(), end_ns))
            if not torch.is_grad_enabled():
                return
            for tensor in (output,) if isinstance(output, torch.Tensor) else tensors_of(output):
                node = tensor.grad_fn
                if node is not None and not _holds(inputs, tensor):
                    self._watch.mark_begin(node, self._begins)
        except Exception as failure:
            report_fault(failure)

    def _backward_begins(self, _gradients: Any) -> None:
        current = self._watch.backward()
        if current is not None:
            current.marks.append((time.monotonic_ns(), self._name))


class _Ready(JobHook):
    """Hook: a parameter's gradient is complete."""

    def __init__(self, watch: ModuleWatch, now: Now, name: str) -> None:
        super().__init__(None)
        self._watch, self._now, self._name = watch, now, name

    def __call__(self, *_arguments: Any) -> None:
        """Note the time."""
        now = self._now
        try:
            if now.recording and self._watch.backward() is not None:
                now_ns = time.monotonic_ns()
                self._watch.noted.append((Kind.GRADIENT_READY, self._name, now.step, now_ns, now_ns))
        except Exception as failure:
            report_fault(failure)


def count_outputs(root: nn.Module) -> Callable[[], int]:
    """Sum the output bytes of the innermost modules from now on; the returned function stops and returns the sum."""
    total = 0

    def add(_module: nn.Module, _inputs: Any, output: Any) -> None:
        nonlocal total
        total += sum(tensor.numel() * tensor.element_size() for tensor in tensors_of(output))

    handles = [
        module.register_forward_hook(JobHook(add))
        for module in root.modules()
        if not any(True for _ in module.children())
    ]

    def stop() -> int:
        for handle in handles:
            handle.remove()
        return total

    return stop


def tensors_of(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in a module's inputs or outputs."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for part in value:
            yield from tensors_of(part)
    elif isinstance(value, dict):
        for part in value.values():
            yield from tensors_of(part)


def _holds(value: Any, tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` is in ``value``."""
    if value is tensor:
        return True
    if isinstance(value, (tuple, list, dict)):
        for part in value.values() if isinstance(value, dict) else value:
            if part is tensor or (part.__class__ is not torch.Tensor and _holds(part, tensor)):
                return True
    return False
