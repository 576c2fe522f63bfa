"""Modelled layer times: a roofline of a device, for want of a recording on one.

    forward = flops / rate + moved bytes / bandwidth + kernels * floor        backward = 2 * forward

Compute and memory are added, not overlapped: frameworks run these layers one kernel after the other, and
elementwise kernels (normalisation, activations) do nothing but move bytes. Backward is twice forward because it makes
two products of a layer's size, one for its input and one for its weights, where forward makes one.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType

from headway.models.table import LayerTable, Work


@dataclass(frozen=True, slots=True)
class Device:
    """What a device reaches in practice: FLOP/s, bytes/s, and the least time of a kernel."""

    name: str
    flops_per_s: float
    bytes_per_s: float
    kernel_s: float
    backward_factor: float = 2.0

    def forward_s(self, work: Work) -> float:
        """The modelled seconds of a forward that does ``work``."""
        return (
            work.flops / self.flops_per_s + work.moved_bytes / self.bytes_per_s + work.kernels * self.kernel_s
        )


# 13.45 TFLOP/s of fp32 and 616 GB/s on paper, of which large GEMMs and convolutions reach about 0.8, streaming
# kernels about 0.85. 5 us is what a launched kernel costs at least. Published for one such card in fp32 (Lambda,
# TensorFlow 1.12, lambdalabs.com/blog/2080-ti-deep-learning-benchmarks): 294 images/s of ResNet-50, 79 of
# Inception-v4; these constants give values within a quarter of both, one below and one above.
FLOPS_SHARE, BYTES_SHARE, KERNEL_S = 0.8, 0.85, 5e-6
MODELLED_ERROR = 0.25


def modelled(name: str, flops_per_s: float, bytes_per_s: float) -> Device:
    """A device that reaches such shares of what it has on paper."""
    return Device(f"{name} (modelled)", FLOPS_SHARE * flops_per_s, BYTES_SHARE * bytes_per_s, KERNEL_S)


RTX_2080_TI = modelled("RTX 2080 Ti", 13.45e12, 616e9)
DEVICES = MappingProxyType(
    {
        "rtx-2080-ti": RTX_2080_TI,
        "v100": modelled("V100 SXM2", 15.7e12, 900e9),
        "a100": modelled("A100 SXM 40 GB", 19.5e12, 1555e9),
        "h100": modelled("H100 SXM", 66.9e12, 3350e9),
    }
)
"""Devices by the name the command line uses.

Rates are those of NVIDIA's data sheets (single precision without tensor cores; memory). The shares of them that are
reached are those of the RTX 2080 Ti, where they were held against published training rates; for the others nobody has.
"""


@dataclass(frozen=True, slots=True)
class LayerTime:
    """Modelled seconds of one layer, and its share of the model's step."""

    forward_s: float
    backward_s: float
    share: float


def layer_times(table: LayerTable, device: Device = RTX_2080_TI) -> tuple[LayerTime, ...]:
    """The modelled times of ``table``'s layers, in its order."""
    forwards = [device.forward_s(layer.work) for layer in table.layers]
    total = sum(forwards)
    return tuple(LayerTime(t, device.backward_factor * t, t / total) for t in forwards)


def step_s(table: LayerTable, device: Device = RTX_2080_TI) -> tuple[float, float]:
    """The modelled seconds of a whole forward and a whole backward, without communication."""
    times = layer_times(table, device)
    return sum(t.forward_s for t in times), sum(t.backward_s for t in times)
