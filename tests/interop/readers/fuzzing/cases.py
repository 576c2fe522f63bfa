"""Cases: fixtures of a job, one or two of them harmed, imported as a whole; and what came of it, within bounds."""

from __future__ import annotations

import gzip
import json
import random
import re
import shutil
import tempfile
import time
import traceback
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from tests.interop.readers.fuzzing.json_harm import harmed_json
from tests.interop.readers.fuzzing.wire_harm import harmed_frames, harmed_message

from headway.diagnosis import diagnose
from headway.errors import UserError
from headway.interop.readers.formats import readers
from headway.interop.readers.importing import import_trace
from headway.trace.folder import load_trace

FIXTURES = Path(__file__).parents[1] / "fixtures"
# Their documents by patterns of paths, in FIXTURES where they are relative.
JOBS: dict[str, list[str]] = {
    "kineto": ["kineto/rank?.json.gz"],
    "kineto with companions": ["kineto/*.gz"],
    "execution-trace": ["execution_trace/*_rank_0.json.gz"],
    "flight-recorder": ["flight_recorder/*_0.json", "execution_trace/kineto_rank_0.json.gz"],
    "chakra": ["chakra/gloo.0.et.gz"],
    "chakra as text": ["chakra/text.*.et"],
    "chakra, small": ["chakra/dependent.0.et"],
}
LIMIT_S = 5.0
LIMIT_BYTES = 150 * 2**20  # the libraries that a first case loads, and
LIMIT_RATIO = 150  # of what is imported, unpacked
IMPORTED, REFUSED = GOOD = ("imported", "refused")
CRASHED, UNDIAGNOSED = "crashed", "cannot be diagnosed"
SLOW, LARGE, LITTERED, WORDY = "too slow", "too large", "left files behind", "not one line"


@dataclass(frozen=True)
class Case:
    """What is imported: the contents of files by their names."""

    job: str
    files: dict[str, bytes]
    lenient: bool
    format_name: str


@dataclass(frozen=True)
class Outcome:
    """What came of a case: one of GOOD or of what should not be.

    ``seconds`` are the processor's, as machines are shared. ``growth_bytes`` is how much more memory the process needed
    at its peak than before.
    """

    kind: str
    said: str
    seconds: float
    growth_bytes: int


@cache
def _documents(job: str) -> dict[str, bytes]:
    """The fixtures of a job, unpacked."""
    patterns = [FIXTURES / pattern for pattern in JOBS[job]]
    paths = sorted({path for pattern in patterns for path in pattern.parent.glob(pattern.name)})
    assert paths, job
    data = {path.name: path.read_bytes() for path in paths}
    return {name: gzip.decompress(one) if name.endswith(".gz") else one for name, one in data.items()}


@cache
def _shortened(job: str, events: int) -> dict[str, bytes]:
    """The same with the first ``events`` of each document's events."""
    return {name: _first(data, events) for name, data in _documents(job).items()}


def _first(data: bytes, events: int) -> bytes:
    document = _parsed(data)
    if isinstance(document, dict):
        for key, value in document.items():
            if isinstance(value, list):
                document[key] = value[:events]
    elif isinstance(document, list):
        document = document[:events]
    return data if document is None else json.dumps(document).encode()


def _parsed(data: bytes) -> Any:
    """A JSON document; None of what is none. Horovod's are never closed."""
    for closed in (data, data.rstrip().rstrip(b",") + b"]"):
        try:
            return json.loads(closed)
        except ValueError:
            continue
    return None


def make_case(draw: random.Random, job: str, *, events: int = 0) -> Case:
    """A case of ``job``. Documents are shortened to ``events`` where that is not 0."""
    files = dict(_shortened(job, events) if events else _documents(job))
    for name in draw.sample(sorted(files), min(len(files), draw.choice((1, 1, 1, 2)))):
        files[name] = _harmed(draw, name, files[name])
    packed = {
        name: gzip.compress(data, 1, mtime=0) if name.endswith(".gz") else data
        for name, data in files.items()
    }
    if draw.random() < 0.15:  # what is stored, and not what is in it
        name = draw.choice(sorted(packed))
        packed[name] = _harmed_bytes(draw, packed[name])
    if draw.random() < 0.05:
        name = draw.choice(sorted(packed))
        packed[re.sub(r"\d", draw.choice(("", "7", "99999999", "-1", "\x1b[31m")), name)] = packed.pop(name)
    forced = draw.choice(list(readers())) if draw.random() < 0.05 else "auto"
    return Case(job, packed, draw.random() < 0.6, forced)


def _harmed(draw: random.Random, name: str, data: bytes) -> bytes:
    if not data or draw.random() < 0.3:
        return _harmed_bytes(draw, data)
    if ".xplane.pb" in name:
        return harmed_message(draw, data)
    document = _parsed(data)
    if document is not None:
        return harmed_json(draw, document)
    return harmed_frames(draw, data)


def _harmed_bytes(draw: random.Random, data: bytes) -> bytes:
    """Bytes changed, then perhaps cut at either end, or with a stretch left out, repeated or put in."""
    made = bytearray(data)
    for _ in range(draw.choice((0, 1, 1, 2, 5, 50)) if data else 0):
        made[draw.randrange(len(made))] = draw.choice(
            (draw.randrange(256), 0, 255, ord('"'), ord("{"), ord("-"))
        )
    first, second = sorted((draw.randrange(len(data) + 1), draw.randrange(len(data) + 1)))
    return draw.choice(
        [
            bytes(made), bytes(made), bytes(made[:first]), bytes(made[first:]), bytes(made[:first] + made[second:]),
            bytes(made[:second] + made[first:]), bytes(made) * 2, b"",
            bytes(made[:first]) + draw.randbytes(draw.randrange(300)) + bytes(made[first:]),
        ]
    )  # fmt: skip


def run_case(case: Case) -> Outcome:
    """Import the case, in a folder that is removed."""
    folder = Path(tempfile.mkdtemp(prefix="fuzz"))
    try:
        (folder / "in").mkdir()
        for name, data in case.files.items():
            (folder / "in" / name).write_bytes(data)
        return _imported(case, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _imported(case: Case, folder: Path) -> Outcome:
    before_bytes = _reset_peak()
    begin = time.process_time()
    kind, said = IMPORTED, ""
    try:
        import_trace(folder / "in", folder / "out", lenient=case.lenient, format_name=case.format_name)
    except UserError as failure:
        kind, said = REFUSED, str(failure)
        if len(said.splitlines()) != 1 or not said.isprintable():
            kind = WORDY
        elif "cannot be used: it raised" in said:  # what a reader of another package raised
            kind = CRASHED
    except Exception:
        kind, said = CRASHED, traceback.format_exc()
    if kind == IMPORTED:
        try:
            diagnose(load_trace(folder / "out"))
        except Exception:
            kind, said = UNDIAGNOSED, traceback.format_exc()
    seconds, growth_bytes = time.process_time() - begin, _peak() - before_bytes
    behind = {path.name for path in folder.iterdir()}
    if kind in GOOD and behind != ({"in", "out"} if kind == IMPORTED else {"in"}):
        kind, said = LITTERED, f"{sorted(behind)} {said}"
    if kind in GOOD and seconds > LIMIT_S:
        kind = SLOW
    whole_bytes = sum(len(data) for data in _documents(case.job).values())
    if kind in GOOD and growth_bytes > LIMIT_BYTES + LIMIT_RATIO * whole_bytes:
        kind = LARGE
    return Outcome(kind, said, seconds, growth_bytes)


def _reset_peak() -> int:
    """Forget the process's highest memory (Linux does, if it may), and say what it has now."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def _peak() -> int:
    return _status("VmHWM")


def _status(name: str) -> int:
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(found[1]) * 1024 if found else 0
