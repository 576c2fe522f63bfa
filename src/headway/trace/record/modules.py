"""What the main thread does in a step: passes, modules, gradients as they become ready.

Modules are watched by hooks that leave the autograd graph as it is: a hook before the node that made a
module's output marks the begin of that module's backward. (Full backward hooks would insert nodes and views,
and break in-place activations.)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from headway import torch_private
from headway.trace.events import Event, Kind, Stream

LOSS = "(loss)"


class JobHook:
    """A hook on a module or parameter of the job. Copies and pickles of it get one that does nothing."""

    def __init__(self, observe: Callable[..., None] | None) -> None:
        self._observe = observe

    def __call__(self, *arguments: Any) -> None:
        """Observe, and change nothing."""
        if self._observe is not None:
            self._observe(*arguments)

    def __deepcopy__(self, _memo: Any) -> JobHook:
        """A copied model is not the one that is recorded."""
        return JobHook(None)

    def __reduce__(self) -> Any:
        """As for a copy."""
        return JobHook, (None,)


class ModuleWatch:
    """Observes the passes of one wrapped model while attached.

    Rows go to ``rows`` with the current step's number, while ``active()`` says so. Times are the own monotonic
    clock's. ``phase`` says what the main thread is in: "" (between passes), "enter" (a forward, before its first
    module), "forward" or "backward".
    """

    def __init__(self, step: Callable[[], int], active: Callable[[], bool], rows: list[Event]) -> None:
        self.phase = ""
        self.forward_order: list[str] = []
        self.activation_bytes = 0
        self.compute_ends_ns: dict[int, int] = {}  # end of a backward pass -> end of its computation
        self._step = step
        self._active = active
        self._rows = rows
        self._handles: list[Any] = []
        self._module_starts_ns: dict[str, list[int]] = {}
        self._pass_start_ns = 0
        self._marks: list[tuple[int, str]] = []
        self._backward_depth = 0
        self._compute_end_ns = 0
        self._original_backward: Callable[..., Any] | None = None
        self._seen_modules: set[str] = set()
        self._stop_counting: Callable[[], int] | None = None

    def count_activations(self, root: nn.Module) -> None:
        """Sum what the innermost modules of ``root`` put out in the next forward, into ``activation_bytes``."""
        self._stop_counting = _count_outputs(root)

    def attach(self, model: nn.Module, root: nn.Module) -> None:
        """Watch ``model`` (the wrapper that is called) and the modules and parameters of ``root`` inside it."""
        self._handles.append(model.register_forward_pre_hook(JobHook(self._enter_pass), prepend=True))
        self._handles.append(model.register_forward_hook(JobHook(self._leave_pass)))
        for name, module in root.named_modules():
            owns = any(True for _ in module.parameters(recurse=False))
            if owns or not any(True for _ in module.children()):
                enter, leave = partial(self._enter_module, name, owns), partial(self._leave_module, name)
                self._handles.append(module.register_forward_pre_hook(JobHook(enter)))
                self._handles.append(module.register_forward_hook(JobHook(leave)))
        for name, parameter in root.named_parameters():
            if parameter.requires_grad:
                hook = JobHook(partial(self._gradient_ready, name))
                self._handles.append(parameter.register_post_accumulate_grad_hook(hook))
        self._watch_backward()

    def detach(self) -> None:
        """Remove every hook."""
        self._counted()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        if self._original_backward is not None:
            torch.autograd.backward = self._original_backward
            self._original_backward = None

    def _put(self, kind: str, name: str, start_ns: int, end_ns: int) -> None:
        self._rows.append(Event(kind, name, Stream.COMPUTE, self._step(), start_ns, end_ns - start_ns))

    # Forward

    def _enter_pass(self, _module: nn.Module, _inputs: Any) -> None:
        self.phase = "enter"
        self._pass_start_ns = time.monotonic_ns()

    def _counted(self) -> None:
        if self._stop_counting is not None:
            self.activation_bytes = self._stop_counting()
            self._stop_counting = None

    def _leave_pass(self, _module: nn.Module, _inputs: Any, _output: Any) -> None:
        self.phase = ""
        self._counted()
        if self._active():
            self._put(Kind.FORWARD_PASS, "", self._pass_start_ns, time.monotonic_ns())

    def _enter_module(self, name: str, owns: bool, _module: nn.Module, _inputs: Any) -> None:
        if self.phase == "enter":
            self.phase = "forward"
        if owns and name not in self._seen_modules:
            self._seen_modules.add(name)
            self.forward_order.append(name)
        if self._active():
            self._module_starts_ns.setdefault(name, []).append(time.monotonic_ns())

    def _leave_module(self, name: str, _module: nn.Module, inputs: Any, output: Any) -> None:
        if not self._active():
            return
        end_ns = time.monotonic_ns()
        starts = self._module_starts_ns.get(name)
        if starts:
            self._put(Kind.FORWARD, name, starts.pop(), end_ns)
        if not torch.is_grad_enabled():
            return
        entered = {id(tensor) for tensor in _tensors(inputs)}
        for tensor in _tensors(output):
            if tensor.grad_fn is not None and id(tensor) not in entered:
                tensor.grad_fn.register_prehook(partial(self._mark_backward, name))

    # Backward

    def _watch_backward(self) -> None:
        original = self._original_backward = torch.autograd.backward

        def backward(*args: Any, **kwargs: Any) -> None:
            if self._backward_depth or not self._active():
                original(*args, **kwargs)
                return
            self._backward_depth += 1
            before, self.phase = self.phase, "backward"
            self._marks = [(time.monotonic_ns(), LOSS)]
            self._compute_end_ns = 0
            try:
                original(*args, **kwargs)
            finally:
                self._backward_depth -= 1
                self.phase = before
            self._leave_backward(time.monotonic_ns())

        torch.autograd.backward = backward

    def _mark_backward(self, name: str, _gradients: Any) -> None:
        if self._backward_depth:
            self._expect_end_of_graph()
            self._marks.append((time.monotonic_ns(), name))

    def _gradient_ready(self, name: str, _parameter: torch.Tensor) -> None:
        if self._backward_depth and self._active():
            self._expect_end_of_graph()
            now_ns = time.monotonic_ns()
            self._put(Kind.GRADIENT_READY, name, now_ns, now_ns)

    def _expect_end_of_graph(self) -> None:
        """Ask, once a backward, to be told when the graph is done: DDP waits for its buckets after that."""
        if self._compute_end_ns == 0:
            self._compute_end_ns = -1
            torch_private.queue_backward_callback(self._graph_done)

    def _graph_done(self) -> None:
        self._compute_end_ns = time.monotonic_ns()

    def _leave_backward(self, end_ns: int) -> None:
        compute_end_ns = self._compute_end_ns if self._compute_end_ns > 0 else end_ns
        start_ns = self._marks[0][0]
        self._put(Kind.BACKWARD_PASS, "", start_ns, end_ns)
        self.compute_ends_ns[end_ns] = compute_end_ns
        ends = [mark_ns for mark_ns, _ in self._marks[1:]] + [compute_end_ns]
        for (mark_ns, name), next_ns in zip(self._marks, ends, strict=True):
            if next_ns > mark_ns:
                self._put(Kind.BACKWARD, name, mark_ns, next_ns)


def _count_outputs(root: nn.Module) -> Callable[[], int]:
    """Sum the bytes that the innermost modules put out, until the result is called."""
    total = 0

    def add(_module: nn.Module, _inputs: Any, output: Any) -> None:
        nonlocal total
        total += sum(tensor.numel() * tensor.element_size() for tensor in _tensors(output))

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


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for part in value:
            yield from _tensors(part)
    elif isinstance(value, dict):
        for part in value.values():
            yield from _tensors(part)
