"""Paced models: modules with a table's real parameters and gradients, whose layers take time and no CPU.

An accelerator computes without the CPU; the cores of one machine that run eight workers do not. A paced model
imitates the accelerator: each layer holds the step for its (modelled, dilated) time asleep, then hands out gradients
that are real tensors of the real, scaled sizes. Nothing of the model's arithmetic is done; losses mean nothing.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from headway.models.roofline import RTX_2080_TI, Device, layer_times
from headway.models.table import Layer, LayerTable

_DECAY = 0.1
_BLOCKED_S = 0.0005


class PacedDevice:
    """Imitates the clock of an accelerator whose queue is fed by a host that runs ahead.

    A kernel begins when the kernel before has ended, however long the host took to launch it, provided that the host
    did not stand still: on a real machine it would have been ahead. So the CPU time that this thread used since the
    last layer, and its lateness at waking from that layer, do not delay the next one. Where the thread stood still for
    longer, as when it waited for communication, the layer begins after the wait. Other delays of
    the host (waiting for a core or for the interpreter's lock) count as standing still.
    """

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Begin again: nothing is running, and what this thread did before is ignored."""
        self._free_at = self._ended_at = time.perf_counter()
        self._cpu_at = time.thread_time()

    def hold(self, seconds: float) -> None:
        """Return when a kernel of ``seconds``, launched now, would have ended; at once if that has passed."""
        now = time.perf_counter()
        cpu_s = time.thread_time() - self._cpu_at
        late_s = max(0.0, self._ended_at - self._free_at)
        stood_still = now - self._ended_at - cpu_s > _BLOCKED_S
        begin = max(self._free_at, now - cpu_s - (0.0 if stood_still else late_s))
        self._free_at = begin + seconds
        while (left := self._free_at - time.perf_counter()) > 0:
            time.sleep(left)
        self._ended_at, self._cpu_at = time.perf_counter(), time.thread_time()

    def mark(self) -> None:
        """Tell apart what the host did before and after this moment: waits before it, launches after it."""
        self.hold(0.0)


@dataclass(frozen=True, slots=True)
class Pacing:
    """How a table is imitated.

    ``scale`` multiplies the number of elements of every parameter (at least one stays; their count is never reduced),
    ``dilation`` every modelled time. ``rank`` and ``seed`` decide the gradients.
    """

    scale: float = 1.0
    dilation: float = 1.0
    rank: int = 0
    seed: int = 0

    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of a parameter: as it is at scale 1, else flat and smaller."""
        return shape if self.scale == 1 else (max(1, round(math.prod(shape) * self.scale)),)


class PacedLayer(nn.Module):
    """One layer of a table. Forward takes and returns a small activation."""

    def __init__(self, device: PacedDevice, forward_s: float, backward_s: float) -> None:
        super().__init__()
        self.device = device
        self.forward_s, self.backward_s = forward_s, backward_s
        self.names: tuple[str, ...] = ()
        self.noise: tuple[torch.Tensor, ...] = ()
        self.strength = 0.0

    def forward(self, activation: torch.Tensor) -> torch.Tensor:
        """Hold for the layer's time."""
        parameters = [getattr(self, name) for name in self.names]
        held: torch.Tensor = _Hold.apply(self, activation, *parameters)  # type: ignore[no-untyped-call]
        return held


class PacedModel(nn.Module):
    """A table's layers under their own names, run one after the other.

    The gradient of parameter p is 0.1 p + cos(step) n, where n is fixed noise of the layer and the rank: it depends on
    the value that forward used, so that a stale parameter shows in the result of training.
    """

    def __init__(self, table: LayerTable, pacing: Pacing, device: Device = RTX_2080_TI) -> None:
        super().__init__()
        self.clock = PacedDevice()
        self.steps = 0
        self._input = torch.zeros(1)
        generator = torch.Generator().manual_seed(pacing.seed)
        self._sequence: list[PacedLayer] = []
        owned: dict[str, nn.Parameter] = {}
        sizes = [math.prod(pacing.shape(p.shape)) for p in table.parameters.values()]
        noise = _Noise(max(sizes), pacing)
        for layer, times in zip(table.layers, layer_times(table, device), strict=True):
            paced = PacedLayer(
                self.clock, times.forward_s * pacing.dilation, times.backward_s * pacing.dilation
            )
            for parameter in layer.parameters:
                value = torch.randn(pacing.shape(parameter.shape), generator=generator)
                owned[layer.full_name(parameter)] = nn.Parameter(value)
            _fill(paced, layer, owned, noise)
            _place(self, layer.name, paced)
            self._sequence.append(paced)

    def forward(self, activation: torch.Tensor | None = None) -> torch.Tensor:
        """Run the layers in forward order. Returns a loss of one element, which means nothing."""
        self.steps += 1
        for layer in self._sequence:
            layer.strength = math.cos(self.steps)
        x = self._input if activation is None else activation
        for layer in self._sequence:
            x = layer(x)
        return x.sum()


class _Hold(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, layer: PacedLayer, activation: torch.Tensor, *parameters: torch.Tensor
    ) -> torch.Tensor:
        layer.device.hold(layer.forward_s)
        ctx.layer, ctx.strength = layer, layer.strength
        ctx.save_for_backward(*parameters)
        return activation.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        layer: PacedLayer = ctx.layer
        layer.device.hold(layer.backward_s)
        results: list[torch.Tensor | None] = []
        for value, noise, needed in zip(
            ctx.saved_tensors, layer.noise, ctx.needs_input_grad[2:], strict=True
        ):
            result = torch.mul(value, _DECAY).add_(noise, alpha=ctx.strength) if needed else None
            results.append(result)
        return (None, gradients[0] if ctx.needs_input_grad[1] else None, *results)


class _Noise:
    """Slices of one random vector of the rank, so that noise takes no more memory than twice a parameter."""

    def __init__(self, largest: int, pacing: Pacing) -> None:
        generator = torch.Generator().manual_seed(1_000_003 * (pacing.seed + 1) + pacing.rank)
        self._vector = torch.randn(2 * largest, generator=generator)
        self._largest = largest
        self._drawn = 0

    def like(self, value: torch.Tensor) -> torch.Tensor:
        start = self._drawn * 7919 % (self._largest + 1)
        self._drawn += 1
        return self._vector[start : start + value.numel()].view(value.shape)


def _fill(paced: PacedLayer, layer: Layer, owned: Mapping[str, nn.Parameter], noise: _Noise) -> None:
    """Register the layer's own parameters, and those it shares under the names they have elsewhere."""
    own = [(parameter.name, layer.full_name(parameter)) for parameter in layer.parameters]
    shared = [(name.rpartition(".")[2], name) for name in layer.tied]
    used = [*own, *shared]
    for name, full_name in used:
        paced.register_parameter(name, owned[full_name])
    paced.names = tuple(name for name, _ in used)
    paced.noise = tuple(noise.like(owned[full_name]) for _, full_name in used)


def _place(root: nn.Module, name: str, module: nn.Module) -> None:
    *path, last = name.split(".")
    for part in path:
        child = getattr(root, part, None)
        if child is None:
            child = nn.Module()
            root.add_module(part, child)
        root = child
    root.add_module(last, module)
