"""Slow workers: by a CPU quota where that is permitted, by stopping them again and again elsewhere."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Mapping
from functools import partial

from headway.errors import LabError
from headway.lab import cgroups, processes
from headway.lab.spec import LabSpec

DUTY_PERIOD_S = 0.04


def choose(spec: LabSpec, lab_id: str) -> tuple[cgroups.Quotas | None, str]:
    """The quotas that are to slow ``spec``'s workers, not yet made; or None, and why they cannot be had.

    Raises LabError where the spec insists on quotas and they are not permitted.
    """
    if spec.slow_by == "signals" or (spec.slow_by == "auto" and not spec.slow_shares):
        return None, ""
    try:
        if any(share < cgroups.LEAST_SHARE for share in spec.slow_shares):
            raise cgroups.NotPermittedError(f"the kernel permits no share below {cgroups.LEAST_SHARE:g}")
        quotas = cgroups.Quotas.within(cgroups.find_parent(), lab_id)
        return (quotas if spec.slow_shares else None), ""
    except cgroups.NotPermittedError as refusal:
        return None, instead(spec, refusal)


def instead(spec: LabSpec, refusal: cgroups.NotPermittedError) -> str:
    """Why signals stand in for quotas. Raises LabError where the spec insists on quotas."""
    if spec.slow_by == "quota":
        raise LabError(
            "slowing workers by CPU quota is not permitted here",
            got=refusal,
            fix="Choose signals or auto, or permit the creation of control groups.",
        )
    return str(refusal)


def announcement(quotas: cgroups.Quotas | None, why_not: str) -> str:
    """One line that says how workers are slowed."""
    if quotas:
        return f"slow workers get a CPU quota (cgroup v{quotas.version})"
    because = f" (no CPU quota: {why_not})" if why_not else ""
    return f"slow workers are stopped for part of every {DUTY_PERIOD_S * 1e3:g} ms{because}"


class DutyCycle:
    """Stops ranks for part of every period.

    ``pid_of`` are the ranks that live, and ``after`` calls a function once, after a time in seconds.
    """

    def __init__(self, pid_of: Mapping[int, int], after: Callable[[float, Callable[[], None]], None]) -> None:
        self._pid_of, self._after = pid_of, after
        self._duty_of: dict[int, tuple[float, float]] = {}

    def apply(self, rank: int, share: float) -> None:
        """Let ``rank`` and its children run ``share`` of the time from now on; 1 is all of it."""
        if rank in self._pid_of:
            self._duty_of[rank] = duty = (share, time.monotonic())
            processes.signal_group(self._pid_of[rank], signal.SIGCONT)
            self._turn(rank, duty)

    def describe(self, share: float) -> str:
        """What a rank with ``share`` does."""
        return f"runs {share:.0%} of the time"

    def _turn(self, rank: int, duty: tuple[float, float]) -> None:
        """Stop and continue ``rank`` so that it runs its share of every period, until its duty changes."""
        share, began = duty
        if share >= 1 or self._duty_of[rank] is not duty or rank not in self._pid_of:
            return
        phase_s = (time.monotonic() - began) % DUTY_PERIOD_S
        runs = phase_s < share * DUTY_PERIOD_S
        processes.signal_group(self._pid_of[rank], signal.SIGCONT if runs else signal.SIGSTOP)
        next_s = (share * DUTY_PERIOD_S if runs else DUTY_PERIOD_S) - phase_s
        self._after(max(next_s, 0.0005), partial(self._turn, rank, duty))
