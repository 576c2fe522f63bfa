"""Models layer times with a roofline of a device, for use without a recording.

    forward = flops / rate + moved bytes / bandwidth + kernels * floor        backward = 2 * forward

Compute and memory times are added, not overlapped: frameworks run kernels one after the other, and elementwise kernels
(normalisation, activations) only move bytes. Backward takes twice as long as forward because it computes two products per
layer, for the input and for the weights, where forward computes one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from headway.errors import UserError
from headway.models.table import LayerTable, Work

SINGLE = "fp32"
PRECISIONS = (SINGLE, "tf32", "bf16", "fp16")
HALF = ("bf16", "fp16")


@dataclass(frozen=True, slots=True)
class Device:
    """The practical FLOP/s, bytes/s and minimum kernel time of a device in one precision.

    ``error`` is the relative error of the times of full models.
    """

    name: str
    flops_per_s: float
    bytes_per_s: float
    kernel_s: float
    backward_factor: float = 2.0
    error: float = 0.25

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

# On tensor cores these shares are nearest to published training rates of ResNet-50 and BERT in PyTorch on one V100 and
# one A100 (github.com/NVIDIA/DeepLearningExamples, github.com/lambdal/deeplearning-benchmark). All that large products
# have on paper is reached only because products and moved bytes are added here, while kernels overlap them. Rates on
# A10 and H100, which were not fitted, are within the same error. Frameworks that fuse more kernels train ResNet-50 up
# to twice as fast.
TENSOR_FLOPS_SHARE, TENSOR_BYTES_SHARE = 1.0, 0.7
TENSOR_ERROR, UNCHECKED_ERROR = 0.35, 0.5
CHECKED = ("V100 SXM2", "A10", "A100 SXM 40 GB", "A100 SXM 80 GB", "H100 SXM")


def modelled(name: str, flops_per_s: float, bytes_per_s: float) -> Device:
    """A device that reaches such shares of what it has on paper, in single precision without tensor cores."""
    return Device(
        f"{name} (modelled)",
        FLOPS_SHARE * flops_per_s,
        BYTES_SHARE * bytes_per_s,
        KERNEL_S,
        error=MODELLED_ERROR,
    )


@dataclass(frozen=True, slots=True)
class DataSheet:
    """What a device has on paper: dense FLOP/s by precision, and bytes/s of its memory."""

    name: str
    flops_per_s: Mapping[str, float]
    bytes_per_s: float

    def at(self, precision: str = SINGLE) -> Device:
        """What it reaches in ``precision``. Raises UserError for one that it does not have."""
        if precision not in self.flops_per_s:
            raise UserError(
                f"{self.name} does not support this precision", got=f"--precision {precision}",
                expected=f"--precision {' or '.join(self.flops_per_s)}",
            )  # fmt: skip
        flops_per_s = self.flops_per_s[precision]
        if precision == SINGLE:
            return modelled(self.name, flops_per_s, self.bytes_per_s)
        return Device(
            f"{self.name} (modelled)", TENSOR_FLOPS_SHARE * flops_per_s, TENSOR_BYTES_SHARE * self.bytes_per_s,
            KERNEL_S, error=TENSOR_ERROR if self.name in CHECKED else UNCHECKED_ERROR,
        )  # fmt: skip


def _sheet(name: str, gb_s: float, fp32: float, tf32: float, bf16: float, fp16: float) -> DataSheet:
    """A data sheet with rates in TFLOP/s; 0 marks an unsupported precision."""
    tflops = zip(PRECISIONS, (fp32, tf32, bf16, fp16), strict=True)
    rates = {precision: rate * 1e12 for precision, rate in tflops if rate}
    return DataSheet(name, MappingProxyType(rates), gb_s * 1e9)


DEVICES: Mapping[str, DataSheet] = MappingProxyType(
    {
        "rtx-2080-ti": _sheet("RTX 2080 Ti", 616, 13.45, 0, 0, 53.8),
        "v100": _sheet("V100 SXM2", 900, 15.7, 0, 0, 125),
        "a10": _sheet("A10", 600, 31.2, 62.5, 125, 125),
        "a100": _sheet("A100 SXM 40 GB", 1555, 19.5, 156, 312, 312),
        "a100-80gb": _sheet("A100 SXM 80 GB", 2039, 19.5, 156, 312, 312),
        "l40s": _sheet("L40S", 864, 91.6, 183, 362, 362),
        "h100": _sheet("H100 SXM", 3350, 66.9, 494.7, 989.4, 989.4),
        "h200": _sheet("H200 SXM", 4800, 66.9, 494.7, 989.4, 989.4),
        "b200": _sheet("B200", 8000, 75, 1125, 2250, 2250),
        "mi300x": _sheet("MI300X", 5300, 163.4, 653.7, 1307.4, 1307.4),
    }
)
"""Data sheets by the name the command line uses: NVIDIA's, and AMD's. Rates of tensor cores are without sparsity."""
RTX_2080_TI = DEVICES["rtx-2080-ti"].at()


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
    """The modelled seconds of a full forward and a full backward, without communication."""
    times = layer_times(table, device)
    return sum(t.forward_s for t in times), sum(t.backward_s for t in times)
