"""Assembles the rank files of a recording into a trace, or raises an error that says why there is none."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from headway import files
from headway.clocks import aligned, fit_clocks, meetings_of
from headway.clocks.comparing import UNKNOWN_NS
from headway.errors import LaunchError, TraceError, UserError, one_line
from headway.recording.averaging import realigned
from headway.recording.place import ATTEMPT, Recording, read_description
from headway.trace.events import Events
from headway.trace.folder import CLUSTER, assemble, load_trace, write_manifest, write_trace
from headway.trace.format import MAX_COMMAND_WORD, MAX_COMMAND_WORDS, ClockFit, RankRounds

WAIT_FOR_RANKS_S = 60.0
HIDDEN = "***"
_SECRET = re.compile(
    r"(-*(?:\w+[-_])*(?:token|secret|password|passwd|(?:api|access)[-_]?key))(=.*)?",
    re.IGNORECASE | re.DOTALL,
)


@dataclass(frozen=True)
class _Attempt:
    """The files that the ranks of one attempt have written to its folder so far."""

    folder: Path
    description: Recording | None
    recorded: tuple[Path, ...]
    idle: tuple[dict[str, object], ...]
    world_size: int | None

    @property
    def is_complete(self) -> bool:
        """Whether every rank has written its file or its status."""
        return self.world_size is not None and len(self.recorded) + len(self.idle) >= self.world_size

    @property
    def rank(self) -> tuple[bool, float]:
        """The sort key for choosing an attempt: complete recordings first, then the newest."""
        started_s = self.description.started_s if self.description else 0.0
        return self.world_size is not None and len(self.recorded) >= self.world_size, started_s


def finish_recording(
    staging: Path,
    out: Path,
    world_size: int | None,
    *,
    wait_s: float = WAIT_FOR_RANKS_S,
    incomplete: bool = False,
    command: Sequence[str] = (),
) -> None:
    """Assemble the newest complete attempt in ``staging`` into a trace at ``out``.

    ``world_size=None`` takes it from the files. Waits up to ``wait_s`` for ranks on other hosts. If some never write
    a file, ``incomplete`` allows a trace without them, with a note. ``command`` is the command that started the ranks.
    ``staging`` is always removed. Raises LaunchError if nothing was recorded, TraceError if ``out`` cannot be written.
    """
    try:
        attempts = _awaited(staging, world_size, wait_s)
        recorded = [attempt for attempt in attempts if attempt.recorded]
        if not recorded:
            raise _why_nothing(attempts[-1].idle)
        chosen = max(recorded, key=lambda attempt: attempt.rank)
        _remove_all_but_the_trace(chosen.folder)
        manifest = assemble(chosen.folder, missing_ok=incomplete)
        if not manifest.steps:
            raise _why_nothing(({"steps": "no"},))
        write_manifest(
            chosen.folder,
            manifest.model_copy(
                update={**_told_by(chosen.description), "command": redacted_command(command)}
            ),
        )
        if any(info.clock.uncertainty_ns >= UNKNOWN_NS for info in manifest.ranks):
            _compare_clocks(chosen.folder)
        chosen.folder.replace(out)
    except OSError as failure:
        raise TraceError(f"{out} cannot be written", got=failure.strerror) from None
    finally:
        files.remove_folder(staging)


def redacted_command(command: Sequence[str]) -> tuple[str, ...]:
    """``command`` with likely secrets hidden; empty if it is too long or not text."""
    if len(command) > MAX_COMMAND_WORDS or any(len(word) > MAX_COMMAND_WORD for word in command):
        return ()
    if not all(map(_is_text, command)):
        return ()
    kept: list[str] = []
    hides_next = False
    for word in command:
        secret = _SECRET.fullmatch(word)
        if hides_next and not word.startswith("-"):
            kept.append(HIDDEN)
        elif secret is not None and secret[2]:
            kept.append(f"{secret[1]}={HIDDEN}")
        else:
            kept.append(word)
        hides_next = secret is not None and not secret[2] and word.startswith("-")
    return tuple(kept)


def _is_text(word: str) -> bool:
    try:
        word.encode()
    except UnicodeEncodeError:  # bytes that are not text cannot be stored as JSON
        return False
    return True


def _told_by(description: Recording | None) -> dict[str, object]:
    if description is None:
        return {}
    begun = datetime.fromtimestamp(round(description.started_s), UTC) if description.started_s else None
    return {"run": description.run, "attempt": description.attempt, "recorded_at": begun}


def _awaited(staging: Path, world_size: int | None, wait_s: float) -> list[_Attempt]:
    """The attempts in ``staging``, newest last, once the newest is complete or ``wait_s`` is over."""
    deadline = time.monotonic() + wait_s
    while True:
        if not staging.is_dir():
            raise TraceError(
                "the recording's folder was removed during the recording", got=staging, fix="Record again."
            )
        folders = [path for path in staging.glob(f"{ATTEMPT}*") if path.is_dir()] or [staging]
        attempts = sorted((_attempt(folder, world_size) for folder in folders), key=lambda path: path.rank[1])
        newest = attempts[-1]
        if newest.is_complete or newest.world_size is None or time.monotonic() > deadline:
            return attempts
        time.sleep(0.1)


def _attempt(folder: Path, world_size: int | None) -> _Attempt:
    description = read_description(folder)
    recorded = tuple(sorted(folder.glob("rank-*.parquet")))
    idle = tuple(_status(path) for path in sorted(folder.glob("status-*.json")))
    expected = world_size or (description.world_size if description else _stated_world_size(recorded, idle))
    return _Attempt(folder, description, recorded, idle, expected)


def _status(path: Path) -> dict[str, object]:
    status = json.loads(files.read_text(path, TraceError, "status", 65_536))
    return status if isinstance(status, dict) else {}


def _remove_all_but_the_trace(folder: Path) -> None:
    for path in folder.iterdir():
        if path.name != CLUSTER and not (path.name.startswith("rank-") and path.suffix == ".parquet"):
            files.remove_folder(path) if path.is_dir() else path.unlink()


def _compare_clocks(folder: Path) -> None:
    """Align clocks without round trips by the collectives and messages of their ranks.

    Ranks of one host share a clock: a fit known on one of them holds for all.
    """
    trace = load_trace(folder)
    fit_of_host: dict[str, ClockFit] = {}
    unknown = []
    for info in sorted(trace.manifest.ranks, key=lambda info: info.clock.uncertainty_ns):
        if info.clock.uncertainty_ns < UNKNOWN_NS:
            fit_of_host.setdefault(info.host, info.clock)
        else:
            unknown.append(info)
    fits = {info.rank: fit_of_host[info.host] for info in unknown if info.host in fit_of_host}
    events, rounds = _brought_on(trace.events, fits), _rounds_brought_on(trace.rounds, fits)
    notes = trace.manifest.notes
    if len(fits) < len(unknown):
        # Events of hosts with a fit are already on rank 0's clock.
        prior = {host: ClockFit(uncertainty_ns=fit.uncertainty_ns) for host, fit in fit_of_host.items()}
        try:
            fitted = fit_clocks(
                meetings_of(events, trace.hosts), list(dict.fromkeys(trace.hosts.values())), prior=prior
            )
        except UserError as missing:
            notes = (*notes, f"Clocks were not aligned: {missing}")
        else:
            by_causality = {info.rank: fitted[info.host] for info in unknown if info.host not in fit_of_host}
            events, rounds = _brought_on(events, by_causality), _rounds_brought_on(rounds, by_causality)
            fits |= by_causality
    ranks = tuple(
        info.model_copy(update={"clock": fits.get(info.rank, info.clock)}) for info in trace.manifest.ranks
    )
    manifest = trace.manifest.model_copy(update={"ranks": ranks, "notes": notes})
    write_trace(folder, manifest, trace.model, events, rounds=rounds)


def _brought_on(events: dict[int, Events], fits: dict[int, ClockFit]) -> dict[int, Events]:
    return {rank: aligned(rows, fits[rank]) if rank in fits else rows for rank, rows in events.items()}


def _rounds_brought_on(rounds: dict[int, RankRounds], fits: dict[int, ClockFit]) -> dict[int, RankRounds]:
    return {
        rank: realigned(round_, fits[rank]) if rank in fits else round_ for rank, round_ in rounds.items()
    }


def _stated_world_size(recorded: Sequence[Path], idle: Sequence[dict[str, object]]) -> int | None:
    for status in idle:
        return int(str(status["world_size"]))
    for path in recorded:
        import pyarrow.parquet as pq

        metadata = pq.read_schema(path).metadata or {}
        return int(json.loads(metadata[b"rank"])["world_size"])
    return None


def _why_nothing(idle: Sequence[dict[str, object]]) -> LaunchError:
    if not idle:
        return LaunchError(
            "nothing was recorded",
            got="a command in which no process initialised a process group",
            expected="torchrun, or another launcher, starting ranks that call init_process_group",
            fix="Check that the ranks' Python can import headway, and does not run with -I or -E.",
        )
    steps = idle[0]["steps"]
    if why := next((str(status["fault"]) for status in idle if status.get("fault")), ""):
        return LaunchError(
            "nothing was recorded", got=one_line(why), fix="Please report this; the job itself went on."
        )
    return LaunchError(
        "nothing was recorded",
        got=f"{steps} optimizer steps",
        expected="more steps than the warm-up before A in --steps A:B",
        fix="Let the script train longer, or record earlier with --steps 1:4.",
    )
