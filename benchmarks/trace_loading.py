"""How fast Kineto files are loaded, compared with HolisticTraceAnalysis on the same files.

    python benchmarks/trace_loading.py [--quick] [--only CASE] [--json FILE]

HolisticTraceAnalysis lives in an environment of its own, as it does not bear this one's pandas: HTA_PYTHON names its
interpreter; TRACES names a folder with the files (by default ../shared/data/traces next to the repository). Both tools
load the same folder in turn, several times, each time in a new process whose start and imports are not counted. Loading
is everything between files on disk and a table of events per rank in memory; both may use both cores. What is kept
differs, and is said with the figures.
"""

from __future__ import annotations

import gzip
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import large_trace
import numpy as np
from common import parse_arguments, report

ROOT = Path(__file__).parents[1]
A100, MI300 = "kineto_nccl_a100_rank0of2.json.gz", "kineto_rccl_mi300_rank0of8.json.gz"
CASES = {
    "a100-1-rank": (A100, 1),
    "mi300-1-rank": (MI300, 1),
    "a100-16-ranks": (A100, 16),
    "mi300-16-ranks": (MI300, 16),
}
LARGE = "own-64-ranks-50-steps-2000-events"
WORKER = "--load"

_HTA = """
import json, logging, sys, time, warnings
import numpy.ma
logging.disable(logging.CRITICAL)
warnings.simplefilter("ignore")
from hta.common.trace import Trace
folder, ranks = sys.argv[1], int(sys.argv[2])
files = {rank: f"{folder}/rank{rank}.json.gz" for rank in range(ranks)}
begin = time.perf_counter()
trace = Trace(files, folder)
trace.parse_traces(use_multiprocessing=ranks > 1)
seconds = time.perf_counter() - begin
print(json.dumps({"seconds": seconds, "rows": sum(len(trace.get_trace(rank)) for rank in range(ranks))}))
"""


def main() -> None:
    if sys.argv[1:2] == [WORKER]:
        _load(Path(sys.argv[2]))
        return
    arguments = parse_arguments(__doc__ or "", [*CASES, LARGE])
    rounds = 2 if arguments.quick else 7
    rows = []
    for case in [arguments.only] if arguments.only else [*CASES, LARGE]:
        rows += _large_rows(3) if case == LARGE else _rows(case, *CASES[case], rounds)
    words = (
        "What loading Kineto files (gzip) takes, both tools in turn in one run: medians, the least and the most. "
        "`document_events` is how many events the files hold. Headway decodes them all and keeps what a diagnosis "
        "needs (kernels with their phase and step, collectives, waits); HolisticTraceAnalysis keeps most complete "
        "events and some of their arguments in a data frame. `bound_ms` is unpacking the files, one after the other. "
        "The last case is a synthetic trace in Headway's own format: `load` reads it, `diagnose` reads and diagnoses "
        "it; its bound is reading the Parquet files."
    )
    report("trace_loading", rows, arguments, words)


def _rows(case: str, name: str, ranks: int, rounds: int) -> list[dict[str, Any]]:
    source = Path(os.environ.get("TRACES", ROOT.parent / "shared" / "data" / "traces")) / name
    if not source.is_file():
        raise SystemExit(f"{source} is not there: say where the files are with TRACES=FOLDER")
    hta = os.environ.get("HTA_PYTHON")
    commands = {"headway": [sys.executable, __file__, WORKER]}
    if hta:
        commands["HolisticTraceAnalysis"] = [hta, "-c", _HTA]
    with tempfile.TemporaryDirectory() as folder:
        count, unpack_ms = _lay_out(source, Path(folder), ranks)
        times: dict[str, list[float]] = {method: [] for method in commands}
        kept: dict[str, int] = {}
        for _ in range(rounds):
            for method, command in commands.items():
                said = _run([*command, folder, str(ranks)])
                times[method].append(1e3 * said["seconds"])
                kept[method] = said["rows"]
    rows: list[dict[str, Any]] = []
    for method, taken in times.items():
        time_ms = statistics.median(taken)
        row = {
            "case": case,
            "method": method,
            "time_ms": time_ms,
            "bound_ms": unpack_ms,
            "ratio": time_ms / unpack_ms,
        }
        row |= {
            "least_ms": min(taken),
            "most_ms": max(taken),
            "document_events": count,
            "kept_rows": kept[method],
        }
        row["events_per_s"] = round(count / time_ms * 1e3)
        rows.append(row)
    if hta:
        ours, theirs = (statistics.median(times[method]) for method in ("headway", "HolisticTraceAnalysis"))
        rows[0]["faster_by"] = round(theirs / ours, 1)
    return rows


def _large_rows(rounds: int) -> list[dict[str, Any]]:
    """Load and diagnose a trace of 64 ranks, 50 steps and 2,000 events a step, with the memory that takes."""
    with tempfile.TemporaryDirectory() as folder:
        count = large_trace.write(Path(folder) / "trace", ranks=64, steps=50, events=2000)
        rows: list[dict[str, Any]] = []
        for method in large_trace.METHODS:
            said = [
                _run([sys.executable, large_trace.__file__, method, f"{folder}/trace"]) for _ in range(rounds)
            ]
            taken = [1e3 * one["seconds"] for one in said]
            time_ms = statistics.median(taken)
            bound_ms = 1e3 * min(one["read_seconds"] for one in said)
            row = {
                "case": LARGE,
                "method": method,
                "time_ms": time_ms,
                "bound_ms": bound_ms,
                "ratio": time_ms / bound_ms,
            }
            row |= {
                "least_ms": min(taken),
                "most_ms": max(taken),
                "document_events": count,
                "kept_rows": count,
            }
            rows.append(
                row
                | {"events_per_s": round(count / time_ms * 1e3), "peak_gb": max(one["gb"] for one in said)}
            )
    return rows


def _lay_out(source: Path, folder: Path, ranks: int) -> tuple[int, float]:
    """``ranks`` copies of a file that say of themselves which rank they are; their events, and what unpacking takes."""
    document = json.loads(gzip.decompress(source.read_bytes()))
    for rank in range(ranks):
        document["distributedInfo"] |= {"rank": rank, "world_size": ranks}
        path = folder / f"rank{rank}.json.gz"
        with gzip.open(path, "wb", compresslevel=6) as file:
            file.write(json.dumps(document).encode())
    begin = time.perf_counter()
    for path in folder.iterdir():
        with gzip.open(path) as packed:
            shutil.copyfileobj(packed, open(os.devnull, "wb"), 2**24)  # noqa: SIM115
    return ranks * len(document["traceEvents"]), 1e3 * (time.perf_counter() - begin)


def _run(command: list[str]) -> dict[str, Any]:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command[:2])} failed: {done.stderr[-2000:]}")
    said: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return said


def _load(folder: Path) -> None:
    from headway.interop.readers import importing
    from headway.interop.readers.document import Sources
    from headway.interop.readers.formats import readers
    from headway.interop.readers.importing import read_all

    for reader in readers().values():
        reader.recognises("", b"")  # imports its module
    np.unique(np.zeros(2))  # imports numpy's masked arrays
    begin = time.perf_counter()
    with Sources(folder) as sources:
        documents, _ = importing.sort_out(sources.find(), importing.AUTO)
        done = read_all(documents, lenient=False, workers=os.cpu_count() or 1, progress=lambda done, of: None)
    seconds = time.perf_counter() - begin
    print(json.dumps({"seconds": seconds, "rows": sum(len(one.events) for one in done.ranks)}))


if __name__ == "__main__":
    main()
