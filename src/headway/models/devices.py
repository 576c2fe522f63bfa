"""Devices that layer times are modelled for: what their makers say they reach, and the share of it that is reached.

Rates are those of NVIDIA's data sheets (single precision without tensor cores; memory). The shares are those of the
RTX 2080 Ti, where they were held against published training rates; for the others nobody has.
"""

from __future__ import annotations

from types import MappingProxyType

from headway.models.roofline import RTX_2080_TI, modelled

DEVICES = MappingProxyType(
    {
        "rtx-2080-ti": RTX_2080_TI,
        "v100": modelled("V100 SXM2", 15.7e12, 900e9),
        "a100": modelled("A100 SXM 40 GB", 19.5e12, 1555e9),
        "h100": modelled("H100 SXM", 66.9e12, 3350e9),
    }
)
"""By the name the command line uses."""
