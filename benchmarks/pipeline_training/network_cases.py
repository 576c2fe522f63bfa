"""Cases of benchmarks/pipeline.py: models on networks that are quiet, slow, or shared with other tenants."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any, Literal

PHASE_S = 20.0
BURST_S = (0.5, 1.5)  # each burst, and each pause, lasts between these, evenly distributed
FIRST_BURST_S = 20.0  # until then links are measured alone
LONGEST_S = 1400.0  # of a case
MIB = 2**20


@dataclass(frozen=True)
class Model:
    """Stages with messages of ``boundary_bytes``. Paced ones have forwards of ``forwards_ms``, backwards of twice."""

    forwards_ms: tuple[float, ...]
    boundary_bytes: tuple[int, ...]
    words: str
    width: int = 0  # of transformer layers that compute; 0 for stages that sleep

    @property
    def is_paced(self) -> bool:
        """Whether stages sleep."""
        return not self.width

    def input_shape(self, stage: int) -> tuple[int, ...]:
        """What a stage is given of one micro-batch of one sample, without the dimension of samples."""
        floats = self.boundary_bytes[max(0, stage - 1)] // 4
        return (floats,) if self.is_paced else (floats // self.width, self.width)


GPT = Model((40.0,) * 4, (MIB,) * 3, "GPT-medium-like: 256 tokens of 1024 floats")
GPT_8 = Model((20.0,) * 8, (MIB // 2,) * 7, "GPT-medium-like: 128 tokens of 1024 floats")
UNET = Model((44.0, 40.0, 40.0, 36.0), (2 * MIB, MIB, MIB // 2), "U-Net-like: halved at each stage")
COMPUTING = Model((), (MIB // 2,), "a transformer layer a stage: 256 tokens of 512 floats", width=512)


@dataclass(frozen=True)
class NetworkCase:
    """``tenants`` are the links, numbered by the host before them, on which others send ``tenant_mbit`` each way.

    A host between two of them carries twice that.
    """

    name: str
    model: Model = GPT
    micro_batches: int = 8
    rate_mbit: float = 500.0
    slow_up_mbit: dict[int, float] = field(default_factory=dict)
    tenants: tuple[int, ...] = ()
    tenant_mbit: float = 400.0
    pattern: Literal["bursts", "phases"] = "bursts"
    seed: int = 1

    @property
    def stages(self) -> int:
        """The number of stages, each on a host of its own."""
        return len(self.model.boundary_bytes) + 1

    @property
    def is_phases(self) -> bool:
        """Whether the network alternates in phases, of which every method is given whole ones."""
        return bool(self.tenants) and self.pattern == "phases"

    def busy_s(self, link: int) -> list[tuple[float, float]]:
        """When others send over a link, from and to, counted from the start of the lab."""
        if self.pattern == "phases":
            return [(at, at + PHASE_S) for at in _range(PHASE_S, LONGEST_S, 2 * PHASE_S)]
        draw = random.Random(f"{self.seed} {link}")
        found, at = [], FIRST_BURST_S
        while at < LONGEST_S:
            begins = at + draw.uniform(*BURST_S)
            at = begins + draw.uniform(*BURST_S)
            found.append((round(begins, 3), round(at, 3)))
        return found

    @property
    def lab(self) -> dict[str, Any]:
        """The lab's spec."""
        hosts = [
            {
                "name": f"host{n}",
                "rate": f"{self.rate_mbit:g}mbit",
                **({"up": f"{self.slow_up_mbit[n]:g}mbit"} if n in self.slow_up_mbit else {}),
            }
            for n in range(self.stages)
        ]
        timeline = [
            {
                "at": f"{begin_s:g}s",
                "traffic": {
                    "from": f"host{source}", "to": f"host{target}",
                    "rate": f"{self.tenant_mbit:g}mbit", "for": f"{end_s - begin_s:g}s",
                },
            }
            for link in self.tenants
            for begin_s, end_s in self.busy_s(link)
            for source, target in ((link, link + 1), (link + 1, link))
        ]  # fmt: skip
        return {"hosts": hosts, "timeline": sorted(timeline, key=lambda event: float(event["at"][:-1]))}


def _range(first: float, last: float, step: float) -> list[float]:
    return [first + number * step for number in range(int((last - first) / step))]


CASES = {
    case.name: case
    for case in (
        NetworkCase("quiet-gpt"),
        NetworkCase("quiet-unet", UNET),
        NetworkCase("quiet-gpt-s8-m32", GPT_8, 32),
        NetworkCase("steady-gpt", rate_mbit=150.0),
        NetworkCase("steady-unet", UNET, rate_mbit=200.0),
        NetworkCase("bursts-one-gpt", tenants=(1,)),
        NetworkCase("bursts-all-gpt", tenants=(0, 1, 2), tenant_mbit=200.0),
        NetworkCase(
            "bursts-all-gpt-s8-m32", GPT_8, micro_batches=32, tenants=tuple(range(7)), tenant_mbit=200.0
        ),
        NetworkCase("asymmetric-gpt", slow_up_mbit={2: 150.0}),
        NetworkCase("quiet-computing", COMPUTING),
        NetworkCase("steady-computing", COMPUTING, rate_mbit=100.0),
        NetworkCase("phases-gpt", tenants=(0, 1, 2), tenant_mbit=200.0, pattern="phases"),
    )
}
QUICK = ("steady-gpt",)
