"""The clock of a tuner: where a device computes by itself, its time and not that of the host that runs ahead."""

from __future__ import annotations

import time

import torch


class Clock:
    """Tells the time at which all is computed that the host asked for. ``host`` says that this is so immediately."""

    def __init__(self, device: torch.device) -> None:
        self.host = device.type == "cpu"
        self._device = device

    def now_ns(self) -> int:
        """Nanoseconds; on a device this waits for what is computed, and not for what is communicated meanwhile.

        Collectives that run under the next forward would be waited for on the whole device, and hide nothing.
        """
        if not self.host:
            torch.cuda.current_stream(self._device).synchronize()
        return time.monotonic_ns()
