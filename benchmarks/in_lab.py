"""Running one case of a benchmark on a lab."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from headway.lab import launch
from headway.lab.spec import LabSpec


def run_in_lab(
    case: str,
    lab: LabSpec,
    command: Sequence[str],
    timeout_s: float,
    environment: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Run ``command`` as every rank of ``lab``, of one thread each. Raises SystemExit where it fails."""
    status = launch.run(
        lab, command, env={**os.environ, "OMP_NUM_THREADS": "1", **environment}, timeout_s=timeout_s,
        on_line=_say_line, on_notice=lambda _: None,
    )  # fmt: skip
    if status != 0:
        raise SystemExit(f"{case}: the job ended with status {status}")


def _say_line(rank: int, _stream: str, line: str) -> None:
    """Pass a rank's line on, but for torch's complaint that a lab's addresses have no names."""
    if "hostname of the client socket" not in line:
        print(f"[{rank}] {line}", file=sys.stderr, flush=True)
