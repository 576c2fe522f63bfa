"""Jobs whose ranks' memory is watched from outside: from when all are ready until they end."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

from headway.lab import launch
from headway.lab.spec import parse_spec
from memory.job import GO
from memory.watching import Watching

TIMEOUT_S = 600.0


def run(
    command: list[str], workers: int, folder: Path, what: str, *, watched: bool, **more: str
) -> list[int]:
    """Run ``command`` on ``workers`` ranks; by how many bytes each grew at most, if it is ``watched``.

    A rank that is watched says in ``folder`` that it is ready, and waits to be let go. Ends with the job's last lines
    where it fails; ``what`` names it there.
    """
    spec = parse_spec({"hosts": [{"name": f"host{rank}"} for rank in range(workers)]})
    lines: list[str] = []
    grown: list[int] = []
    looking = threading.Thread(target=_look, args=(workers, folder, grown))
    if watched:
        looking.start()
    status = launch.run(
        spec,
        command,
        mode="loopback",
        env={**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "65536"},
        timeout_s=TIMEOUT_S,
        on_line=lambda rank, _, line: lines.append(f"[{rank}] {line}"),
        on_notice=lines.append,
    )
    (folder / "ended").touch()
    if watched:
        looking.join()
    if status != 0:
        raise SystemExit("\n".join([*lines[-20:], f"{what}: the job ended with status {status}"]))
    return grown


def _look(workers: int, folder: Path, grown: list[int]) -> None:
    """Wait until all ranks are ready, let them go and watch them until they end."""
    files = [folder / f"pid-{rank}" for rank in range(workers)]
    ended = folder / "ended"
    while not all(file.exists() and file.read_text() for file in files):
        if ended.exists():
            return
        time.sleep(0.01)
    time.sleep(0.2)
    watching = Watching([int(file.read_text()) for file in files])
    (folder / GO).touch()
    while not ended.exists():
        time.sleep(0.05)
    grown += watching.stop()
