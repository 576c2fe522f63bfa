"""Measures what one forward, backward and update hold in memory, in the step before the recorded ones."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from headway import torch_private
from headway.memory.pass_watch import PassMemoryWatch
from headway.model import PassMemory
from headway.recording.modules import JobHook
from headway.recording.watch import Watch


class MemoryWatch(Watch):
    """Watches one forward with its backward and update, under stock DistributedDataParallel.

    Watching slows that step, which is not recorded. Nothing is watched if the script uses dispatch modes or
    torch.compile.
    """

    def __init__(self) -> None:
        self.found: PassMemory | None = None
        self._watch: PassMemoryWatch | None = None
        self._given_up: PassMemoryWatch | None = None
        self._handles: list[Any] = []

    def arm(self, model: nn.Module, root: nn.Module) -> None:
        """Start with the next forward of ``model``, whose parameters live in ``root``."""
        if type(model) is not DistributedDataParallel or self._is_compiled(root):
            return
        self._apart = not model.gradient_as_bucket_view
        self._trained = [(name, p) for name, p in root.named_parameters() if p.requires_grad]
        self._hook(model.register_forward_pre_hook, self._begin, prepend=True)
        self._hook(model.register_forward_hook, self._forward_done)
        for name, module in root.named_modules():
            if name:
                self._hook(module.register_forward_pre_hook, partial(self._module_begins, name), prepend=True)
                self._hook(module.register_forward_hook, partial(self._module_ends, name))
        for name, parameter in self._trained:
            self._hook(parameter.register_post_accumulate_grad_hook, partial(self._gradient_done, name))

    @staticmethod
    def _is_compiled(root: nn.Module) -> bool:
        """Whether anything is compiled: a dispatch mode would disable compiled code for good."""
        return torch_private.has_compiled() or any(map(torch_private.is_compiled, root.modules()))

    def update_begins(self) -> None:
        """The optimizer is about to update."""
        if self._watch is not None:
            self._watch.update_begins()

    def step_ends(self, step: int, now_ns: int, *, recorded: bool) -> None:
        """The update is done."""
        self.end()

    def detach(self) -> None:
        """Stop watching."""
        self.end()

    def end(self) -> None:
        """Stop watching: the update is done, or the recorder detaches."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        if self._watch is not None:
            self.found = self._watch.end()
            self._watch = None
        if self._given_up is not None:
            self._given_up.stop()  # again: inside a backward it had no effect, as autograd restores dispatch modes

    def _hook(self, register: Callable[..., Any], observe: Callable[..., None], **how: Any) -> None:
        self._handles.append(register(JobHook(observe, self._give_up), **how))

    def _give_up(self, _failure: Exception) -> None:
        """Watching failed: give no result, and let the recording go on."""
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.end()
            self._given_up = watch
        self.end()

    def _begin(self, model: nn.Module, inputs: Any) -> None:
        ready = torch.is_grad_enabled() and model.training
        if self._watch is not None:
            if ready:  # a second forward before the update
                self.update_begins()
                self.end()
                if self.found is not None:
                    self.found = self.found.model_copy(update={"gradients_accumulate": True})
        elif ready and not torch_private.dispatch_modes() and not self._is_compiled(model):
            kept = self._apart and any(p.grad is not None for _, p in self._trained)
            self._watch = PassMemoryWatch(apart=self._apart, kept=kept)
            self._watch.begin(inputs)

    def _forward_done(self, _model: nn.Module, _inputs: Any, _output: Any) -> None:
        if self._watch is not None:
            self._watch.forward_done()

    def _module_begins(self, name: str, _module: nn.Module, inputs: Any) -> None:
        if self._watch is not None:
            self._watch.module_begins(name, inputs)

    def _module_ends(self, name: str, _module: nn.Module, _inputs: Any, output: Any) -> None:
        if self._watch is not None:
            self._watch.module_ends(name, output)

    def _gradient_done(self, name: str, parameter: torch.Tensor) -> None:
        if self._watch is not None:
            self._watch.gradient_done(name, parameter)
