"""Devices that layer times are modelled for: what their makers say they reach, and the share of it that is reached.

Rates are those of NVIDIA's data sheets (single precision without tensor cores; memory). The shares are those of the
RTX 2080 Ti, where they were held against published training rates; for the others nobody has.
"""

from __future__ import annotations

from types import MappingProxyType

from headway.models.roofline import RTX_2080_TI, Device

FLOPS_SHARE, BYTES_SHARE = 0.8, 0.85
KERNEL_S = 5e-6


def _device(name: str, teraflops: float, gigabytes_per_s: float) -> Device:
    return Device(
        f"{name} (modelled)", FLOPS_SHARE * teraflops * 1e12, BYTES_SHARE * gigabytes_per_s * 1e9, KERNEL_S
    )


DEVICES = MappingProxyType(
    {
        "rtx-2080-ti": RTX_2080_TI,
        "v100": _device("V100 SXM2", 15.7, 900),
        "a100": _device("A100 SXM 40 GB", 19.5, 1555),
        "h100": _device("H100 SXM", 66.9, 3350),
    }
)
"""By the name the command line uses."""
