"""Times the layers of a torch module on the local device."""

from __future__ import annotations

import math
import statistics
import time

import torch

from headway.graph.step_layout import LayerTimes
from headway.prediction.function import Built

WARM, TIMED = 2, 5


def timed_layers(built: Built) -> tuple[tuple[LayerTimes, ...], float]:
    """Median layer times over a few steps, in the order of forward, and their relative error (two standard errors).

    A layer's forward lasts until the next layer begins; its backward lasts until its last gradient is ready. On an
    accelerator, each layer is synchronized, which adds a little time but hides none.
    """
    watch = _Watch(built)
    try:
        steps = [watch.step() for _ in range(WARM + TIMED)][WARM:]
    finally:
        watch.close()
    order = list(watch.used)
    layers = []
    for name in order:
        forward_ns = statistics.median(step.forward_ns[name] for step in steps)
        backward_ns = statistics.median(step.backward_ns.get(name, 0) for step in steps)
        layers.append(LayerTimes(name, watch.parameters[name], round(forward_ns), round(backward_ns)))
    whole_ns = [sum(step.forward_ns.values()) + sum(step.backward_ns.values()) for step in steps]
    error = 2 * statistics.stdev(whole_ns) / math.sqrt(TIMED) / max(1.0, statistics.fmean(whole_ns))
    return tuple(layers), error


class _Step:
    def __init__(self) -> None:
        self.forward_ns: dict[str, int] = {}
        self.backward_ns: dict[str, int] = {}


class _Watch:
    def __init__(self, built: Built) -> None:
        self._built = built
        self._synchronise = torch.accelerator.synchronize if torch.accelerator.is_available() else _nothing
        self.parameters = built.layers
        self.used: dict[str, int] = {}  # layer -> time of its first use in this step
        self._ready: list[tuple[str, int]] = []
        self._handles: list[torch.utils.hooks.RemovableHandle] = []
        named = dict(built.module.named_parameters())
        owner: dict[str, str] = {}
        for name, parameters in self.parameters.items():
            module = built.module.get_submodule(name)
            self._handles.append(
                module.register_forward_pre_hook(lambda _module, _args, name=name: self._use(name))
            )
            for parameter in parameters:
                owner.setdefault(parameter, name)
        for parameter, name in owner.items():
            self._handles.append(
                named[parameter].register_post_accumulate_grad_hook(
                    lambda _grad, name=name: self._readied(name)
                )
            )

    def step(self) -> _Step:
        """One forward and backward."""
        self.used.clear()
        self._ready.clear()
        self._built.module.zero_grad(set_to_none=True)
        loss = self._built.forward()
        turned_ns = self._now_ns()
        loss.backward()
        step = _Step()
        moments = [*self.used.values(), turned_ns]
        for (name, begun_ns), until_ns in zip(self.used.items(), moments[1:], strict=True):
            step.forward_ns[name] = until_ns - begun_ns
        before_ns = turned_ns
        for name, ready_ns in self._ready:
            step.backward_ns[name] = step.backward_ns.get(name, 0) + ready_ns - before_ns
            before_ns = ready_ns
        return step

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _use(self, name: str) -> None:
        if name not in self.used:
            self.used[name] = self._now_ns()

    def _readied(self, name: str) -> None:
        self._ready.append((name, self._now_ns()))

    def _now_ns(self) -> int:
        self._synchronise()
        return time.perf_counter_ns()


def _nothing() -> None:
    pass


def bytes_per_s_of(device: torch.device) -> float:
    """The memory bandwidth of ``device`` in bytes per second, which bounds updates."""
    source, target = torch.ones(16_000_000, device=device), torch.empty(16_000_000, device=device)
    synchronise = torch.accelerator.synchronize if device.type != "cpu" else _nothing
    times_s = []
    for _ in range(WARM + TIMED):
        synchronise()
        begun = time.perf_counter()
        torch.mul(source, 0.5, out=target)
        synchronise()
        times_s.append(time.perf_counter() - begun)
    return 2 * source.numel() * source.element_size() / statistics.median(times_s[WARM:])
