"""Idle devices: found in traces that time a device's kernels rather than its host."""

from __future__ import annotations

from headway.diagnosis.findings import Finding, of_each_step
from headway.diagnosis.timeline import RankTime
from headway.trace.events import Events, Idle, Kind

IDLE_STANDS_OUT = 0.10  # of the step
MOSTLY = 0.5  # of the idleness


def idle_finding(times: dict[int, RankTime], events: dict[int, Events], step_ms: float) -> Finding | None:
    """What idle devices cost, where their idleness is recorded."""
    idle_ns = synchronising_ns = count = steps = 0
    for rank, time in times.items():
        rows = events[rank].of_kind(Kind.IDLE)
        own = rows.name == Idle.SYNCHRONISING
        idle_ns += int(rows.duration_ns.sum())
        synchronising_ns += int(rows.duration_ns[own].sum())
        count += int(own.sum())
        steps += len(time.step_start_ns)
    if not idle_ns:
        return None
    cost_ms = idle_ns / steps / 1e6
    cost = of_each_step(cost_ms, step_ms)
    if synchronising_ns > MOSTLY * idle_ns:
        cause = "synchronisation"
        sentence = (
            f"The device is idle for {cost} because the program synchronises with it {count / steps:.3g} times "
            "a step and launches nothing meanwhile; remove what synchronises (.item(), .cpu(), printing losses, "
            "torch.cuda.synchronize)."
        )
    else:
        cause = "launch_bound"
        sentence = (
            f"The device is idle for {cost} because its host does not launch work fast enough; launch fewer kernels, "
            "with larger batches, fused operators, torch.compile or CUDA graphs, and look at what else the host does."
        )
    return Finding(cause, cost_ms, sentence, (), cost_ms >= IDLE_STANDS_OUT * step_ms)
