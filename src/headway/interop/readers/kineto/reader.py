"""PyTorch's Kineto: what ``torch.profiler`` exports, from NCCL, RCCL and Gloo jobs, since 2022."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import PurePath

from headway.arrays import Indices
from headway.errors import TraceError
from headway.interop.readers.foreign import Companion, Document, ForeignRank, Reading
from headway.interop.readers.kineto import steps
from headway.interop.readers.kineto.companions import Known
from headway.interop.readers.kineto.device import device_events, host_events
from headway.interop.readers.kineto.document import DEVICE, Head, KinetoDocument, no_collections, parse
from headway.interop.readers.kineto.steps import steps_of
from headway.interop.readers.ranks import rank_in_name

_OWN_KEYS = (b'"schemaVersion"', b'"deviceProperties"', b'"distributedInfo"', b'"baseTimeNanoseconds"')
_OWN_EVENTS = (
    b'"cpu_op"',
    b'"user_annotation"',
    b'"cuda_runtime"',
    b'"kernel"',
    b'"gpu_memcpy"',
    b'"Operator"',
)
_WORKER = re.compile(r"^(?P<host>[A-Za-z][\w.\-]*?)_\d+\.\d+\.pt\.trace\.json")


def recognises(name: str, head: bytes) -> bool:
    """Whether a document is Kineto's: by the keys around its events, or by their categories."""
    start = head.lstrip()[:1]
    if start == b"{" and any(key in head for key in _OWN_KEYS):
        return True
    return start in (b"{", b"[") and any(own in head for own in _OWN_EVENTS) and b'"ph"' in head


def read(document: Document, companions: Sequence[Companion] = ()) -> Reading:
    """Read one rank's document; ``companions`` may say what it leaves out of its collectives.

    Raises TraceError where it is damaged, or holds nothing that takes time.
    """
    with no_collections():
        found = parse(document)
        if not len(found):
            raise TraceError(
                f"{document.name} holds no operators and no kernels",
                expected="a recording of torch.profiler",
                fix="Record with activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA].",
            )
        processes = found.processes() if len(_pids(found)) > 1 else {}
        if len(processes) > 1:
            return Reading(ranks=_split(document, found, processes, companions))
        if len(pids := _pids(found)) > 1:
            raise TraceError(
                f"{document.name} holds the operators of several processes, which cannot be told apart",
                got=f"processes {', '.join(sorted(pids)[:4])}",
                expected="one document a rank",
                fix="Import the documents that it was merged from.",
            )
        return Reading(ranks=[_rank(document, found, companions)])


def _pids(found: KinetoDocument) -> set[str]:
    """The processes whose steps are marked, or whose operators are there."""
    marks = steps.named(found, "ProfilerStep")
    marks = marks if len(marks) else found.of_category("cpu_op", "Operator")
    pids = (entry.pid for entry in found.entries[marks].tolist())
    return {str(pid)[:100] for pid in {pid if isinstance(pid, (str, int)) else str(pid) for pid in pids}}


def _split(
    document: Document,
    found: KinetoDocument,
    processes: Mapping[str, Indices],
    companions: Sequence[Companion],
) -> list[ForeignRank]:
    """The ranks of a merged document, numbered as their labels say, or else in the order of the labels."""
    ranks = []
    stated = [rank_in_name(label) for label in processes]
    numbered = len(set(stated)) == len(stated) and None not in stated
    for place, (label, rows) in enumerate(processes.items()):
        rank = stated[place] if numbered else place
        own = _rank(replace(document, name=f"{document.name} [{label}]"), found.where(rows), companions, rank)
        if not numbered:
            own.notes.append(
                "The document holds several ranks, which are numbered in the order of their labels."
            )
        ranks.append(own)
    return ranks


def _rank(
    document: Document, found: KinetoDocument, companions: Sequence[Companion], merged_as: int | None = None
) -> ForeignRank:
    steps = steps_of(found)
    info = found.head.distributed
    rank = merged_as
    if rank is None:
        rank = info.rank if isinstance(info.rank, int) else rank_in_name(document.name)
    known = Known.of_rank(rank, companions)
    make = device_events if len(found.of_category(*DEVICE)) else host_events
    events, notes = make(found, steps, known)
    if not steps.stated:
        notes.append(
            "Nothing marks steps (profiler.step() was not called): everything is taken for one step."
        )
    return ForeignRank(
        source=document.name,
        framework="pytorch",
        events=events,
        rank=rank,
        world_size=info.world_size if isinstance(info.world_size, int) and info.world_size > 0 else None,
        host=str(found.head.host)[:200] or _host(document.name),
        backend=str(info.backend or "")[:40],
        absolute=True,
        on_device=make is device_events,
        device=found.head.device if make is device_events else "",
        groups={**_groups(found.head), **known.groups},
        dropped_events=found.dropped,
        notes=[*_whole(found), *found.notes, *notes],
    )


def _host(name: str) -> str:
    """The host that the profiler's own handler puts into the names of its files."""
    match = _WORKER.match(PurePath(name.replace(":", "/")).name)
    return match["host"] if match else ""


def _groups(head: Head) -> dict[str, tuple[int, ...]]:
    groups = {}
    for group in head.distributed.pg_config:
        if isinstance(group.name, str) and isinstance(group.ranks, list):
            members = tuple(rank for rank in group.ranks if isinstance(rank, int))
            if members:
                groups[group.name[:200]] = members
    return groups


def _whole(found: KinetoDocument) -> list[str]:
    if not found.head.base_ns and found.start_ns[-1] < 10**18:
        return ["Times do not count from a stated moment: clocks are told apart by causality alone."]
    return []
