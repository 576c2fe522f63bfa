"""From the rank files of a recording to a trace, or to one line that says why there is none."""

from __future__ import annotations

import json
import time
from pathlib import Path

from headway import files
from headway.errors import LaunchError, TraceError, UserError
from headway.trace.clocks import aligned, fit_clocks, meetings_of
from headway.trace.events import Events
from headway.trace.folder import assemble, load_trace, write_trace
from headway.trace.format import ClockFit
from headway.trace.record.clock import UNKNOWN_NS

WAIT_FOR_RANKS_S = 60.0


def finish_recording(
    staging: Path, out: Path, world_size: int | None, *, wait_s: float = WAIT_FOR_RANKS_S
) -> None:
    """Assemble ``staging`` into a trace at ``out``.

    ``world_size`` of None takes it from the files. Waits up to ``wait_s`` for ranks that run elsewhere.
    Raises LaunchError where the job gave nothing to record; ``staging`` is removed in every case.
    """
    try:
        deadline = time.monotonic() + wait_s
        while True:
            if not staging.is_dir():
                raise TraceError("the recording vanished while it was made", got=staging, fix="Record again.")
            recorded, idle = _present(staging)
            expected = world_size or _stated_world_size(staging)
            if expected is not None and len(recorded) + len(idle) >= expected:
                break
            if expected is None or time.monotonic() > deadline:
                break
            time.sleep(0.1)
        if not recorded:
            raise _why_nothing(idle)
        manifest = assemble(staging)
        if any(info.clock.uncertainty_ns >= UNKNOWN_NS for info in manifest.ranks):
            _compare_clocks(staging)
        staging.replace(out)
    except OSError as failure:
        raise TraceError(f"{out} cannot be written", got=failure.strerror) from None
    finally:
        files.remove_folder(staging)


def _compare_clocks(folder: Path) -> None:
    """Tell the clocks that could not be compared by round trips from what their ranks did together.

    Ranks of one host read one clock: what is known of it on one of them is known on all.
    """
    trace = load_trace(folder)
    known: dict[str, ClockFit] = {}
    unknown = []
    for info in sorted(trace.manifest.ranks, key=lambda info: info.clock.uncertainty_ns):
        if info.clock.uncertainty_ns < UNKNOWN_NS:
            known.setdefault(info.host, info.clock)
        else:
            unknown.append(info)
    fits = {info.rank: known[info.host] for info in unknown if info.host in known}
    events = _brought_on(trace.events, fits)
    notes = trace.manifest.notes
    if len(fits) < len(unknown):
        # Events of the known ones are on rank 0's clock by now.
        prior = {host: ClockFit(uncertainty_ns=fit.uncertainty_ns) for host, fit in known.items()}
        try:
            found = fit_clocks(
                meetings_of(events, trace.hosts), list(dict.fromkeys(trace.hosts.values())), prior=prior
            )
        except UserError as missing:
            notes = (*notes, f"Clocks were not compared: {missing}")
        else:
            told = {info.rank: found[info.host] for info in unknown if info.host not in known}
            events = _brought_on(events, told)
            fits |= told
    ranks = tuple(
        info.model_copy(update={"clock": fits.get(info.rank, info.clock)}) for info in trace.manifest.ranks
    )
    manifest = trace.manifest.model_copy(update={"ranks": ranks, "notes": notes})
    write_trace(folder, manifest, trace.model, events)


def _brought_on(events: dict[int, Events], fits: dict[int, ClockFit]) -> dict[int, Events]:
    return {rank: aligned(rows, fits[rank]) if rank in fits else rows for rank, rows in events.items()}


def _present(staging: Path) -> tuple[list[Path], list[dict[str, object]]]:
    recorded = sorted(staging.glob("rank-*.parquet"))
    idle = [json.loads(path.read_text()) for path in sorted(staging.glob("status-*.json"))]
    return recorded, idle


def _stated_world_size(staging: Path) -> int | None:
    for path in staging.glob("status-*.json"):
        return int(json.loads(path.read_text())["world_size"])
    for path in staging.glob("rank-*.parquet"):
        import pyarrow.parquet as pq

        metadata = pq.read_schema(path).metadata or {}
        return int(json.loads(metadata[b"rank"])["world_size"])
    return None


def _why_nothing(idle: list[dict[str, object]]) -> LaunchError:
    if not idle:
        return LaunchError(
            "nothing was recorded",
            got="a command none of whose ranks initialised a process group",
            expected="torchrun, or one process a rank with RANK set, that calls init_process_group",
            fix="Check that the command starts ranks and that their Python can import headway.",
        )
    steps = idle[0]["steps"]
    return LaunchError(
        "nothing was recorded",
        got=f"{steps} optimizer steps",
        expected="more steps than the warm-up that --steps A:B leaves out",
        fix="Let the script step longer, or record earlier with --steps 1:4.",
    )
