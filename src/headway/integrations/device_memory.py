"""How much memory there is for a process: of its device, or of its host as far as its control group lets it."""

from __future__ import annotations

import os
from pathlib import Path

import torch

_GROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")


def memory_bytes(device: torch.device) -> int | None:
    """All memory of ``device``; None where nothing says."""
    if device.type == "cuda":
        total_bytes: int = torch.cuda.get_device_properties(device).total_memory
        return total_bytes
    try:
        total_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):
        return None
    try:
        limit = _GROUP_LIMIT.read_text().strip()
    except OSError:
        limit = ""
    return min(total_bytes, int(limit)) if limit.isdigit() else total_bytes
