"""The tools that plans can be printed for, by the name that the command line knows them by."""

from __future__ import annotations

from collections.abc import Callable

from headway.interop.settings import ddp, deepspeed, fsdp2, megatron, nccl
from headway.interop.settings.asked import Asked
from headway.interop.settings.settings import Settings

TOOLS: dict[str, Callable[[Asked], Settings]] = {
    "ddp": ddp.settings,
    "fsdp2": fsdp2.settings,
    "deepspeed": deepspeed.settings,
    "megatron": megatron.settings,
    "nccl": nccl.nccl,
    "rccl": nccl.rccl,
}
"""Each raises PlanError for a plan that its tool has nothing for."""

OF_COLLECTIVES = ("nccl", "rccl")
"""Those that know the options of collectives."""
